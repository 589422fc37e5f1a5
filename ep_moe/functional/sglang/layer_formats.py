"""The parameters of `FusedMoE` in each number format: their names, shapes, and what they become.

Letters: E experts, L local experts, H hidden, I intermediate of this rank, n and k rows and columns of a block of
scales, V stored values of a row.
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
from ep_moe.quant import SCHEMES, QuantScheme, StoredMatrix, TensorFormat, get_scheme, with_block
from ep_moe.weights import ExpertWeights, PerExpert
from ep_moe.weights.method import Method, shared_scale
from ep_moe.weights.methods import method_of

_FIELDS = ("w13", "w2")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")  # names of an expert's modules
_ONE_FOR_CHANNELS = {"fp8_tensor": "fp8_tensor_channel", "fp8_w8a16_tensor": "fp8_w8a16"}

SKIPPED_KEYS = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore")  # whose modules are skipped
READ = (
    "fp8, mxfp8, blockwise_int8, w8a8_fp8, w8a8_int8, modelopt, modelopt_fp4, mxfp4, gptq, awq and compressed-tensors"
)
# SGLang's names of methods: keys of a quantization_config that are attributes, or the attribute that holds all of it
_KEYS: Mapping[str, str] = {
    "fp8": "activation_scheme weight_block_size is_checkpoint_fp8_serialized",
    "blockwise_int8": "activation_scheme weight_block_size",
    "gptq": "bits group_size checkpoint_format dynamic",
    "awq": "bits group_size zero_point",
    **dict.fromkeys(("mxfp8", "w8a8_fp8", "w8a8_int8", "mxfp4"), ""),
}
_WHOLE = {
    "gptq_marlin": "full_config",
    "awq_marlin": "full_config",
    "moe_wna16": "full_config",
    "compressed_tensors": "config",
    "compressed-tensors": "config",
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
    skipped = {key: list(found) for key in SKIPPED_KEYS if (found := getattr(quant_config, key, None))}
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
    raise ValueError(f"quant_config ({type(quant_config).__name__}, {name!r}) is not one of {READ}")


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """`weight_block_size`. Errors: ValueError for other than two integers."""
    found = config.get("weight_block_size")
    if not (isinstance(found, list | tuple) and len(found) == 2 and all(type(size) is int for size in found)):
        raise ValueError(f"quant_config: weight_block_size ({found!r}) is not [n, k]")
    return found[0], found[1]


def skips(config: Mapping[str, Any], module: str) -> bool:
    """Whether a config leaves a module of this name unquantized: by name, a part of it, "*", or a regex after "re:"."""
    return bool(module) and any(_matches(name, module) for key in SKIPPED_KEYS for name in config.get(key) or ())


def _matches(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return module == name or module.startswith(f"{name}.") or fnmatch.fnmatch(module, name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerFormat:
    """How a layer's weights are stored.

    Args:
        scheme: of tokens and weights. stored: of the weights in the checkpoint.
        names: what follows "w13_" and "w2_" in the names of the parameters, by part of a `StoredMatrix`.
        static: there are static scales of tokens. unread: names of scales that are loaded, and not used.
        on_load: weights are loaded unquantized, and quantized then.
        method: how weights in int32 lie in the checkpoint; None for others, which parameters hold as they are there.
    """

    scheme: QuantScheme = SCHEMES["none"]
    stored: TensorFormat = TensorFormat()
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"values": "weight"})
    static: bool = False
    unread: tuple[str, ...] = ()
    on_load: bool = False
    method: Method | None = None

    @property
    def flags(self) -> Flags | None:
        """The flags of `fused_experts` that say the same, by which files of configs are named; None without any."""
        name = self.scheme.name
        block = list(self.stored.block) if self.stored.granularity == "block" else None
        channels = self.stored.granularity == "channel"
        if name.startswith("fp8_") and self.scheme.payload.quantized:
            return Flags(use_fp8_w8a8=True, per_channel_quant=channels, block_shape=block)
        if name.startswith("int8_") and self.scheme.payload.quantized:
            return Flags(use_int8_w8a8=True, per_channel_quant=channels, block_shape=block)
        return Flags() if name == "none" else None


def layer_format(quant_config: Any, prefix: str, *, num_experts: int = 1) -> LayerFormat:
    """The format of a layer of this name, whose experts are modules in it. Local.

    Errors: ValueError for a config that is not read, and for one with different rules for its experts.
    """
    if quant_config is None:
        return LayerFormat()
    config = as_mapping(quant_config)
    if skips(config, prefix):
        return LayerFormat()
    kind = config.get("quant_method")
    if kind in ("w8a8_fp8", "w8a8_int8"):
        scheme = SCHEMES["fp8_token" if kind == "w8a8_fp8" else "int8_token"]
        return LayerFormat(scheme=scheme, stored=scheme.weight, names={"values": "weight", "scale": "weight_scale"})
    if kind == "mxfp8":
        return _in_blocks("mxfp8")
    if kind == "blockwise_int8":
        rows, columns = block_of(config)
        return _in_blocks(f"int8_block_{rows}x{columns}")
    if kind == "fp8" and config.get("weight_block_size") is None:
        return _per_tensor(config)
    method = method_of({"quantization_config": config}, "quant_config")
    if method is None:
        raise ValueError(f"quant_config: {kind!r} is not one of {READ}")
    if method.rules:
        method = _method_of_experts(method, prefix, num_experts)
        if method is None:
            return LayerFormat()
    if method.packing != "plain":
        return LayerFormat(scheme=method.scheme, stored=method.stored, method=method)
    if method.values == "_blocks":
        names = {"values": "weight", "scale": "weight_scale"}
    else:
        suffixes = {"values": method.values, **method.parts}
        names = {part: suffix[1:] if suffix[:1] == "." else f"weight{suffix}" for part, suffix in suffixes.items()}
    unread = tuple(suffix[1:] for suffix in method.dropped if suffix in (".input_scale", ".input_global_scale"))
    return LayerFormat(
        scheme=method.scheme,
        stored=method.stored,
        names=names,
        static=method.input_scale is not None,
        unread=unread,
    )


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


def _in_blocks(name: str) -> LayerFormat:
    scheme = get_scheme(name)
    return LayerFormat(scheme=scheme, stored=scheme.weight, names={"values": "weight", "scale": "weight_scale_inv"})


def _per_tensor(config: Mapping[str, Any]) -> LayerFormat:
    """fp8 with one scale for each matrix, or weights that become so after they were loaded."""
    activation = config.get("activation_scheme") or "dynamic"
    if activation not in ("static", "dynamic"):
        raise ValueError(f"quant_config: activation_scheme ({activation!r}) is not static or dynamic")
    scheme, on_load = SCHEMES["fp8_tensor"], config.get("is_checkpoint_fp8_serialized") is False
    if on_load and activation == "static":
        raise ValueError("quant_config: activation_scheme ('static') needs scales, a checkpoint without fp8 has none")
    if on_load:
        return LayerFormat(scheme=scheme, on_load=True)
    names = {"values": "weight", "scale": "weight_scale"}
    return LayerFormat(scheme=scheme, stored=scheme.weight, names=names, static=activation == "static")


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
    stored = form.stored
    for field in _FIELDS:
        first = field == "w13"
        rows, columns = (2 * intermediate, hidden) if first else (hidden, intermediate)
        if stored.granularity == "group" and columns % stored.block[1]:
            raise ValueError(f"{field} has {columns} columns, groups of {stored.block[1]} do not divide them")
        name, shard = f"{field}_{{}}".format, 0 if first else 1
        both, part = (2,) if first else (), functools.partial(Part, field=field, halves=first)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
            "values": ((rows, stored.row_values(columns)), stored.dtype or dtype, shard)
        }
        if "scale" in form.names:
            kind = torch.uint8 if stored.scale_dtype == torch.float8_e8m0fnu else stored.scale_dtype
            shapes["scale"] = (*_scale_shape(stored, rows, columns, first), kind, shard)
            if stored.granularity == "tensor" or (stored.granularity == "channel" and not first):
                shapes["scale"] = (*shapes["scale"][:2], None)
        if "global_scale" in form.names:
            shapes["global_scale"] = (both, torch.float32, None)
        for what, (shape, kind, axis) in shapes.items():
            named = form.names[what]
            yield part(name=name(named), what=what, shape=(num_local_experts, *shape), dtype=kind, shard=axis)
        if with_bias:
            yield bias_part(field, num_local_experts, rows, dtype)
        others = {"input_scale": ()} if form.static else dict.fromkeys(form.unread, both)
        for suffix, shape in others.items():
            what, kind = "input_scale" if form.static else "unread", torch.float32
            yield part(name=name(suffix), what=what, shape=(num_experts, *shape), dtype=kind, all_experts=True)


def bias_part(field: str, num_local_experts: int, rows: int, dtype: torch.dtype) -> Part:
    """The biases of a field."""
    first, name, shape = field == "w13", f"{field}_weight_bias", (num_local_experts, rows)
    shard = 0 if first else None
    return Part(name=name, field=field, what="bias", shape=shape, dtype=dtype, shard=shard, halves=first)


def _scale_shape(stored: TensorFormat, rows: int, columns: int, first: bool) -> tuple[tuple[int, ...]]:
    """The scales of a matrix; blocks of the gate's and the up half's rows are apart."""
    if stored.granularity == "tensor":
        return ((2,) if first else (),)
    if stored.granularity == "channel":
        return ((rows, 1),)
    n, k = stored.block
    count = 2 * math.ceil(rows // 2 / n) if first else math.ceil(rows / n)
    return ((count, math.ceil(columns / k)),)


def as_expert_weights(
    form: LayerFormat, tensors: Mapping[str, torch.Tensor], local: slice, *, up_first: bool
) -> ExpertWeights:
    """The parameters as the runtime's weights: views, but for scales that have another form there.

    Scales for a tensor become those of its channels. Blocks become shorter if the last one of the gate's rows is short.
    Args: local: this rank's experts among all.
    Local; a host sync for global scales of gate and up.
    """
    scheme, fields, constants = form.scheme, dict[str, Any](), dict[str, torch.Tensor]()
    intermediate = tensors["w13_bias"].shape[1] // 2 if "w13_bias" in tensors else tensors["w13_values"].shape[1] // 2
    if form.stored.granularity == "tensor" and not form.on_load:
        scheme = SCHEMES[_ONE_FOR_CHANNELS.get(scheme.name, scheme.name)]
    if form.stored.granularity == "block":
        scheme = _shorter(scheme, intermediate)
    for field in _FIELDS:
        values, scale = tensors[f"{field}_values"], tensors.get(f"{field}_scale")
        if scale is not None:
            scale = _scales(form.stored, scheme.weight, scale, values.shape[1], field == "w13")
        shared = tensors.get(f"{field}_global_scale")
        if shared is not None and shared.dim() == 2:
            shared, constants = shared_scale(shared, scheme.weight)
            shared = shared.contiguous()
        fields[field] = StoredMatrix(values, scale=scale, global_scale=shared)
    first, second = (tensors.get(f"{field}_input_scale") for field in _FIELDS)
    return ExpertWeights(
        **fields,
        scheme=scheme,
        w13_bias=tensors.get("w13_bias"),
        w2_bias=tensors.get("w2_bias"),
        w13_input_scale=None if first is None else first.amax().reshape(1),
        w2_input_scale=None if second is None else second[local].contiguous(),
        per_expert=PerExpert(**constants),
        up_first=up_first,
    )


def _shorter(scheme: QuantScheme, intermediate: int) -> QuantScheme:
    rows, columns = scheme.weight.block
    found = math.gcd(rows, intermediate)
    return scheme if found == rows else with_block(scheme, found, columns)


def _scales(stored: TensorFormat, wanted: TensorFormat, scale: torch.Tensor, rows: int, first: bool) -> torch.Tensor:
    """Scales as a layer has them, in the form of `wanted`."""
    if wanted.scale_dtype == torch.float8_e8m0fnu:
        return scale.view(torch.float8_e8m0fnu)
    if stored.granularity == "channel":
        return scale[..., 0]
    if stored.granularity == "tensor":
        halves = scale if first else scale[:, None]
        return halves.repeat_interleave(rows // halves.shape[1], dim=1)
    repeat = stored.block[0] // wanted.block[0]
    if stored.granularity != "block" or repeat == 1:
        return scale
    count = math.ceil(rows / wanted.block[0])
    apart = scale.chunk(2, 1) if first else (scale,)
    return torch.cat([half.repeat_interleave(repeat, dim=1)[:, : count // len(apart)] for half in apart], dim=1)
