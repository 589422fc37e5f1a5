"""A Hugging Face checkpoint directory: the experts of one rank, and everything that is no expert.

Letters: E logical experts, L local physical experts, H hidden, I intermediate; W = 2I where the activation is gated.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ep_moe.config import DTYPES, MoEConfig
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, quantise_weight, weight_scale_shape
from ep_moe.weights.families import ExpertTensor, Family, family_of, moe_config_of, read_config
from ep_moe.weights.storage import StoredTensor, TensorReader, list_tensors

Form = tuple[ExpertTensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a directory holds; nothing but headers is read to build it."""

    directory: Path
    config: MoEConfig
    family: Family
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read config.json and the headers of the safetensors files.

        Errors: ValueError as of `moe_config` and `list_tensors`, and for weights that are quantised on disk. Local.
        """
        raw, name = read_config(directory)
        quantised = raw.get("quantization_config")
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise ValueError(f"{name}: weights are quantised on disk ({method!r}); {', '.join(DTYPES)} are read")
        return cls(
            directory=Path(directory),
            config=moe_config_of(raw, name),
            family=family_of(raw, name),
            tensors=list_tensors(directory),
        )

    @functools.cached_property
    def _expert_tensors(self) -> dict[str, tuple[int, Form]]:
        """Name of every expert tensor -> its layer and the form that the name belongs to."""
        patterns = [(_regex(tensor.name), form) for form in self.family.forms for tensor in form]
        found = {}
        for name in self.tensors:
            for pattern, form in patterns:
                match = pattern.fullmatch(name)
                if match is None:
                    continue
                expert = int(match.groupdict().get("expert", 0))
                if expert >= self.config.num_experts:
                    raise ValueError(
                        f"{name} in {self.tensors[name].file} is of expert {expert}, "
                        f"but num_experts is {self.config.num_experts}"
                    )
                found[name] = int(match["layer"]), form
        return found

    @functools.cached_property
    def layers(self) -> dict[int, Form]:
        """The MoE layers, ascending, and how each stores its experts.

        Errors: ValueError for a layer that is stored in two forms, which may differ, with a tensor of each.
        """
        firsts: dict[int, tuple[str, Form]] = {}
        for name, (layer, form) in self._expert_tensors.items():
            other, found = firsts.setdefault(layer, (name, form))
            if found != form:
                raise ValueError(
                    f"layer {layer} of {self.directory} has its experts in two forms: {other} in "
                    f"{self.tensors[other].file}, {name} in {self.tensors[name].file}"
                )
        return {layer: form for layer, (_, form) in sorted(firsts.items(), key=lambda entry: entry[0])}

    def find(self, tensor: ExpertTensor, layer: int, expert: int) -> StoredTensor:
        """Return where an expert's tensor lies; a stacked one is the same for every expert.

        Errors: ValueError names the tensor where it is missing, misshapen or no plain float. Local.
        """
        name = tensor.name.format(layer=layer, expert=expert)
        stored = self.tensors.get(name)
        if stored is None:
            raise ValueError(f"{name} is missing in {self.directory}")
        expected = tensor.shape(self.config)
        if stored.shape != expected:
            raise ValueError(f"{name} in {stored.file} is {list(stored.shape)}, expected {list(expected)}")
        if stored.dtype not in DTYPES.values():
            raise ValueError(f"{name} in {stored.file} is {stored.dtype}; {', '.join(DTYPES)} are read")
        return stored

    def check_layer(self, layer: int) -> torch.dtype:
        """Check that all E experts of a layer are there, so that every rank raises what one would.

        Returns: the dtype that they have on disk. Errors: ValueError as of `find`, or for several dtypes. Local.
        """
        dtype: torch.dtype | None = None
        for tensor in self.layers[layer]:
            for expert in range(1 if tensor.stacked else self.config.num_experts):
                stored = self.find(tensor, layer, expert)
                dtype = stored.dtype if dtype is None else dtype
                if stored.dtype != dtype:
                    raise ValueError(
                        f"{stored.name} in {stored.file} is {stored.dtype}, other experts of layer {layer} are {dtype}"
                    )
        assert dtype is not None
        return dtype

    def read_matrix(self, reader: TensorReader, layer: int, field: str, expert: int, out: torch.Tensor) -> None:
        """Read one expert's w13 [W, H], gate above up, or w2 [H, I] into `out`, which says dtype and device. Local."""
        for tensor in self.layers[layer]:
            if tensor.field != field:
                continue
            rows = out
            if tensor.rows != "all":
                gate, up = out.chunk(2)
                rows = gate if tensor.rows == "gate" else up
            reader.read_into(self.find(tensor, layer, expert), rows, index=expert if tensor.stacked else None)

    def dense(self) -> "DenseTensors":
        """Everything that is no expert, by the names of the transformers model."""
        dense = {}
        for name, stored in self.tensors.items():
            if name not in self._expert_tensors:
                for old, new in self.family.renames:
                    name = name.replace(old, new)
                dense[name] = stored
        return DenseTensors(dense)


class DenseTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint that are no experts; each access reads one from disk, to the CPU.

    A context manager: at its end the files are closed that accesses have left open.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored
        self._reader = TensorReader()

    def __enter__(self) -> "DenseTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._reader.read_into(stored, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read_experts(
    checkpoint: Checkpoint,
    placement: Placement,
    rank: int,
    *,
    scheme: QuantScheme,
    layers: Iterable[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, dict[str, torch.Tensor]]:
    """Read one rank's experts. `ExpertWeights.from_pretrained` has the arguments and the errors.

    Returns: layer -> the tensors of `ExpertWeights` by field. Local; synchronises with `device`.
    """
    directory = checkpoint.directory
    if placement.num_experts != checkpoint.config.num_experts:
        raise ValueError(
            f"the placement has {placement.num_experts} experts, {directory} has {checkpoint.config.num_experts}"
        )
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype ({dtype}) is not one of {', '.join(DTYPES)}")
    chosen = list(checkpoint.layers if layers is None else layers)
    unknown = [layer for layer in chosen if layer not in checkpoint.layers]
    if unknown:
        raise ValueError(f"layer {unknown[0]} of {directory} has no experts; layers {list(checkpoint.layers)} have")
    stored_dtypes = {layer: checkpoint.check_layer(layer) for layer in chosen}
    experts = placement.local_experts(rank)
    with TensorReader() as reader:
        return {
            layer: _read_layer(checkpoint, reader, layer, experts, dtype or stored_dtypes[layer], scheme, device)
            for layer in chosen
        }


def _read_layer(
    checkpoint: Checkpoint,
    reader: TensorReader,
    layer: int,
    experts: tuple[int, ...],
    dtype: torch.dtype,
    scheme: QuantScheme,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    config = checkpoint.config
    gated = 2 if config.activation.kind.gated else 1
    matrices = {"w13": (gated * config.intermediate, config.hidden), "w2": (config.hidden, config.intermediate)}
    fields: dict[str, torch.Tensor] = {}
    for field, shape in matrices.items():
        stack = torch.empty(len(experts), *shape, dtype=scheme.dtype or dtype, device=device)
        fields[field] = stack
        if not scheme.quantised:
            for slot, expert in enumerate(experts):
                checkpoint.read_matrix(reader, layer, field, expert, stack[slot])
            continue
        scale = torch.empty(weight_scale_shape(tuple(stack.shape), scheme), device=device)
        fields[f"{field}_scale"] = scale
        matrix = torch.empty(shape, dtype=dtype, device=device)
        for slot, expert in enumerate(experts):
            checkpoint.read_matrix(reader, layer, field, expert, matrix)
            stack[slot], scale[slot] = quantise_weight(matrix, scheme)
    return fields


def _regex(name: str) -> re.Pattern[Any]:
    escaped = re.escape(name)
    for placeholder in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{placeholder}}}"), rf"(?P<{placeholder}>\d+)")
    return re.compile(escaped)
