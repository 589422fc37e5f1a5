"""What says how a layer is quantized: the `quantization_config` of config.json, or SGLang's object made of it."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

SKIPPED_KEYS = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore")  # whose modules are skipped
READ = (
    "fp8, mxfp8, blockwise_int8, w8a8_fp8, w8a8_int8, modelopt, modelopt_fp4, mxfp4, gptq, awq and compressed-tensors"
)
# SGLang's names of methods: attributes that are keys of a quantization_config, or the one that holds all of it
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "fp8": {key: key for key in ("activation_scheme", "weight_block_size", "is_checkpoint_fp8_serialized")},
    "mxfp8": {},
    "blockwise_int8": {"activation_scheme": "activation_scheme", "weight_block_size": "weight_block_size"},
    "w8a8_fp8": {},
    "w8a8_int8": {},
    "mxfp4": {},
    "gptq": {
        "bits": "weight_bits",
        "group_size": "group_size",
        "checkpoint_format": "checkpoint_format",
        "dynamic": "dynamic",
    },
    "awq": {"bits": "weight_bits", "group_size": "group_size", "zero_point": "zero_point"},
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
    if name in _ATTRIBUTES:
        found = {key: getattr(quant_config, attribute, None) for key, attribute in _ATTRIBUTES[name].items()}
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
