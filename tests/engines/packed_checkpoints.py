"""Tiny checkpoints with experts in packed integers, MX formats or NVFP4, and what their dequantized weights compute.

Integers are quantized here, by the words of docs/formats.md and of the formats' own papers, and not by ep_moe.
Letters: N and K rows and columns of a weight, G scale groups of a row, P integers in an int32.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ep_moe.quant import (
    QuantScheme,
    StoredMatrix,
    dequantize,
    dequantize_weight,
    get_scheme,
    quantize,
    quantize_weight,
    round_trip,
)
from ep_moe.weights.writing import quantization_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Integers:
    """A form of packed integers.

    Args:
        method: quant_method. bits: 4 or 8. group: columns that share a scale, 0 all. symmetric: no zero points.
        scale: dtype of the scales. act_order: desc_act with static groups.
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    scale: torch.dtype = torch.float32
    act_order: bool = False


INTEGERS = {
    "int4_group": Integers(method="compressed-tensors"),
    "int4_channel": Integers(method="compressed-tensors", group=0),
    "int4_zp": Integers(method="compressed-tensors", symmetric=False),
    "int8_packed": Integers(method="compressed-tensors", bits=8),
    "int8_packed_zp": Integers(method="compressed-tensors", bits=8, group=0, symmetric=False),
    "gptq": Integers(method="gptq", scale=torch.float16),
    "gptq_static": Integers(method="gptq", scale=torch.float16, act_order=True),
    "gptq8": Integers(method="gptq", bits=8, group=0, scale=torch.float16, act_order=True),
    "gptq_zp": Integers(method="gptq", symmetric=False, scale=torch.float16),
    "awq": Integers(method="awq", symmetric=False, scale=torch.float16),
}
MICRO = {  # schemes of the family "micro"; tokens are quantized too but in the first and the fourth
    "nvfp4_w4a16": "nvfp4_w4a16_divisor",
    "nvfp4": "nvfp4_divisor",
    "nvfp4_modelopt": "nvfp4",
    "mxfp4": "mxfp4_w4a16",
    "mxfp8": "mxfp8",
    "mxfp8_modelopt": "mxfp8",
    "mxfp8_inverse": "mxfp8",
}
PACKED = (*INTEGERS, *MICRO)
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 is column AWQ_NIBBLES[i] of eight


