"""Reads the `quantization_config` of a checkpoint as a `Method`; one function for each quant_method.

Sources: github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md ("fp8"); compressed-tensors' QuantizationConfig;
GPTQModel's and AutoAWQ's quantize_config.json; modelopt's hf_quant_config.json; openai/gpt-oss-120b ("mxfp4"); SGLang
(the last four).
Activations that a checkpoint scales statically in groups (NVFP4's `input_scale`) are scaled dynamically here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ep_moe.config import DTYPES
from ep_moe.fields import shown
from ep_moe.quant import SCHEMES, QuantScheme, get_scheme
from ep_moe.weights.method import Method

Config = Mapping[str, Any]
BLOCK_FP8 = "fp8 e4m3 with weight_block_size [n, k] and dynamic activation scales"


class _UnreadError(ValueError):
    """The config has an option that is not supported; the message is its key and value."""

    def __init__(self, config: Config, key: str) -> None:
        super().__init__(f"{key} {shown(config.get(key))}")


def _require(config: Config, **wanted: tuple[Any, ...]) -> None:
    """Raise unless each key has one of the values; None stands for a key that is absent."""
    for key, values in wanted.items():
        found = config.get(key)
        if not any(type(found) is type(value) and found == value for value in values):
            raise _UnreadError(config, key)


def _whole(config: Config, key: str) -> int:
    found = config.get(key)
    if type(found) is not int:
        raise _UnreadError(config, key)
    return found


def _sizes(config: Config, key: str) -> tuple[int, int]:
    found = config.get(key)
    if not (isinstance(found, list | tuple) and len(found) == 2 and all(type(size) is int for size in found)):
        raise _UnreadError(config, key)
    return found[0], found[1]


def _fp8(config: Config) -> Method:
    """Blocks as DeepSeek-V3, or per tensor as vLLM's own; `scale_fmt`, the rounding of activation scales in training,
    is ignored: ours are not rounded. Some tensors may be unquantized: each tensor's dtype decides."""
    _require(config, fmt=("e4m3", "float8_e4m3fn", None), is_checkpoint_fp8_serialized=(True, None))
    if config.get("weight_block_size") is None:
        _require(config, activation_scheme=("static", "dynamic", None))
        return _per_tensor_fp8("fp8", static=config.get("activation_scheme") == "static")
    _require(config, activation_scheme=("dynamic", None))
    return _in_blocks(config, "fp8")


def _in_blocks(config: Config, element: str) -> Method:
    rows, columns = _sizes(config, "weight_block_size")
    try:
        scheme = get_scheme(f"{element}_block_{rows}x{columns}")
    except ValueError as error:
        raise ValueError(f"weight_block_size {[rows, columns]}: {error}") from None
    return _inverse(config["quant_method"], scheme)


def _inverse(name: str, scheme: QuantScheme) -> Method:
    """Scales in X.weight_scale_inv, which multiply like any others."""
    return Method(name=name, scheme=scheme, values="", weight="", parts={"scale": "_scale_inv"})


def _per_tensor_fp8(name: str, *, static: bool = True) -> Method:
    scales = {"input_scale": ".input_scale"} if static else {"dropped": (".input_scale",)}
    return Method(name=name, scheme=SCHEMES["fp8_tensor"], parts={"scale": ".weight_scale"}, **scales)


def _per_channel(name: str, scheme: str) -> Method:
    return Method(name=name, scheme=SCHEMES[scheme], parts={"scale": ".weight_scale"})


def _group(config: Config, key: str = "group_size") -> str:
    """The group in the name of a scheme: "" per channel, "_g128" in groups of 128."""
    size = _whole(config, key)
    return "" if size == -1 else f"_g{size}"


def _gptq(config: Config) -> Method:
    """v1, which stores zero points minus 1, unless `checkpoint_format` is "gptq_v2"."""
    _require(config, bits=(4, 8), sym=(True, False), checkpoint_format=("gptq", "gptq_v2", None))
    integer = f"int{config['bits']}_w{config['bits']}a16{_group(config)}{'' if config['sym'] else '_zp'}"
    return Method(
        name="gptq",
        scheme=get_scheme(integer),
        packing="gptq_v2" if config.get("checkpoint_format") == "gptq_v2" else "gptq",
        values=".qweight",
        parts={"zero": ".qzeros", "scale": ".scales"},
        order=".g_idx",
        ordered=config.get("desc_act") is True and config["group_size"] != -1,
        middle_zero=config["sym"],
        rules=tuple(_gptq_rules(config)),
    )


_OF_QUANTIZATION = ("desc_act", "static_groups", "true_sequential", "act_group_aware", "damp_percent", "mse")


