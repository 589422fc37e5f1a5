"""The parameters of `FusedMoE` in each number format: which its config describes, their names and shapes.

Letters: E experts, L local experts, H hidden, I intermediate of this rank, N and K rows and columns of a weight.
"""

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ep_moe.functional.formats import Flags
from ep_moe.quant import SCHEMES, QuantScheme, TensorFormat
from ep_moe.weights.method import Method
from ep_moe.weights.methods import method_of

FIELDS = ("w13", "w2")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")  # names of an expert's modules
_SKIPPED = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore")  # keys of unquantized modules
_READ = "fp8, mxfp8, blockwise_int8, w8a8_fp8, w8a8_int8, modelopt, modelopt_fp4, mxfp4, gptq, awq, compressed-tensors"
# SGLang's names of methods: keys of a quantization_config that are attributes, or the attribute that holds all of it
_KEYS: Mapping[str, str] = {
    "fp8": "activation_scheme weight_block_size is_checkpoint_fp8_serialized",
    "blockwise_int8": "activation_scheme weight_block_size",
    "gptq": "bits group_size checkpoint_format dynamic",
    "awq": "bits group_size zero_point",
    **dict.fromkeys(("mxfp8", "w8a8_fp8", "w8a8_int8", "mxfp4"), ""),
}
_WHOLE = {
    **dict.fromkeys(("gptq_marlin", "awq_marlin", "moe_wna16"), "full_config"),
    **dict.fromkeys(("compressed_tensors", "compressed-tensors"), "config"),
}
_MODELOPT = {"modelopt": "FP8", "modelopt_fp8": "FP8", "modelopt_fp4": "NVFP4"}


def as_mapping(quant_config: Any) -> Mapping[str, Any]:
    """The `quantization_config` that an object of SGLang's stands for; a mapping is one already.

    `GPTQConfig` does not say whether values are symmetric: zero points are read.
    Errors: ValueError for others.
    """
    if isinstance(quant_config, Mapping):
        return quant_config
    get_name = getattr(quant_config, "get_name", None)
    name: str = get_name() if callable(get_name) else ""
    skipped = {key: list(found) for key in _SKIPPED if (found := getattr(quant_config, key, None))}
    if name in _MODELOPT:
        return {"quant_method": "modelopt", "quant_algo": _MODELOPT[name], **skipped}
    if name in _KEYS:
        attributes = {key: "weight_bits" if key == "bits" else key for key in _KEYS[name].split()}
        found = {key: getattr(quant_config, attribute, None) for key, attribute in attributes.items()}
        if name == "gptq":
            found |= {"sym": False, "checkpoint_format": found["checkpoint_format"] or None}
        return {"quant_method": name, **found, **skipped}
    whole = getattr(quant_config, _WHOLE[name], None) if name in _WHOLE else None
    if isinstance(whole, Mapping):
        return {**whole, **skipped}
    raise ValueError(f"quant_config ({type(quant_config).__name__}, {name!r}) is not one of {_READ}")


def _skips(config: Mapping[str, Any], module: str) -> bool:
    """Whether a module of this name is unquantized: by name, by a part of it, by "*", or by a regex after "re:"."""

    def matches(name: str) -> bool:
        if name.startswith("re:"):
            return re.match(name[3:], module) is not None
        return module == name or module.startswith(f"{name}.") or fnmatch.fnmatch(module, name)

    return bool(module) and any(matches(name) for key in _SKIPPED for name in config.get(key) or ())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormat:
    """How weights are stored: not quantized without a method; `on_load`: quantized to fp8 after they are loaded."""

    method: Method | None = None
    on_load: bool = False

    @property
    def scheme(self) -> QuantScheme:
        """Of tokens and weights."""
        return SCHEMES["fp8_tensor" if self.on_load else "none"] if self.method is None else self.method.scheme

    @property
    def stored(self) -> TensorFormat:
        """Of the weights in the checkpoint."""
        return TensorFormat() if self.method is None else self.method.stored

    @property
    def packed(self) -> bool:
        """Whether the checkpoint has them in int32."""
        return self.method is not None and self.method.packing != "plain"

    @property
    def flags(self) -> Flags | None:
        """The flags of `fused_experts` that say the same, by which files of configs are named; None without any."""
        name, stored = self.scheme.name, self.stored
        kind = name.partition("_")[0]
        if kind in ("fp8", "int8") and self.scheme.payload.quantized:
            block = list(stored.block) if stored.granularity == "block" else None
            channels = stored.granularity == "channel"
            return Flags(**{f"use_{kind}_w8a8": True}, per_channel_quant=channels, block_shape=block)
        return Flags() if name == "none" else None