def integers(matrix: torch.Tensor, form: Integers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales [N, G] and zero points [N, G] of a matrix: it is about (codes - zero) * scale."""
    largest = 2**form.bits - 1
    groups = matrix.unflatten(1, (-1, form.group or matrix.shape[1]))
    if form.symmetric:
        scale = (2 * groups.abs().amax(-1) / largest).to(form.scale)
        zero = torch.full_like(scale, (largest + 1) // 2, dtype=torch.float32)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / largest).to(form.scale)
        zero = (-low / scale.float()).round().clamp(1, largest)  # GPTQ stores them minus 1
    codes = (groups / scale.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, largest).flatten(1).int(), scale, zero.int()


def dequantized(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The matrix that codes [N, K], scales and zero points [N, G] stand for."""
    groups = codes.unflatten(1, (scale.shape[1], -1))
    return ((groups - zero[..., None]) * scale.float()[..., None]).flatten(1)


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [A, B] as int32 [A, B / P], the first in the lowest bits; or that which `order` names."""
    per = 32 // bits
    parts = codes.long().unflatten(1, (-1, per))[..., list(order or range(per))]
    words = (parts << (bits * torch.arange(per))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integer_parts(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, form: Integers) -> dict[str, Any]:
    """The tensors of a weight by the end of their names."""
    if form.method == "compressed-tensors":
        parts = {"weight_packed": packed(codes, form.bits), "weight_scale": scale.clone()}
        if not form.symmetric:
            parts["weight_zero_point"] = packed(zero.t(), form.bits).t().contiguous()
        return parts | {"weight_shape": torch.tensor(codes.shape)}
    if form.method == "awq":
        qweight, qzeros = packed(codes.t(), 4, AWQ_NIBBLES), packed(zero.t(), 4, AWQ_NIBBLES)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scale.t().contiguous()}
    width = codes.shape[1] // scale.shape[1]
    return {
        "qweight": packed(codes, form.bits).t().contiguous(),
        "qzeros": packed(zero.t() - 1, form.bits),
        "scales": scale.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // width).int(),
    }


def integer_config(form: Integers, ignored: list[str]) -> dict[str, Any]:
    """quantization_config; `ignored` modules are not quantized."""
    if form.method == "gptq":
        config = {"bits": form.bits, "group_size": form.group or -1, "sym": form.symmetric, "desc_act": form.act_order}
        dynamic = {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}
        return config | {"quant_method": "gptq", "static_groups": form.act_order, "lm_head": False, "dynamic": dynamic}
    if form.method == "awq":
        config = {"bits": form.bits, "group_size": form.group, "zero_point": True, "version": "gemm"}
        return config | {"quant_method": "awq", "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"]}
    weights = {
        "num_bits": form.bits,
        "type": "int",
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "symmetric": form.symmetric,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def micro_parts(stored: StoredMatrix, form: str) -> dict[str, torch.Tensor]:
    """The tensors of a weight [N, K] in an MX format or NVFP4, by the end of their names."""
    assert stored.scale is not None
    if stored.global_scale is None:
        values = "weight_packed" if form == "mxfp4" else "weight"
        scale = "weight_scale_inv" if form == "mxfp8_inverse" else "weight_scale"
        return {values: stored.values, scale: stored.scale.view(torch.uint8)}
    if form == "nvfp4_modelopt":
        scales = {"weight_scale": stored.scale, "weight_scale_2": stored.global_scale}
        return {"weight": stored.values, **scales, "input_scale": torch.tensor(1.0)}
    scales = {"weight_scale": stored.scale, "weight_global_scale": stored.global_scale.reshape(1)}
    tokens = {} if form == "nvfp4_w4a16" else {"input_global_scale": torch.ones(1)}
    return {"weight_packed": stored.values, **scales, **tokens}


def micro_config(form: str, ignored: list[str]) -> dict[str, Any]:
    """quantization_config; `ignored` modules are not quantized."""
    if form == "mxfp8_modelopt":
        return {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ignored}
    if form == "mxfp8_inverse":
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [1, 32]}
        return {"quant_method": "mxfp8", **blocks, "modules_to_not_convert": ignored}
    config = quantization_config(get_scheme(MICRO[form]), gpt_oss=False, ignored=ignored)
    if form == "mxfp8":  # by which vLLM knows it
        group = config["config_groups"]["group_0"]
        group["weights"]["scale_dtype"] = group["input_activations"]["scale_dtype"] = "torch.uint8"
    return config


def rounded_experts(
    module: Any, scheme: QuantScheme, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The scheme's oracle: both inputs are rounded, that of the second GEMM with a second scale for each row."""
    result = torch.zeros_like(x)
    tokens = dequantize(quantize(x, scheme))
    for token, row in enumerate(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
            inner = round_trip((torch.nn.functional.silu(gate) * up)[None], scheme)[0]
            result[token] += weight * (module.down_proj[expert] @ inner)
    return result


def quantized_parts(matrix: torch.Tensor, halves: int, form: str) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """The dequantized matrix, and the tensors of each half of its rows."""
    if form in INTEGERS:
        codes, scale, zero = integers(matrix, INTEGERS[form])
        parts = zip(codes.chunk(halves), scale.chunk(halves), zero.chunk(halves), strict=True)
        return dequantized(codes, scale, zero), [integer_parts(*part, INTEGERS[form]) for part in parts]
    scheme = get_scheme(MICRO[form])
    stored = quantize_weight(matrix, scheme)  # both halves at once: they share NVFP4's second scale
    rows = matrix.shape[0] // halves
    made = []
    for index in range(halves):
        half = stored.map(lambda t, i=index: t[i * rows : (i + 1) * rows].clone() if t.dim() else t.clone())
        made.append(micro_parts(half, form))
    return dequantize_weight(stored, scheme), made


def write_packed(folder: Path, plain: Path, model: Any, form: str) -> None:
    """Write the model of `plain` with its experts in a form; give the model the dequantized weights."""
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, module in model.named_modules():
        if not name.endswith("mlp.experts"):
            continue
        for weight, halves in ((module.gate_up_proj, ("gate_proj", "up_proj")), (module.down_proj, ("down_proj",))):
            for expert, matrix in enumerate(weight.data):
                weight.data[expert], made = quantized_parts(matrix, len(halves), form)
                for half, parts in zip(halves, made, strict=True):
                    tensors |= {f"{name}.{expert}.{half}.{end}": tensor for end, tensor in parts.items()}
        if form in MICRO and get_scheme(MICRO[form]).payload.quantized:
            module.forward = functools.partial(rounded_experts, module, get_scheme(MICRO[form]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ignored += [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    config = json.loads((plain / "config.json").read_text())
    settings = integer_config(INTEGERS[form], ignored) if form in INTEGERS else micro_config(form, ignored)
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
