"""Experts in float64, and weights as SGLang and vLLM store them with the numbers that these stand for.

From the documentation of formats and activations alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from ep_moe.functional.sglang import FusedMoE, MoeParallel
from ep_moe.placement import Placement
from ep_moe.testing import assert_same_bits, worst_row_error
from ep_moe.weights import ExpertWeights

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 6, 3, 20, 64, 96
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3}
ROUNDED_LIMIT = 2e-2  # of tokens in 8 bits: a value near a rounding boundary may go either way


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LLAMA = ("gate_proj", "down_proj", "up_proj")


def check(found: torch.Tensor, expected: torch.Tensor, limit: float = LIMITS[torch.bfloat16]) -> None:
    """Rows are within the limit; those that are zeros in `expected` are zeros."""
    assert found.shape == expected.shape
    found, expected = found.flatten(0, -2), expected.flatten(0, -2)
    idle = (expected == 0).all(1)
    assert bool((found[idle] == 0).all())
    assert float(worst_row_error(found[~idle], expected[~idle])) < limit


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, ep: int = 1, tp: int = 1) -> MoeParallel:
    """This process as a rank of several, without a group."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ep * tp)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    return MoeParallel(ep_size=ep, tp_size=tp)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def load(layer: FusedMoE, checkpoint: Path | dict[str, torch.Tensor], *, only: str = "") -> int:
    """As SGLang's models load experts: a part of each name is replaced, and the parameter's loader called."""
    tensors = tensors_of(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    parameters = dict(layer.named_parameters())
    mapping, count = FusedMoE.make_expert_params_mapping(*LLAMA, layer.num_experts), 0
    for name, tensor in tensors.items():
        for parameter, part, expert, shard in mapping:
            renamed = name.replace(part, parameter).rpartition("experts.")[2] if part in name and only in name else ""
            if renamed in parameters:
                own = parameters[renamed]
                own.weight_loader(own, tensor, name, shard_id=shard, expert_id=expert)
                count += 1
    return count


def same(layer: FusedMoE, directory: Path, rank: int = 0, size: int = 1) -> None:
    """The layer's weights are those of our own loader, bit for bit."""
    [expected] = ExpertWeights.from_pretrained(directory, Placement.linear(layer.num_experts, size), rank).values()
    found = layer.expert_weights
    assert found.scheme == expected.scheme
    assert found.named_tensors.keys() == expected.named_tensors.keys()
    for name, tensor in expected.named_tensors.items():
        assert_same_bits(found.named_tensors[name], tensor, name)
    assert layer.expert_weights is found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight [E, N, C] as SGLang stores it, and the real numbers that this stands for."""

    values: torch.Tensor
    real: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The flags of a format.

    Args:
        codes: dtype and range of stored numbers; none for floats. rows: how tokens are rounded.
        scales: None, "tensor", "channel", or the columns of a group; "block" for 32 x 16.
    """

    flags: dict[str, Any]
    codes: str = "none"
    scales: Any = None
    rows: str = "none"
    scale_dtype: torch.dtype = torch.float32
    zero: bool = False


def made(form: Format, rows: int, columns: int, dtype: torch.dtype, seed: int) -> Matrix:
    """A random weight of numbers around 1 / sqrt(columns)."""
    random = generator(seed)
    shape = (EXPERTS, rows, columns)
    if form.codes == "none":
        values = (torch.randn(shape, generator=random) / columns**0.5).to(dtype)
        return Matrix(values=values, real=values.double())
    tile = {"tensor": (rows, columns), "channel": (1, columns), "block": (32, 16)}.get(form.scales, (1, form.scales))
    counts = math.ceil(rows / tile[0]), math.ceil(columns / tile[1])
    size = {"fp8": 2.0, "int8": 64.0, "uint8": 64.0, "int4": 4.0}[form.codes] * columns**0.5
    scale = ((torch.rand((EXPERTS, *counts), generator=random) + 0.5) / size).to(form.scale_dtype)
    spread = scale.double().repeat_interleave(tile[0], 1).repeat_interleave(tile[1], 2)[:, :rows, :columns]
    zero = packed = None
    if form.codes == "fp8":
        values = (torch.randn(shape, generator=random) * 2).to(torch.float8_e4m3fn)
        numbers = values.double()
    elif form.codes == "int8":
        values = torch.randint(-127, 128, shape, generator=random).to(torch.int8)
        numbers = values.double()
    else:
        most = 255 if form.codes == "uint8" else 15
        codes = torch.randint(0, most + 1, shape, generator=random)
        middle = torch.full((EXPERTS, *counts), (most + 1) // 2)
        if form.zero:
            middle = torch.randint(most // 4, most - most // 4, (EXPERTS, *counts), generator=random)
            packed = zero = middle.to(torch.uint8)
            if form.codes == "int4":
                packed = zero[:, 0::2] | zero[:, 1::2] << 4
        numbers = codes.double() - middle.repeat_interleave(tile[1], 2).double()
        values = codes.to(torch.uint8)
        if form.codes == "int4":
            values = values[..., 0::2] | values[..., 1::2] << 4
    stored = scale[:, 0, 0] if form.scales == "tensor" else scale
    return Matrix(values=values, real=numbers * spread, scale=stored, zero=packed)


def rounded(x: torch.Tensor, how: str, static: float | None = None) -> torch.Tensor:
    """Rows as the GEMM sees them: e4m3 or int8 with a scale per "tensor", "token" or "group" of 16, or of a dtype."""
    if how in ("bfloat16", "float16", "float32"):
        return x.to(getattr(torch, how)).double()
    kind, per = how.split()
    largest = 448.0 if kind == "fp8" else 127.0
    tiles = {"tensor": x.reshape(1, -1), "token": x, "group": x.reshape(-1, 16)}[per]
    scale = (tiles.abs().amax(1, keepdim=True).clamp(min=1e-10) / largest).float().double()
    if static is not None:
        scale = torch.full_like(scale, static)
    numbers = (tiles / scale).clamp(-largest, largest)
    numbers = numbers.float().to(torch.float8_e4m3fn).double() if kind == "fp8" else numbers.round()
    return (numbers * scale).reshape(x.shape)


def activated(sums: torch.Tensor, **options: Any) -> torch.Tensor:
    """What lies between the GEMMs, by SGLang's arguments."""
    alpha, limit = options.get("gemm1_alpha"), options.get("gemm1_limit")
    name = options.get("activation", "silu")
    if options.get("is_gated") is False:
        tanh = functools.partial(F.gelu, approximate="tanh")
        found = {"relu2": lambda x: x.clamp(min=0) ** 2, "silu": F.silu, "gelu": F.gelu, "gelu_tanh": tanh}
        return found[name](sums)
    if name == "situ":
        gate, up = sums.chunk(2, 1)
        alpha = alpha or 4.0
        return (
            alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * (limit * torch.tanh(up / limit) if limit else up)
        )
    interleaved = options.get("gate_up_interleaved", True) if alpha else options.get("fuse_swiglu_interleaved", False)
    gate, up = (sums[:, 0::2], sums[:, 1::2]) if interleaved else sums.chunk(2, 1)
    sigmoid = lambda x: 1 / (1 + torch.exp(-x))  # noqa: E731
    if alpha:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * sigmoid(alpha * gate) * (up + 1)
    if limit:
        return (gate * sigmoid(gate)).clamp(max=limit) * up.clamp(-limit, limit)
    if options.get("swiglu_limit"):
        most = options["swiglu_limit"]
        gate, up = gate.clamp(max=most), up.clamp(-most, most)
    if name == "gelu":
        return up * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    if name == "gelu_tanh":
        return up * gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return up * gate * sigmoid(gate)


def expert_rows(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    how: str = "bfloat16",
    *,
    static: float | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    factors: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Rows [n, H] of one expert; the intermediate is rounded as `how`, factors [n, 1] multiply the first sums."""
    sums = x.double() @ w1.double().T
    sums = sums if biases[0] is None else sums + biases[0].double()
    inner = activated(sums if factors is None else sums * factors, **options)
    out = rounded(inner, how, static) @ w2.double().T
    return out if biases[1] is None else out + biases[1].double()


def routed_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    expert: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor],
    num_experts: int,
    *,
    on_input: bool = False,
    weighted: bool = True,
) -> torch.Tensor:
    """The rows [T, K, H] of all pairs of a token and one of the experts, zeros of others; weighted in either place.

    Args: expert: a function of an expert, its rows of x, and what multiplies their first sums.
    """
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for number in range(num_experts):
        token, column = (ids == number).nonzero(as_tuple=True)
        if len(token):
            factors = weights[token, column, None].double()
            rows = expert(number, x[token], factors if on_input else None)
            out[token, column] = rows * factors if weighted and not on_input else rows
    return out


def flags(**more: Any) -> dict[str, Any]:
    return more


FORMATS = {
    "none": Format(flags={}),
    "fp8_tensor": Format(flags=flags(use_fp8_w8a8=True), codes="fp8", scales="tensor", rows="fp8 tensor"),
    "fp8_channel": Format(
        flags=flags(use_fp8_w8a8=True, per_channel_quant=True), codes="fp8", scales="channel", rows="fp8 token"
    ),
    "fp8_block": Format(
        flags=flags(use_fp8_w8a8=True, block_shape=[32, 16]), codes="fp8", scales="block", rows="fp8 group"
    ),
    "int8_channel": Format(
        flags=flags(use_int8_w8a8=True, per_channel_quant=True), codes="int8", scales="channel", rows="int8 token"
    ),
    "int8_block": Format(
        flags=flags(use_int8_w8a8=True, block_shape=[32, 16]), codes="int8", scales="block", rows="int8 group"
    ),
    "int8_alone": Format(flags=flags(use_int8_w8a16=True), codes="int8", scales="channel"),
    "int8_groups": Format(flags=flags(use_int8_w8a16=True, block_shape=[0, 32]), codes="uint8", scales=32),
    "int8_groups_zp": Format(
        flags=flags(use_int8_w8a16=True, block_shape=[0, 32]),
        codes="uint8",
        scales=32,
        zero=True,
        scale_dtype=torch.bfloat16,
    ),
    "int4_alone": Format(flags=flags(use_int4_w4a16=True), codes="int4", scales="channel", scale_dtype=torch.bfloat16),
    "int4_groups": Format(
        flags=flags(use_int4_w4a16=True, block_shape=[0, 32]), codes="int4", scales=32, scale_dtype=torch.float16
    ),
    "int4_groups_zp": Format(flags=flags(use_int4_w4a16=True, block_shape=[0, 16]), codes="int4", scales=16, zero=True),
}
