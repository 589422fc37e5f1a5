"""A Hugging Face checkpoint directory: the experts of one rank, and all other tensors.

Letters: E logical experts, L local physical experts, H hidden, I intermediate; W = 2I if the activation is gated.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ep_moe.config import DTYPES, MoEConfig
from ep_moe.quant import SCHEMES, QuantScheme, StoredMatrix
from ep_moe.weights import families
from ep_moe.weights.families import ExpertTensor, Family, Form
from ep_moe.weights.method import Method, scales_of_halves, scheme_of_halves
from ep_moe.weights.methods import method_of
from ep_moe.weights.quantized import AnyTensor, QuantizedTensor, collect, read_dequantized, read_matrix, read_order
from ep_moe.weights.storage import TensorReader, list_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint directory; opening it reads only headers.

    Multi-token prediction layers after the last one, which no transformers model has, are left out.
    """

    directory: Path
    raw: Mapping[str, Any]  # config.json
    config: MoEConfig
    family: Family
    tensors: Mapping[str, AnyTensor]  # those of a quantized weight are one
    dtype: torch.dtype  # of config.json, for dequantized tensors
    method: Method | None  # of quantized tensors; None if there are none

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read config.json and the headers of the safetensors files.

        Errors: ValueError as of `moe_config` and `list_tensors`, for weights in an unsupported quantization, and for
        quantized weights without their scale. Local.
        """
        raw, name = families.read_config(directory)
        method, extra = method_of(raw, name), families.extra_layers(raw, name)
        config, family = families.moe_config(raw, name), families.find_family(raw, name)
        tensors = {
            key: stored for key, stored in list_tensors(directory).items() if not extra or _layer_of(key) not in extra
        }
        return cls(
            directory=Path(directory),
            raw=raw,
            config=config,
            family=family,
            tensors=collect(tensors, method),
            dtype=families.dtype_of(raw, name),
            method=method,
        )

    @functools.cached_property
    def _expert_tensors(self) -> dict[str, tuple[int, tuple[Form, ...]]]:
        """Name of every expert tensor -> its layer and the forms that have it."""
        patterns = [(_regex(tensor.name), form) for form in self.family.forms for tensor in form]
        found: dict[str, tuple[int, tuple[Form, ...]]] = {}
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
                found[name] = int(match["layer"]), (*found.get(name, (0, ()))[1], form)
        return found

    @functools.cached_property
    def _other_biases(self) -> dict[str, int]:
        """Name of every bias of experts that the model has no place for -> its layer."""
        weights = {".bias": (".weight",), "_bias": ("", "_blocks")}
        return {
            name: self._expert_tensors[f"{base}{suffix}"][0]
            for name in self.tensors.keys() - self._expert_tensors.keys()
            for end, suffixes in weights.items()
            for base in [name.removesuffix(end)]
            for suffix in suffixes
            if base != name and f"{base}{suffix}" in self._expert_tensors
        }

    @functools.cached_property
    def layers(self) -> dict[int, Form]:
        """The MoE layers, ascending, and how each stores its experts.

        Errors: ValueError for a layer stored in two forms, which might differ; names a tensor of each.
        """
        firsts: dict[int, tuple[str, tuple[Form, ...]]] = {}
        for name, (layer, forms) in self._expert_tensors.items():
            other, found = firsts.setdefault(layer, (name, forms))
            both = tuple(form for form in found if form in forms)
            firsts[layer] = (other if both == found else name), both
            if not both:
                raise ValueError(
                    f"layer {layer} of {self.directory} has its experts in two forms: {other} in "
                    f"{self.tensors[other].file}, {name} in {self.tensors[name].file}"
                )
        return {layer: forms[0] for layer, (_, forms) in sorted(firsts.items(), key=lambda entry: entry[0])}

    def all_layers(self) -> list[int]:
        """The MoE layers. Errors: ValueError if there is none, or not one that config.json has. Local."""
        named = families.moe_layers(self.raw, f"{self.directory / 'config.json'}")
        missing = next((layer for layer in named if layer not in self.layers), None if self.layers else 0)
        if missing is not None:
            raise ValueError(f"{self.directory} has no experts of layer {missing}, only of layers {list(self.layers)}")
        return list(self.layers)

    def is_expert(self, name: str) -> bool:
        """True for a tensor of experts, by its name in `tensors`. Local."""
        return name in self._expert_tensors

    def find(self, tensor: ExpertTensor, layer: int, expert: int) -> AnyTensor:
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
        if isinstance(stored, QuantizedTensor):
            blocks = stored.method.stored.granularity == "block"
            if "bias" in tensor.field or tensor.transposed or (tensor.interleaved and blocks):
                raise ValueError(f"{name} in {stored.file} is {stored.dtype}, which is not supported for this tensor")
        elif stored.dtype not in DTYPES.values():
            raise ValueError(f"{name} in {stored.file} is {stored.dtype}; {', '.join(DTYPES)} are read")
        return stored

    def check_layer(self, layer: int) -> torch.dtype:
        """Check all E experts of a layer, not only this rank's, so that every rank raises the same error.

        Returns: their dtype on disk. Errors: ValueError as of `find`, for several dtypes, and for a bias other than
        zeros that the model has no place for. Local.
        """
        with TensorReader() as reader:
            for name in sorted(name for name, of in self._other_biases.items() if of == layer):
                stored = self.tensors[name]
                bias = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
                read_dequantized(reader, stored, bias)
                if bool(bias.any()):
                    raise ValueError(f"{name} in {stored.file} is not zero, and experts of this model have no biases")
        first: AnyTensor | None = None
        for tensor in self.layers[layer]:
            if self.method is not None and "bias" in tensor.field and isinstance(first, QuantizedTensor):
                self.find(tensor, layer, 0)
                continue
            for expert in range(1 if tensor.stacked else self.config.num_experts):
                stored = self.find(tensor, layer, expert)
                first = first or stored
                if stored.dtype != first.dtype:
                    raise ValueError(
                        f"{stored.name} in {stored.file} is {stored.dtype}, other experts of layer {layer} are "
                        f"{first.dtype}"
                    )
                if not isinstance(stored, QuantizedTensor) or not isinstance(first, QuantizedTensor):
                    continue
                one, other = stored.method.scheme.name, first.method.scheme.name
                if one != other:
                    raise ValueError(f"{stored.name} in {stored.file} is stored as {one}, {first.name} as {other}")
        assert first is not None
        return first.dtype

    def layer_scheme(self, layer: int) -> QuantScheme:
        """The scheme in which `ExpertWeights` can hold a layer's experts as they are on disk. Local.

        If gate and up are separate tensors, it is that of `scheme_of_halves`.
        """
        first = self.tensors[self.layers[layer][0].name.format(layer=layer, expert=0)]
        if not isinstance(first, QuantizedTensor):
            return SCHEMES["none"]
        scheme = first.method.scheme
        whole = all(tensor.rows == "all" for tensor in self.layers[layer])
        return scheme if whole else scheme_of_halves(scheme, self.config.intermediate)

    def _parts(self, layer: int, field: str, expert: int) -> Iterator[tuple[ExpertTensor, AnyTensor]]:
        """The tensors that make up a field of one expert, and the stored part of that expert."""
        for tensor in self.layers[layer]:
            if tensor.field == field:
                stored = self.find(tensor, layer, expert)
                yield tensor, stored.entry(expert) if tensor.stacked else stored

    def read_field(self, reader: TensorReader, layer: int, field: str, expert: int, out: torch.Tensor) -> None:
        """Read a field of one expert, dequantized if it is quantized, converting to the dtype and device of `out`.

        Args:
            field: of `ExpertWeights`. out: [W, H] as [gate; up], [H, I], or a bias [W] or [H].
        Local; synchronizes with the device of `out`.
        """
        for tensor, stored in self._parts(layer, field, expert):
            read_dequantized(reader, stored, tensor.place(out))

    def read_stored(
        self, reader: TensorReader, layer: int, field: str, expert: int, out: StoredMatrix
    ) -> list[torch.Tensor]:
        """Read a matrix of one expert as it is on disk; the `layer_scheme` of its layer must quantize.

        Columns in another order than their groups (GPTQ's act-order) are sorted: in w2, and with them the rows
        of w13; in w13, whose tokens then need `column_orders`.

        Args:
            field: "w13" or "w2". out: [W, H] or [H, I] in that scheme.
        Returns: the global scales [] of all tensors of the field, such as those of gate and up; `out` has the last one.
        Errors: as of `read_matrix`. Local; synchronizes with the device of `out`.
        """
        shared: list[torch.Tensor] = []
        device, scheme = out.values.device, self.layer_scheme(layer)
        [(_, down)] = self._parts(layer, "w2", expert)
        assert isinstance(down, QuantizedTensor)
        order = read_order(reader, down, device)
        for tensor, stored in self._parts(layer, field, expert):
            assert isinstance(stored, QuantizedTensor)
            columns = order if field == "w2" else read_order(reader, stored, device)
            matrix = read_matrix(reader, stored, device, order=columns)
            for name, place in out.tensors.items():
                part = getattr(matrix, name)
                if name == "global_scale":
                    shared.append(place.copy_(part).clone())
                    continue
                view = tensor.place(place) if place.dim() else place
                if name == "scale":
                    part = scales_of_halves(part, stored.method.stored, scheme.weight, stored.shape[0])
                if field == "w13" and order is not None and view.dim():
                    part = part[order]
                view.copy_(part.reshape(view.shape))
        return shared

    def column_orders(self, reader: TensorReader, layer: int) -> torch.Tensor | None:
        """Of each expert, the columns of w13 as they are on disk in the order of their groups, [E, H] int64; None if
        that is their order in all experts.

        Errors: ValueError, on every rank alike, for a gate and an up half in different orders. Local.
        """
        own, orders = torch.arange(self.config.hidden, device="cpu"), list[torch.Tensor]()
        for expert in range(self.config.num_experts):
            halves: list[torch.Tensor] = []
            for _, stored in self._parts(layer, "w13", expert):
                order = read_order(reader, stored, own.device) if isinstance(stored, QuantizedTensor) else None
                halves.append(own if order is None else order)
                if not torch.equal(halves[0], halves[-1]):
                    raise ValueError(
                        f"{stored.name} in {stored.file} has its columns in another order than the gate of its expert, "
                        'and both multiply the same tokens: scheme="none" dequantizes'
                    )
            orders.append(halves[0])
        stacked = torch.stack(orders)
        return None if torch.equal(stacked, own.expand_as(stacked)) else stacked

    def input_scales(self, reader: TensorReader, layer: int, field: str) -> torch.Tensor | None:
        """The static activation scales [E] of a field of all experts, the larger of gate and up; None without. Local.

        Errors: ValueError for one that is missing or not positive.
        """
        scales = torch.zeros(self.config.num_experts, dtype=torch.float32, device="cpu")
        for expert in range(self.config.num_experts):
            for _, stored in self._parts(layer, field, expert):
                if not isinstance(stored, QuantizedTensor) or stored.method.input_scale is None:
                    return None
                part = stored.parts.get("input_scale")
                if part is None:
                    missing = f"{stored.name.removesuffix(stored.method.weight)}{stored.method.input_scale}"
                    raise ValueError(f"{missing} is missing in {self.directory}, whose config has static scales")
                scale = torch.empty(part.shape, dtype=torch.float32, device="cpu")
                reader.read_into(part, scale)
                if not bool(scale > 0):
                    raise ValueError(f"{part.name} in {part.file} is {scale.item()}, not positive")
                scales[expert] = max(scales[expert], scale.reshape(()))
        return scales

    def dense(self, dtype: torch.dtype | None = None) -> "DenseTensors":
        """All tensors that are not experts, by their names in the transformers model.

        Args:
            dtype: of dequantized tensors; by default that of config.json, else float32.
        Errors: ValueError for fp8 values that have no scale. Local. Biases of experts without a place are left out.
        """
        dense = {}
        for name, stored in self.tensors.items():
            if name in self._expert_tensors or name in self._other_biases:
                continue
            quantized = isinstance(stored, QuantizedTensor)
            if stored.dtype.is_floating_point and stored.dtype.itemsize == 1 and not quantized:
                raise ValueError(
                    f"{name} in {stored.file} is {stored.dtype}, and config.json names no quantization for it"
                )
            for old, new in self.family.renames:
                name = name.replace(old, new)
            dense[name] = stored
        return DenseTensors(dense, dtype or self.dtype)


class DenseTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint that are not experts; each access reads one to the CPU, dequantized.

    A context manager, which closes the last file at its end.
    """

    def __init__(self, stored: Mapping[str, AnyTensor], dtype: torch.dtype) -> None:
        self.stored = stored
        self._dtype = dtype
        self._reader = TensorReader()

    def __enter__(self) -> "DenseTensors":
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.stored[name]
        dtype = self._dtype if isinstance(stored, QuantizedTensor) else stored.dtype
        tensor = torch.empty(stored.shape, dtype=dtype, device="cpu")
        read_dequantized(self._reader, stored, tensor)
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
