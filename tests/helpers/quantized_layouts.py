"""Checkpoints of every quantization, written from the published layouts, bit by bit, and the weights that they mean."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, EXPERTS, GROUP = 96, 64, 3, 32
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DENSE = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]  # the tensors of a weight by suffix, and the weight [N, K] float32


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout on disk.

    `write` makes a weight of N rows and K columns at random; `scheme` is the one that is read, `config` the content of
    quantization_config.
    """

    config: dict[str, Any]
    scheme: str
    write: Callable[[int, int, torch.Generator], Written]
    values: str = ".weight"


def bits_in_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [A, B] as int32 [A, B * bits / 32]; in each word place i, from the lowest bits, holds code order[i]."""
    per = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per), np.int64)
    for place in range(per):
        chosen = codes[:, (place if order is None else order[place]) :: per]
        words |= chosen.astype(np.int64) << (bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def integers(bits: int, group: int, scale_dtype: torch.dtype, rows: int, columns: int, random: torch.Generator) -> Any:
    """Codes and zero points at random, scales, and the weight (q - z) * s, group after group."""
    groups = columns // group
    codes = torch.randint(0, 2**bits, (rows, columns), generator=random).numpy()
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=random).numpy()
    scales = (torch.rand(rows, groups, generator=random) + 0.1).to(scale_dtype)

    def weight(zero: np.ndarray) -> torch.Tensor:
        shifted = torch.from_numpy(codes - zero.repeat(group, axis=1)).float()
        return shifted * scales.float().repeat_interleave(group, 1)

    return codes, zeros, scales, weight


def gptq(bits: int, group: int, *, points: bool, version: int) -> Callable[[int, int, torch.Generator], Written]:
    """qweight [K/8, N] with 8 rows in a word; qzeros [K/g, N/8], in version 1 minus 1; scales [K/g, N] float16."""

    def write(rows: int, columns: int, random: torch.Generator) -> Written:
        codes, zeros, scales, weight = integers(bits, min(group, columns), F16, rows, columns, random)
        zeros = zeros if points else np.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            ".qweight": bits_in_words(codes, bits).t().contiguous(),
            ".qzeros": bits_in_words((zeros.T - (version == 1)) % 2**bits, bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": torch.arange(columns, dtype=torch.int32) // min(group, columns),
        }
        return tensors, weight(zeros)

    return write


def awq(rows: int, columns: int, random: torch.Generator) -> Written:
    """qweight [K, N/8] and qzeros [K/g, N/8] with the columns 0, 2, 4, 6, 1, 3, 5, 7 of eight in a word; float16."""
    codes, zeros, scales, weight = integers(4, GROUP, F16, rows, columns, random)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": bits_in_words(codes.T, 4, order),
        ".qzeros": bits_in_words(zeros.T, 4, order),
        ".scales": scales.t().contiguous(),
    }
    return tensors, weight(zeros)


def packed(
    bits: int, group: int, scale_dtype: torch.dtype, *, points: bool
) -> Callable[[int, int, torch.Generator], Written]:
    """weight_packed int32 [N, K/8] of values + 8, weight_scale [N, K/g], weight_zero_point + 8 packed along N."""

    def write(rows: int, columns: int, random: torch.Generator) -> Written:
        codes, zeros, scales, weight = integers(bits, min(group, columns), scale_dtype, rows, columns, random)
        zeros = zeros if points else np.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            ".weight_packed": bits_in_words(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if points:
            tensors[".weight_zero_point"] = bits_in_words(zeros.T, bits).t().contiguous()
        return tensors, weight(zeros)

    return write


def plain(dtype: torch.dtype, per: str, *, static: bool = False) -> Callable[[int, int, torch.Generator], Written]:
    """weight in int8 or e4m3, weight_scale [N, 1], [1] or [ceil(N/16), ceil(K/32)]."""

    def write(rows: int, columns: int, random: torch.Generator) -> Written:
        values = (torch.randn(rows, columns, generator=random) * 40).round().clamp(-128, 127).to(dtype)
        tiles = {"channel": (rows, 1), "tensor": (1, 1), "block": (-(-rows // 16), columns // 32)}[per]
        scale = torch.rand(tiles, generator=random) + 0.1
        spread = scale.repeat_interleave(-(-rows // tiles[0]), 0).repeat_interleave(columns // tiles[1], 1)
        tensors = {".weight": values, ".weight_scale": scale.reshape(1) if per == "tensor" else scale}
        if static:
            tensors[".input_scale"] = torch.rand(1, generator=random) / 50 + 0.01
        return tensors, values.float() * spread[:rows]

    return write


def nibbles(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8))


def nvfp4(*, divisor: bool) -> Callable[[int, int, torch.Generator], Written]:
    """e2m1, the first low, an e4m3 scale for 16, and a float32 that multiplies (modelopt) or divides."""

    def write(rows: int, columns: int, random: torch.Generator) -> Written:
        codes = torch.randint(0, 16, (rows, columns), generator=random).numpy()
        scale = (torch.rand(rows, columns // 16, generator=random) * 100).to(torch.float8_e4m3fn)
        second = torch.tensor(37.3 if divisor else 0.0123)
        group = torch.from_numpy(E2M1[codes].astype(np.float32)) * scale.float().repeat_interleave(16, 1)
        names = (".weight_packed", ".weight_global_scale") if divisor else (".weight", ".weight_scale_2")
        tensors = {names[0]: nibbles(codes), ".weight_scale": scale, names[1]: second.reshape(1) if divisor else second}
        tensors[".input_global_scale" if divisor else ".input_scale"] = torch.ones(1)
        return tensors, group / second if divisor else group * second

    return write


def microscaled(values: str, *, four_bits: bool) -> Callable[[int, int, torch.Generator], Written]:
    """e2m1 or e4m3 with a byte for 32, which means 2^(byte - 127)."""

    def write(rows: int, columns: int, random: torch.Generator) -> Written:
        bytes_ = torch.randint(110, 135, (rows, columns // 32), generator=random).to(torch.uint8)
        spread = (2.0 ** (bytes_.float() - 127)).repeat_interleave(32, 1)
        if four_bits:
            codes = torch.randint(0, 16, (rows, columns), generator=random).numpy()
            real = torch.from_numpy(E2M1[codes].astype(np.float32))
            return {values: nibbles(codes), ".weight_scale": bytes_}, real * spread
        stored = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
        return {values: stored, ".weight_scale": bytes_}, stored.float() * spread

    return write


def inverse(write: Callable[[int, int, torch.Generator], Written]) -> Callable[[int, int, torch.Generator], Written]:
    """The same with its scales in weight_scale_inv."""

    def renamed(rows: int, columns: int, random: torch.Generator) -> Written:
        tensors, real = write(rows, columns, random)
        return {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in tensors.items()}, real

    return renamed


def compressed(form: str, weights: dict[str, Any], tokens: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group | {"input_activations": tokens}},
        "ignore": ["lm_head"],
    }


TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}
FP8_TOKEN = FP8 | TOKEN
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "strategy": "group", "group_size": 32}

LAYOUTS = {
    "gptq": Layout(
        GPTQ | {"checkpoint_format": "gptq"},
        "int4_w4a16_g32_zp_f16",
        gptq(4, GROUP, points=True, version=1),
        ".qweight",
    ),
    "gptq_v2": Layout(
        GPTQ | {"checkpoint_format": "gptq_v2"},
        "int4_w4a16_g32_zp_f16",
        gptq(4, GROUP, points=True, version=2),
        ".qweight",
    ),
    "gptq_symmetric_channel": Layout(
        GPTQ | {"sym": True, "group_size": -1}, "int4_w4a16_f16", gptq(4, 10**6, points=False, version=1), ".qweight"
    ),
    "gptq_int8": Layout(
        GPTQ | {"bits": 8, "sym": True}, "int8_w8a16_g32", gptq(8, GROUP, points=False, version=1), ".qweight"
    ),
    "awq": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        "int4_w4a16_g32_zp_f16",
        awq,
        ".qweight",
    ),
    "pack_quantized": Layout(
        compressed("pack-quantized", INT4), "int4_w4a16_g32", packed(4, GROUP, BF16, points=False), ".weight_packed"
    ),
    "pack_quantized_zero_points": Layout(
        compressed("pack-quantized", INT4 | {"symmetric": False}),
        "int4_w4a16_g32_zp",
        packed(4, GROUP, BF16, points=True),
        ".weight_packed",
    ),
    "pack_quantized_fp8_tokens": Layout(
        compressed("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}, FP8_TOKEN),
        "int4_w4a8_f32",
        packed(4, 10**6, F32, points=False),
        ".weight_packed",
    ),
    "pack_quantized_int8": Layout(
        compressed("pack-quantized", INT8), "int8_w8a16", packed(8, 10**6, BF16, points=False), ".weight_packed"
    ),
    "pack_quantized_int8_zero_points": Layout(
        compressed("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
        "int8_w8a16_g32_zp",
        packed(8, GROUP, BF16, points=True),
        ".weight_packed",
    ),
    "int8_token": Layout(compressed("int-quantized", INT8, INT8 | TOKEN), "int8_token", plain(torch.int8, "channel")),
    "fp8_dynamic": Layout(
        compressed("float-quantized", FP8 | {"strategy": "channel"}, FP8_TOKEN),
        "fp8_token",
        plain(torch.float8_e4m3fn, "channel"),
    ),
    "fp8_tensor_for_tokens": Layout(
        compressed("float-quantized", FP8 | {"strategy": "tensor"}, FP8_TOKEN),
        "fp8_token",
        plain(torch.float8_e4m3fn, "tensor"),
    ),
    "fp8_static": Layout(
        compressed("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": False}),
        "fp8_tensor_channel",
        plain(torch.float8_e4m3fn, "tensor", static=True),
    ),
    "fp8_per_tensor": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8_tensor_channel",
        plain(torch.float8_e4m3fn, "tensor"),
    ),
    "w8a8_int8": Layout({"quant_method": "w8a8_int8"}, "int8_token", plain(torch.int8, "channel")),
    "w8a8_fp8": Layout({"quant_method": "w8a8_fp8"}, scheme="fp8_token", write=plain(torch.float8_e4m3fn, "channel")),
    "blockwise_int8": Layout(
        {"quant_method": "blockwise_int8", "weight_block_size": [16, 32]},
        "int8_block_16x32",
        inverse(plain(torch.int8, "block")),
    ),
    "mxfp8": Layout({"quant_method": "mxfp8"}, scheme="mxfp8", write=inverse(microscaled(".weight", four_bits=False))),
    "fp8_weights_alone": Layout(
        compressed("naive-quantized", FP8 | {"strategy": "channel"}), "fp8_w8a16", plain(torch.float8_e4m3fn, "channel")
    ),
    "fp8_weights_alone_tensor": Layout(
        compressed("naive-quantized", FP8 | {"strategy": "tensor"}), "fp8_w8a16", plain(torch.float8_e4m3fn, "tensor")
    ),
    "fp8_blocks": Layout(
        compressed(
            "float-quantized",
            FP8 | {"strategy": "block", "block_structure": [16, 32]},
            FP8 | {"strategy": "group", "group_size": 32, "dynamic": True},
        ),
        "fp8_block_16x32",
        plain(torch.float8_e4m3fn, "block"),
    ),
    "nvfp4_compressed": Layout(
        compressed("nvfp4-pack-quantized", FP4, FP4 | {"dynamic": "local"}),
        "nvfp4_divisor",
        nvfp4(divisor=True),
        ".weight_packed",
    ),
    "nvfp4_weights_alone": Layout(
        compressed("nvfp4-pack-quantized", FP4), "nvfp4_w4a16_divisor", nvfp4(divisor=True), ".weight_packed"
    ),
    "nvfp4_modelopt": Layout(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, scheme="nvfp4", write=nvfp4(divisor=False)
    ),
    "nvfp4_modelopt_weights_alone": Layout(
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "nvfp4_w4a16", nvfp4(divisor=False)
    ),
    "nvfp4_modelopt_without_tokens": Layout(  # as vLLM reads it
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": FP4}}},
        "nvfp4_w4a16",
        nvfp4(divisor=False),
    ),
    "fp8_modelopt": Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "fp8_tensor_channel",
        plain(torch.float8_e4m3fn, "tensor", static=True),
    ),
    "mxfp4_compressed": Layout(
        compressed("mxfp4-pack-quantized", MX | {"num_bits": 4}),
        "mxfp4_w4a16",
        microscaled(".weight_packed", four_bits=True),
        ".weight_packed",
    ),
    "mxfp8_compressed": Layout(
        compressed(
            "mxfp8-quantized", MX | {"num_bits": 8}, FP8 | {"strategy": "group", "dynamic": True, "group_size": 32}
        ),
        "mxfp8",
        microscaled(".weight", four_bits=False),
    ),
    "mxfp8_weights_alone": Layout(
        compressed("mxfp8-quantized", MX | {"num_bits": 8}), "mxfp8_w8a16", microscaled(".weight", four_bits=False)
    ),
}


def base(expert: int, part: str, layer: int = 0) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"


def write_config(directory: Path, quantized: dict[str, Any], **changes: Any) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE}
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantized} | changes))


@functools.cache
def make(name: str) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, and the real weights by module."""
    layout = LAYOUTS[name]
    random, tensors, real = torch.Generator().manual_seed(5), {}, {}
    modules = {DENSE: (64, HIDDEN)}
    for expert in range(EXPERTS):
        modules |= {base(expert, part): (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        modules[base(expert, "down")] = HIDDEN, INTERMEDIATE
    for name, (rows, columns) in modules.items():
        written, real[name] = layout.write(rows, columns, random)
        tensors |= {f"{name}{suffix}": tensor for suffix, tensor in written.items()}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    return tensors, real


def write(directory: Path, name: str) -> tuple[Tensors, dict[str, torch.Tensor]]:
    tensors, real = (dict(found) for found in make(name))
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, LAYOUTS[name].config)
    return tensors, real


def layer_of(real: dict[str, torch.Tensor], expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([real[base(expert, "gate")], real[base(expert, "up")]]), real[base(expert, "down")]


class ActOrder:
    """Puts columns of weights that `write` has made into an order at random, each with its group."""

    def __init__(self, name: str, tensors: dict[str, torch.Tensor], real: dict[str, torch.Tensor], seed: int) -> None:
        self.suffix = {"gptq": ".g_idx", "pack_quantized": ".weight_g_idx"}[name]
        self._name, self._tensors, self._real = name, tensors, real
        self._random = torch.Generator().manual_seed(seed)

    def shuffle(self, module: str, order: torch.Tensor | None = None) -> torch.Tensor:
        """Change the tensors and the weight of a module; returns the order, which may be given."""
        weight = self._real[module]
        order = torch.randperm(weight.shape[1], generator=self._random) if order is None else order
        self._tensors[f"{module}{self.suffix}"] = (order // GROUP).int()
        values = f"{module}{LAYOUTS[self._name].values}"
        eight = torch.stack([(self._tensors[values] >> (4 * place)) & 15 for place in range(8)], -1)
        codes = eight.movedim(-1, 1).flatten(0, 1).t() if self._name == "gptq" else eight.flatten(1)
        words = bits_in_words(codes[:, order].numpy(), 4)
        self._tensors[values] = words.t().contiguous() if self._name == "gptq" else words
        self._real[module] = weight[:, order]
        return order