def layer_format(quant_config: Any, prefix: str, *, num_experts: int = 1) -> LayerFormat:
    """The format of a layer of this name, whose experts are modules in it. Local.

    Errors: ValueError for a config that is not read, and for one with different rules for its experts.
    """
    if quant_config is None:
        return LayerFormat()
    config = as_mapping(quant_config)
    if _skips(config, prefix):
        return LayerFormat()
    kind, per_tensor = config.get("quant_method"), config.get("weight_block_size") is None
    if kind == "fp8" and per_tensor and config.get("is_checkpoint_fp8_serialized") is False:
        if config.get("activation_scheme") not in ("dynamic", None):
            raise ValueError(
                f"quant_config: activation_scheme ({config['activation_scheme']!r}) is not dynamic, a checkpoint "
                "without fp8 has no scales"
            )
        return LayerFormat(on_load=True)
    method = method_of({"quantization_config": config}, "quant_config")
    if method is not None and method.rules:
        method = _method_of_experts(method, prefix, num_experts)
    return LayerFormat(method=method)


def _method_of_experts(method: Method, prefix: str, num_experts: int) -> Method | None:
    """The method that a config's rules give to all of a layer's experts, None if they are not quantized."""
    if not prefix:
        raise ValueError("quant_config: dynamic has rules for names of modules, and prefix is empty")
    by_names = [
        {name: method.of(name) for expert in range(num_experts) for name in (f"{prefix}.{expert}.{p}" for p in names)}
        for names in _PROJECTIONS
    ]
    found = next((each for each in by_names if any(own is not method for own in each.values())), by_names[0])
    (first, own), *others = found.items()
    for name, other in others:
        if other != own:
            raise ValueError(f"quant_config: dynamic has different rules for {first} and {name}, of one layer")
    return own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A parameter.

    Args:
        name: of the parameter. field: "w13" or "w2". what: a part of `StoredMatrix`, "bias", "input_scale" or "unread";
            of weights in int32 also "middle", zero points that are checked, and "order", the group of each column.
        shape, dtype: of the parameter, the first dimension experts.
        method: of weights in int32.
        all_experts: it has those of other ranks, too.
        shard: the dimension of an expert's tensor that ranks of tensor parallelism share, None if it is whole.
        halves: rows of w13, the gate's and the up half's; if it has two numbers, one of each.
    """

    name: str
    field: str
    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    all_experts: bool = False
    shard: int | None = None
    halves: bool = False
    method: Method | None = None

    @property
    def is_number(self) -> bool:
        """One number for a matrix."""
        return not self.shape[1:] or (self.field == "w13" and self.shape[1:] == (2,))

    def initial(self) -> torch.Tensor:
        """The parameter before anything is loaded: zeros, columns in the order of their groups."""
        if self.what == "order":
            assert self.method is not None
            return groups_in_order(self.method.stored, self.shape[-1]).expand(self.shape).clone()
        return torch.zeros(self.shape, dtype=torch.uint8 if self.dtype.itemsize == 1 else self.dtype).view(self.dtype)


def groups_in_order(stored: TensorFormat, columns: int) -> torch.Tensor:
    """The group of each column [K] int32 if columns lie in the order of their groups."""
    return torch.arange(columns, dtype=torch.int32) // (stored.block[1] if stored.granularity == "group" else columns)


def parts_of(
    form: LayerFormat,
    num_experts: int,
    *,
    num_local_experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    with_bias: bool,
) -> Iterator[Part]:
    """The parameters of a layer. Errors: ValueError for sizes that the format does not hold."""
    stored, method = form.stored, form.method
    names: Mapping[str, str] = {"values": "weight"} if method is None else method.names
    for field in FIELDS:
        first = field == "w13"
        rows, columns = (2 * intermediate, hidden) if first else (hidden, intermediate)
        if stored.granularity == "group" and columns % stored.block[1]:
            raise ValueError(f"{field} has {columns} columns, groups of {stored.block[1]} do not divide them")
        part = functools.partial(Part, field=field, halves=first, method=method if form.packed else None)
        shard, both = 0 if first else 1, (2,) if first else ()
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
            "values": ((rows, stored.row_values(columns)), stored.dtype or dtype, shard)
        }
        if method is not None and form.packed:
            named, others = _packed_shapes(method, rows, columns, first, dtype)
            shapes |= named
            names = {**names, **others}
        elif "scale" in names:
            kind = torch.uint8 if stored.scale_dtype == torch.float8_e8m0fnu else stored.scale_dtype
            each = stored.granularity == "tensor" or (stored.granularity == "channel" and not first)
            shapes["scale"] = _scale_shape(stored, rows, columns, first), kind, None if each else shard
            if "global_scale" in names:
                shapes["global_scale"] = both, torch.float32, None
        for what, (shape, kind, axis) in shapes.items():
            name, whole = f"{field}_{names[what]}", (num_local_experts, *shape)
            yield part(name=name, what=what.partition(".")[0], shape=whole, dtype=kind, shard=axis)
        if with_bias:
            like: dict[str, Any] = {"what": "bias", "dtype": dtype, "shard": 0 if first else None, "method": None}
            yield part(name=f"{field}_weight_bias", shape=(num_local_experts, rows), **like)
        if method is None or form.packed or method.name == "fp8" and method.input_scale is None:
            continue
        unread = [suffix[1:] for suffix in method.dropped if suffix in (".input_scale", ".input_global_scale")]
        inputs = {"input_scale": ()} if method.input_scale is not None else dict.fromkeys(unread, both)
        for suffix, shape in inputs.items():
            name, what = f"{field}_{suffix}", "unread" if method.input_scale is None else "input_scale"
            yield part(name=name, what=what, shape=(num_experts, *shape), dtype=torch.float32, all_experts=True)


def _scale_shape(stored: TensorFormat, rows: int, columns: int, first: bool) -> tuple[int, ...]:
    """The scales of a matrix; blocks of the gate's and of the up half's rows are separate."""
    if stored.granularity == "tensor":
        return (2,) if first else ()
    if stored.granularity == "channel":
        return rows, 1
    n, k = stored.block
    return 2 * math.ceil(rows // 2 / n) if first else math.ceil(rows / n), math.ceil(columns / k)


def _packed_shapes(
    method: Method, rows: int, columns: int, first: bool, dtype: torch.dtype
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype, None]], dict[str, str]]:
    """Shapes and dtypes of the parts of weights in int32, and names that `Method.names` lacks."""
    stored, names = method.stored, dict[str, str]()
    scales = stored.scale_shape((rows, columns))
    kind = dtype if stored.family == "integer" else stored.scale_dtype
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype, None]] = {"scale": (scales, kind, None)}
    if method.middle_zero:
        shapes["middle"], names["middle"] = ((0,), torch.uint8, None), method.names["zero"]
    elif "zero" in method.parts:
        shapes["zero"] = scales, torch.uint8, None
    if method.order is not None:
        shapes["order"], names["order"] = ((*((2,) if first else ()), columns), torch.int32, None), method.order[1:]
    for suffix in (".weight_shape", ".qzeros"):
        if suffix in method.dropped:
            shapes[f"unread{suffix}"], names[f"unread{suffix}"] = ((0,), torch.uint8, None), suffix[1:]
    return shapes, names
