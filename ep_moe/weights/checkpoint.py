"""A Hugging Face checkpoint directory: the experts of one rank, and all other tensors.

Letters: E logical experts, L local physical experts, H hidden, I intermediate; W = 2I if the activation is gated.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ep_moe.config import DTYPES, MoEConfig
from ep_moe.quant import SCHEMES, QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights.blocks import pair_scales, read_numbers, read_scale, stored_scheme
from ep_moe.weights.families import (
    ExpertTensor,
    Family,
    Form,
    dtype_of,
    extra_layers,
    family_of,
    moe_config_of,
    read_config,
)
from ep_moe.weights.storage import StoredTensor, TensorReader, list_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint directory; opening it reads only headers.

    Multi-token prediction layers after the last one, which no transformers model has, are left out.
    """

    directory: Path
    config: MoEConfig
    family: Family
    tensors: Mapping[str, StoredTensor]  # those in fp8 have their scale attached
    dtype: torch.dtype  # of config.json, for dequantized fp8 tensors
    scheme: QuantScheme | None  # of fp8 tensors; None if there are none

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read config.json and the headers of the safetensors files.

        Errors: ValueError as of `moe_config` and `list_tensors`, for weights in an unsupported quantization, and for
        fp8 weights without their scale. Local.
        """
        raw, name = read_config(directory)
        scheme, extra = stored_scheme(raw, name), extra_layers(raw, name)
        config, family = moe_config_of(raw, name), family_of(raw, name)
        tensors = {
            key: stored for key, stored in list_tensors(directory).items() if not extra or _layer_of(key) not in extra
        }
        return cls(
            directory=Path(directory),
            config=config,
            family=family,
            tensors=pair_scales(tensors, scheme),
            dtype=dtype_of(raw, name),
            scheme=scheme,
        )

    @functools.cached_property
    def _expert_tensors(self) -> dict[str, tuple[int, Form]]:
        """Name of every expert tensor -> its layer and its form."""
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

        Errors: ValueError for a layer stored in two forms, which might differ; names a tensor of each.
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
        """Return an expert's stored tensor; a stacked one is the same for every expert.

        Errors: ValueError names the tensor if it is missing or has a wrong shape or an unsupported format. Local.
        """
        name = tensor.name.format(layer=layer, expert=expert)
        stored = self.tensors.get(name)
        if stored is None:
            raise ValueError(f"{name} is missing in {self.directory}")
        expected = tensor.shape(self.config)
        if stored.shape != expected:
            raise ValueError(f"{name} in {stored.file} is {list(stored.shape)}, expected {list(expected)}")
        blocks = stored.scale is not None and not (tensor.transposed or tensor.interleaved)
        if stored.dtype not in DTYPES.values() and not blocks:
            raise ValueError(f"{name} in {stored.file} is {stored.dtype}; {', '.join(DTYPES)} are read")
        return stored

    def check_layer(self, layer: int) -> torch.dtype:
        """Check all E experts of a layer, not only this rank's, so that every rank raises the same error.

        Returns: their dtype on disk. Errors: ValueError as of `find`, or for several dtypes. Local.
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

    def layer_scheme(self, layer: int) -> QuantScheme:
        """The scheme in which `ExpertWeights` can hold a layer's experts as they are on disk.

        If gate and up are separate tensors and the last row of blocks of the gate is short, blocks of [gate; up] would
        span both. So blocks get gcd(block rows, I) rows, and scales are repeated: with I = 192, stored blocks of
        128 x 128 become blocks of 64 x 128. Local.
        """
        first = self.tensors[self.layers[layer][0].name.format(layer=layer, expert=0)]
        if self.scheme is None or first.dtype != self.scheme.weight.dtype:
            return SCHEMES["none"]
        rows, columns = self.scheme.weight.block
        if any(tensor.rows != "all" for tensor in self.layers[layer]):
            rows = math.gcd(rows, self.config.intermediate)
        return get_scheme(f"fp8_block_{rows}x{columns}")

    def _parts(self, layer: int, field: str, expert: int) -> Iterator[tuple[ExpertTensor, StoredTensor]]:
        """The tensors that make up a field of one expert, and the stored part of that expert."""
        for tensor in self.layers[layer]:
            if tensor.field == field:
                stored = self.find(tensor, layer, expert)
                yield tensor, stored.entry(expert) if tensor.stacked else stored

    def read_field(self, reader: TensorReader, layer: int, field: str, expert: int, out: torch.Tensor) -> None:
        """Read a field of one expert, dequantized if it is fp8, converting to the dtype and device of `out`.

        Args:
            field: of `ExpertWeights`. out: [W, H] as [gate; up], [H, I], or a bias [W] or [H].
        Local; synchronizes with the device of `out`.
        """
        for tensor, stored in self._parts(layer, field, expert):
            place = tensor.place(out)
            read_numbers(reader, stored.reshaped(tuple(place.shape)), place, self.scheme)

    def read_blocks(self, reader: TensorReader, layer: int, field: str, expert: int, out: StoredMatrix) -> None:
        """Read a matrix of one expert as it is on disk; the `layer_scheme` of its layer must be fp8.

        Args:
            field: "w13" or "w2". out: [W, H] or [H, I] in that scheme.
        Local; synchronizes with the device of `out`.
        """
        assert self.scheme is not None
        assert out.scale is not None
        repeat = self.scheme.weight.block[0] // self.layer_scheme(layer).weight.block[0]
        for tensor, stored in self._parts(layer, field, expert):
            assert stored.scale is not None
            reader.read_into(stored, tensor.place(out.values))
            read_scale(reader, stored.scale, tensor.place(out.scale), repeat)

    def dense(self, dtype: torch.dtype | None = None) -> "DenseTensors":
        """All tensors that are not experts, by their names in the transformers model.

        Args:
            dtype: of dequantized fp8 tensors; by default that of config.json, else float32.
        Errors: ValueError for fp8 values that have no scale. Local.
        """
        dense = {}
        for name, stored in self.tensors.items():
            if name in self._expert_tensors:
                continue
            if stored.dtype.is_floating_point and stored.dtype.itemsize == 1 and stored.scale is None:
                raise ValueError(f"{name} in {stored.file} is {stored.dtype}, and config.json does not say how")
            for old, new in self.family.renames:
                name = name.replace(old, new)
            dense[name] = stored
        return DenseTensors(dense, dtype or self.dtype, self.scheme)


class DenseTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint that are not experts; each access reads one to the CPU, dequantized.

    A context manager, which closes the last file at its end.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], dtype: torch.dtype, scheme: QuantScheme | None) -> None:
        self.stored = stored
        self._dtype, self._scheme = dtype, scheme
        self._reader = TensorReader()

    def __enter__(self) -> "DenseTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype if stored.scale is None else self._dtype)
        read_numbers(self._reader, stored, tensor, self._scheme)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _layer_of(name: str) -> int | None:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return None if match is None else int(match[1])


def _regex(name: str) -> re.Pattern[Any]:
    escaped = re.escape(name)
    for placeholder in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{placeholder}}}"), rf"(?P<{placeholder}>\d+)")
    return re.compile(escaped)