def _gptq_rules(config: Config) -> Iterator[tuple[str, Method | None]]:
    """GPTQModel's `dynamic`: regexes of module names after "-:", which are not quantized, or "+:" or nothing, with
    other values of bits, group_size and sym."""
    found = config.get("dynamic")
    if found is None:
        return
    if not isinstance(found, Mapping):
        raise _UnreadError(config, "dynamic")
    for key, changes in found.items():
        pattern = str(key).removeprefix("-:").removeprefix("+:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"dynamic {shown(key)}: {error}") from None
        if str(key).startswith("-:"):
            yield pattern, None
            continue
        changes = changes or {}
        known = ("bits", "group_size", "sym", *_OF_QUANTIZATION)
        if not isinstance(changes, Mapping) or any(name not in known for name in changes):
            raise ValueError(f"dynamic {shown(key)}: {shown(changes)}, of which {', '.join(known)} are known")
        try:
            yield pattern, _gptq({**config, **changes, "dynamic": None})
        except ValueError as error:
            raise ValueError(f"dynamic {shown(key)}: {error}") from None


def _awq(config: Config) -> Method:
    _require(config, bits=(4,), version=("gemm", "GEMM", None), zero_point=(True, False, None))
    points = config.get("zero_point") is not False
    parts = {"scale": ".scales"} | ({"zero": ".qzeros"} if points else {})
    dropped = () if points else (".qzeros",)
    scheme = get_scheme(f"int4_w4a16{_group(config)}{'_zp' if points else ''}")
    return Method(name="awq", scheme=scheme, packing="awq", values=".qweight", parts=parts, dropped=dropped)


def _modelopt(config: Config) -> Method:
    algorithm = config.get("quant_algo")
    dropped = (".input_scale",)
    scale = {"scale": ".weight_scale"}
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        both = scale | {"global_scale": ".weight_scale_2"}
        groups = config.get("config_groups")
        listed = list(groups.values()) if isinstance(groups, Mapping) else []
        alone = bool(listed) and all(isinstance(g, Mapping) and g.get("input_activations") is None for g in listed)
        scheme = SCHEMES["nvfp4_w4a16" if alone or algorithm == "W4A16_NVFP4" else "nvfp4"]
        return Method(name="modelopt", scheme=scheme, parts=both, dropped=dropped)
    if algorithm == "FP8":
        return _per_tensor_fp8("modelopt")
    if algorithm == "MXFP8":
        return Method(name="modelopt", scheme=SCHEMES["mxfp8"], parts=scale, dropped=dropped)
    raise _UnreadError(config, "quant_algo")


def _mxfp4(config: Config) -> Method:
    """gpt-oss: stacked experts, blocks [E, 2I, G, 16] with gate and up rows in turn, and scales [E, 2I, G]."""
    parts = {"scale": "_scales"}
    return Method(name="mxfp4", scheme=SCHEMES["mxfp4_w4a16"], values="_blocks", weight="_blocks", parts=parts)


def _compressed_tensors(config: Config) -> Method:
    for key in ("transform_config", "sparsity_config"):
        changes = config.get(key)
        without = isinstance(changes, Mapping) and (
            changes.get("format") == "dense" or changes == {"config_groups": {}}
        )
        if changes and not without:
            raise _UnreadError(config, key)
    groups = config.get("config_groups")
    if not (isinstance(groups, Mapping) and groups):
        raise _UnreadError(config, "config_groups")
    different = list({repr(_without_targets(group)): group for group in groups.values()}.values())
    if len(different) != 1:
        raise ValueError(f"config_groups with {len(different)} formats")
    [group] = different
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise _UnreadError(config, "config_groups")
    form, tokens = group.get("format") or config.get("format"), group.get("input_activations")
    weights = group["weights"]
    if tokens is not None and not isinstance(tokens, Mapping):
        raise _UnreadError(group, "input_activations")
    _require(weights, num_bits=(4, 8), type=("int", "float"), dynamic=(False, None))
    scheme, disk = _compressed_scheme(weights, tokens, form)
    packed = form in ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
    parts = {"scale": ".weight_scale"}
    if weights.get("symmetric") is False:
        parts["zero"] = ".weight_zero_point"
    if scheme.weight.global_scale != "none":
        parts["global_scale"] = ".weight_global_scale"
    static = scheme.payload.granularity == "tensor" and tokens is not None and tokens.get("dynamic") is not True
    dropped = (".weight_shape", ".input_global_scale", ".weight_zero_point", ".input_zero_point")
    return Method(
        name="compressed-tensors",
        scheme=scheme,
        disk=None if disk is scheme else disk.weight,
        packing="int32" if form == "pack-quantized" else "plain",
        values=".weight_packed" if packed else ".weight",
        parts=parts,
        order=".weight_g_idx",
        ordered=weights.get("actorder") in ("group", "dynamic"),
        input_scale=".input_scale" if static else None,
        dropped=dropped if static else (*dropped, ".input_scale"),
    )


def _without_targets(group: Any) -> Any:
    """A config group of compressed-tensors without the modules that it applies to."""
    return {key: value for key, value in group.items() if key != "targets"} if isinstance(group, Mapping) else group


_MICRO_FORMS: dict[Any, tuple[str, int, dict[Any, str]]] = {  # strategy, group_size, schemes by type and bits of tokens
    "nvfp4-pack-quantized": ("tensor_group", 16, {None: "nvfp4_w4a16_divisor", ("float", 4): "nvfp4_divisor"}),
    "mxfp4-pack-quantized": ("group", 32, {None: "mxfp4_w4a16", ("float", 8): "mxfp4_w4a8"}),
    "mxfp8-quantized": ("group", 32, {None: "mxfp8_w8a16", ("float", 8): "mxfp8"}),
}


def _compressed_scheme(weights: Config, tokens: Config | None, form: Any) -> tuple[QuantScheme, QuantScheme]:
    """The scheme of a layer, and one whose weights are as on disk."""
    strategy, token_strategy = weights.get("strategy"), None if tokens is None else tokens.get("strategy")
    element = weights["type"]
    if tokens is not None:
        _require(tokens, num_bits=(4, 8), type=("int", "float"), symmetric=(True, None))
    bits = None if tokens is None else (tokens["type"], tokens["num_bits"])
    if isinstance(form, str) and form in _MICRO_FORMS:
        wanted, group_size, by_bits = _MICRO_FORMS[form]
        _require(weights, strategy=(wanted,), group_size=(group_size,), symmetric=(True, None))
        name = by_bits.get(bits)
    elif form == "pack-quantized":
        _require(weights, type=("int",), strategy=("channel", "group"), symmetric=(True, False, None))
        group = _group(weights) if strategy == "group" else ""
        by_tokens: dict[Any, str] = {None: f"int{weights['num_bits']}_w{weights['num_bits']}a16"}
        if weights["num_bits"] == 4 and token_strategy == "token":
            by_tokens["float", 8] = "int4_w4a8"
        stem = by_tokens.get(bits)
        name = None if stem is None else f"{stem}{group}{'_zp' if weights.get('symmetric') is False else ''}"
    elif form in ("float-quantized", "int-quantized", "naive-quantized"):
        _require(weights, num_bits=(8,), symmetric=(True, None))
        if tokens is not None and strategy == "block":
            _require(tokens, group_size=(_sizes(weights, "block_structure")[1],))
        name = _eight_bits("fp8" if element == "float" else "int8", weights, strategy, bits, token_strategy)
    else:
        raise ValueError(f"format {shown(form)}")
    if name is None:
        raise ValueError(f"format {shown(form)} of strategy {shown(strategy)} with input_activations {shown(tokens)}")
    scheme = get_scheme(name)
    return scheme, SCHEMES["fp8_tensor"] if strategy == "tensor" and element == "float" else scheme


def _eight_bits(element: str, weights: Config, strategy: Any, bits: Any, token_strategy: Any) -> str | None:
    """The scheme of 8-bit weights that are stored unpacked; None for a combination that is not read."""
    same = bits == ("float" if element == "fp8" else "int", 8)
    if strategy == "block" and (bits is None or (same and token_strategy == "group")):
        rows, columns = _sizes(weights, "block_structure")
        stem = element if same else f"{element}_w8a16"
        return f"{stem}_block_{rows}x{columns}" if same or element == "fp8" else None
    if strategy == "group" and element == "int8" and bits is None:
        return f"int8_w8a16{_group(weights)}"
    if strategy not in (("channel", "tensor") if element == "fp8" else ("channel",)):
        return None
    if bits is None:
        return f"{element}_w8a16"
    if same and token_strategy == "token":
        return f"{element}_token"
    if same and token_strategy == "tensor" and element == "fp8":
        return "fp8_tensor" if strategy == "tensor" else "fp8_tensor_channel"
    return None


METHODS: dict[str, Callable[[Config], Method]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": lambda _: _inverse("mxfp8", SCHEMES["mxfp8"]),
    "blockwise_int8": lambda config: _in_blocks(config, "int8"),
    "w8a8_fp8": lambda _: _per_channel("w8a8_fp8", "fp8_token"),
    "w8a8_int8": lambda _: _per_channel("w8a8_int8", "int8_token"),
}


def method_of(config: Mapping[str, Any], name: str) -> Method | None:
    """How a checkpoint's weights are quantized; None if config.json has no quantization.

    Args:
        config: the content of config.json. name: its name in errors.
    Errors: ValueError for another method or option: names it and those that are supported. Local.
    """
    quantized = config.get("quantization_config")
    if quantized is None:
        return None
    read = f"{', '.join(DTYPES)}, {BLOCK_FP8}, {', '.join(list(METHODS)[1:])} are read (docs/checkpoints.md)"
    named = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    stored = f"{name}: weights are quantized on disk ({shown(named)})"
    if not isinstance(quantized, Mapping) or not isinstance(named, str) or named not in METHODS:
        raise ValueError(f"{stored}; {read}")
    try:
        return METHODS[named](quantized)
    except ValueError as error:
        if re.search("multiple of 16", str(error)):
            raise ValueError(f"{name}: {error}") from None
        raise ValueError(f"{stored} with {error}; {read}") from None
