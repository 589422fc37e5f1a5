"""Experts in plain torch, for all formats: the implementation for CPUs, and the reference for every expert kernel.

Letters: N received token rows, K top-k, H hidden, I intermediate, G scale groups, L local experts, C rows of an expert
in BATCHED; W = 2I if the activation is gated, else I.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import gelu, relu, silu

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.layout import Batched, ExpertBatch, Flat, weighted_sum
from ep_moe.quant import as_bytes, dequantize_rows, dequantize_weight, round_trip
from ep_moe.weights import ExpertWeights


def apply_activation(
    x: torch.Tensor, activation: ActivationConfig, own: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> torch.Tensor:
    """Apply the function between the expert GEMMs, in float32.

    Example: "silu" on [gate; up] = [1, 2] is 1 * sigmoid(1) * 2 = 1.4621.

    Args:
        x: [..., W] floating point, [gate; up] if the activation is gated.
        activation: `ActivationConfig` and `ActivationKind` have the formulas.
        own: float32 scalars by the names "alpha", "beta", "limit", in place of those of `activation`.
    Returns: [..., I] float32.
    Errors: ValueError if a gated activation gets an odd width. Local, no host sync.
    """
    x, kind = x.float(), activation.kind
    if not kind.gated:
        return _OF_ONE[kind.value.removesuffix("_no_mul")](x)
    if x.shape[-1] % 2:
        raise ValueError(f"width ({x.shape[-1]}) must be even for the gated activation '{kind.value}'")
    gate, up = x.chunk(2, dim=-1)
    gate = _OF_ONE.get(kind.value, _itself)(gate)
    alpha, beta, limit = (own.get(name, getattr(activation, name)) for name in ("alpha", "beta", "limit"))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind is ActivationKind.SWIGLU:
        return gate * torch.sigmoid(alpha * gate) * (up + beta)
    if kind is ActivationKind.SITU:
        gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
        up = torch.where(torch.zeros_like(up) + beta > 0, beta * torch.tanh(up / beta), up)
    return gate * up


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


_OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # what a kind does to the gate, or to all
    "silu": silu,
    "swiglu_step": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
    "relu2": lambda x: relu(x).square(),
    "identity": _itself,
}


def check_fit(
    batch: ExpertBatch, weights: ExpertWeights, activation: ActivationConfig, out: torch.Tensor | None = None
) -> None:
    """Raise ValueError, with the found and the needed value, unless batch, weights and out fit each other.

    Local, no host sync: only shapes, dtypes and devices are checked.
    """
    scheme, w13 = weights.scheme, weights.w13.values
    if batch.x.dim() not in (2, 3):
        raise ValueError(f"x {tuple(batch.x.shape)} must have 2 or 3 dimensions")
    width = w13.shape[1]
    if activation.kind.gated and width % 2:
        raise ValueError(f"w13 has {width} rows, which the gated activation '{activation.kind.value}' needs to be even")
    if batch.scheme != scheme:
        raise ValueError(f"batch is in scheme '{batch.scheme.name}', weights are in '{scheme.name}'")
    if batch.dtype not in DTYPES.values():
        raise ValueError(f"dtype ({batch.dtype}) of the batch is not one of {', '.join(DTYPES)}")
    dims = 3 if isinstance(batch, Batched) else 2
    if batch.row_index is None and batch.x.dim() != dims:
        raise ValueError(f"x {tuple(batch.x.shape)} of a {type(batch).__name__} batch must have {dims} dimensions")
    if batch.row_index is None and dims == 3 and batch.x.shape[0] != w13.shape[0]:
        raise ValueError(f"x {tuple(batch.x.shape)} is of {batch.x.shape[0]} experts, w13 of {w13.shape[0]}")
    if isinstance(batch, Flat) and batch.row_index is None:
        raise ValueError("row_index is missing, a FLAT batch needs it")
    if weights.w2_input_scale is not None and scheme.activation.granularity != "tensor":
        per = scheme.activation.granularity
        raise ValueError(f"w2_input_scale is set, scheme '{scheme.name}' scales activations per {per}")
    if batch.scale is not None and not scheme.payload.quantized:
        raise ValueError(f"batch has a scale {tuple(batch.scale.shape)}, scheme '{scheme.name}' has none")
    if weights.w13_order is not None and scheme.payload.group_width:
        raise ValueError(
            f"w13_order is set, scheme '{scheme.name}' scales {scheme.payload.group_width} columns together"
        )
    own = weights.per_expert.tensors
    for name in {"alpha", "beta", "limit"} & own.keys() - {*activation.kind.numbers}:
        raise ValueError(f"{name} of each expert is set, it does not belong to '{activation.kind.value}'")
    if "w13_gate_output_scale" in own and not activation.kind.gated:
        raise ValueError(f"w13_gate_output_scale is set, activation '{activation.kind.value}' has no gate")
    if weights.up_first and not activation.kind.gated:
        raise ValueError(f"weights are up_first, activation '{activation.kind.value}' has no up half")
    if weights.alternating and (weights.up_first or not activation.kind.gated):
        what = "up_first" if weights.up_first else f"without an up half (activation '{activation.kind.value}')"
        raise ValueError(f"weights are alternating and {what}")
    if weights.alternating and scheme.weight.block[0] > 1:
        raise ValueError(
            f"weights are alternating, scheme '{scheme.name}' has scales of {scheme.weight.block[0]} rows, gate and up"
        )
    needed = _needed(batch, weights, activation)
    for name, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        for part in ("scale", "zero", "global_scale"):
            tensor = getattr(matrix, part)
            if tensor is not None and f"{name}_{part}" not in needed:
                what = f"{part.replace('_', ' ')} {tuple(tensor.shape)}"
                raise ValueError(f"{name} has a {what}, scheme '{scheme.name}' has none")
    if out is not None:
        needed["out"] = (out, batch.output_shape, batch.dtype)
    for name, (tensor, shape, dtype) in needed.items():
        if tensor is None:
            raise ValueError(f"{name} is missing, scheme '{scheme.name}' needs {shape}")
        dtype_fits = tensor.dtype == dtype if dtype is not None else tensor.is_floating_point()
        if tuple(tensor.shape) != shape or not dtype_fits or tensor.device != w13.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                f"batch and weights need {shape} {dtype or 'of any float'} on {w13.device}"
            )


def _needed(
    batch: ExpertBatch, weights: ExpertWeights, activation: ActivationConfig
) -> dict[str, tuple[torch.Tensor | None, tuple[int, ...], torch.dtype | None]]:
    """By name: a tensor, the shape that w13 and the batch require, and the dtype, None for any float dtype."""
    scheme = weights.scheme
    experts, width, row_values = weights.w13.values.shape
    hidden, intermediate = scheme.weight.row_width(row_values), width // 2 if activation.kind.gated else width
    x_lead = tuple(batch.x.shape[:-1])
    needed: dict[str, tuple[torch.Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        "x": (batch.x, (*x_lead, scheme.payload.row_values(hidden)), scheme.payload.dtype or batch.dtype),
        "expert_row_start": (batch.expert_row_start, (experts,), torch.int32),
        "expert_num_tokens": (batch.expert_num_tokens, (experts,), torch.int32),
    }
    if scheme.payload.quantized:
        scale_shape = (*x_lead, scheme.payload.num_groups(hidden))
        needed["scale"] = (batch.scale, scale_shape, scheme.payload.scale_dtype)
    for name, matrix, shape in (("w13", weights.w13, (width, hidden)), ("w2", weights.w2, (hidden, intermediate))):
        for part, (size, dtype) in scheme.weight.parts((experts, *shape), batch.dtype).items():
            needed[name if part == "values" else f"{name}_{part}"] = (getattr(matrix, part), size, dtype)
    if weights.w13_bias is not None:
        needed["w13_bias"] = (weights.w13_bias, (experts, width), None)
    if weights.w2_bias is not None:
        needed["w2_bias"] = (weights.w2_bias, (experts, hidden), None)
    if weights.w2_input_scale is not None:
        needed["w2_input_scale"] = (weights.w2_input_scale, (experts,), torch.float32)
    if weights.w13_order is not None:
        needed["w13_order"] = (weights.w13_order, (experts, hidden), torch.int64)
    for name, tensor in weights.per_expert.tensors.items():
        needed[name] = (tensor, (experts,), torch.float32)
    if batch.row_index is not None:
        needed["row_index"] = (batch.row_index, (batch.row_index.shape[0],), torch.int32)
    if isinstance(batch, Flat):
        tokens_by_topk = (x_lead[0], batch.token_to_row.shape[-1])
        needed["token_to_row"] = (batch.token_to_row, tokens_by_topk, torch.int32)
        needed["topk_weights"] = (batch.topk_weights, tokens_by_topk, torch.float32)
    return needed


class ReferenceExperts:
    """The two GEMMs of every expert in float32, one expert after the other.

    Tokens and weights are dequantized to float32; w13 @ x + b13 and the activation stay in float32; the intermediate
    is then rounded to the model's dtype, or requantized if the scheme is quantized; w2 @ . + b2 is rounded to the
    model's dtype. If the scheme scales activations per tensor, the intermediate of each expert is one tensor; if its
    weights have a global scale, each row of the intermediate has one too (`ep_moe.quant.round_trip`). Numbers of
    `weights.per_expert` multiply before the bias, or take the place of the activation's.
    FLAT rows are also rounded before the weighted sum, so results are bitwise those of COMPACT.

    Args:
        activation: between the two GEMMs.
        every_row: compute all rows of a BATCHED batch, which may hold anything, and write them: counts are then not
            read back to the host, so that calls can be captured in CUDA graphs.
    """

    name = "torch"

    def __init__(self, activation: ActivationConfig, *, every_row: bool = False) -> None:
        self.activation = activation
        self.every_row = every_row

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts of every row; `ep_moe.experts.base.Experts` has the arguments and the result.

        If the batch has a `row_index` and is not FLAT, the output is [rows of row_index, H].
        Local, on the current stream, reads counts and starts back to the host.
        """
        check_fit(batch, weights, self.activation, out)
        if isinstance(batch, Flat):
            assert batch.row_index is not None  # check_fit
            y = batch.x.new_empty(batch.row_index.shape[0], batch.hidden, dtype=batch.dtype)
            self._compute(batch, weights, y)
            summed = weighted_sum(y, batch.token_to_row, batch.topk_weights)
            return summed if out is None else out.copy_(summed)
        if out is None:
            out = batch.x.new_empty(batch.output_shape, dtype=batch.dtype)
        self._compute(batch, weights, out)
        return out

    def _compute(self, batch: ExpertBatch, weights: ExpertWeights, out: torch.Tensor) -> None:
        """Write the output rows [rows, H] or [L, C, H] of every expert that has tokens."""
        if self.every_row and isinstance(batch, Batched):
            experts, height = batch.x.shape[:2]
            starts, counts = [expert * height for expert in range(experts)], [height] * experts
        else:
            starts, counts = torch.stack([batch.expert_row_start, batch.expert_num_tokens]).tolist()
        for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count > 0:
                rows = _read_rows(batch, start, count)
                _rows_of(out, start, count).copy_(self._expert(rows, batch, weights, expert))

    def _expert(self, x: torch.Tensor, batch: ExpertBatch, weights: ExpertWeights, expert: int) -> torch.Tensor:
        """Compute one expert on x [n, H] float32; returns [n, H] float32, not yet rounded."""
        scheme = weights.scheme
        own = {name: tensor[expert] for name, tensor in weights.per_expert.tensors.items()}
        if weights.w13_order is not None:
            x = x[:, weights.w13_order[expert]]
        first = x @ dequantize_weight(weights.w13[expert], scheme).t()
        if weights.alternating:
            first = torch.cat([first[:, 0::2], first[:, 1::2]], dim=1)
        halves = list(first.chunk(2, dim=1)) if self.activation.kind.gated else [first[:, :0], first]
        if weights.up_first:
            halves.reverse()
        for half, name in zip(halves, ("w13_gate_output_scale", "w13_output_scale"), strict=True):
            if name in own:
                half *= own[name]
        if weights.w13_bias is not None:
            bias = weights.w13_bias[expert].float()
            first += torch.cat([bias[0::2], bias[1::2]]) if weights.alternating else bias
        if weights.up_first:
            first = torch.cat(halves, dim=1)
        inner = apply_activation(first, self.activation, own)
        if scheme.activation.quantized:
            static = None if weights.w2_input_scale is None else weights.w2_input_scale[expert]
            inner = round_trip(inner, scheme, static_scale=static)
        else:
            inner = inner.to(batch.dtype).float()
        second = inner @ dequantize_weight(weights.w2[expert], scheme).t()
        if "w2_output_scale" in own:
            second *= own["w2_output_scale"]
        if weights.w2_bias is not None:
            second += weights.w2_bias[expert].float()
        return second


def _rows_of(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """View rows [start, start + count) of [rows, .] or of flattened [L, C, .]; in the latter all of one expert."""
    height = tensor.shape[-2]
    block, first = (0, start) if tensor.dim() == 2 else divmod(start, max(height, 1))
    if start < 0 or first + count > height or block >= (tensor.shape[0] if tensor.dim() == 3 else 1):
        raise ValueError(f"rows [{start}, {start + count}) of an expert are not within {tuple(tensor.shape)}")
    return (tensor if tensor.dim() == 2 else tensor[block])[first : first + count]


def _read_rows(batch: ExpertBatch, start: int, count: int) -> torch.Tensor:
    """The rows of one expert, [count, H] float32: a view if they are float32 and contiguous already."""
    if batch.row_index is None:
        scale = None if batch.scale is None else _rows_of(batch.scale, start, count)
        return dequantize_rows(_rows_of(batch.x, start, count), scale, batch.scheme)
    index = _rows_of(batch.row_index.unsqueeze(1), start, count).squeeze(1).long()
    pool = batch.x.reshape(-1, batch.x.shape[-1])
    if batch.scale is None:
        return dequantize_rows(pool[index], None, batch.scheme)
    # bytes, since not every device indexes fp8; scales by (expert, row), since their strides cannot be flattened
    values, scales = pool.view(torch.uint8)[index].view(pool.dtype), as_bytes(batch.scale)
    height = scales.shape[-2]
    scale = scales[index] if scales.dim() == 2 else scales[index // height, index % height]
    return dequantize_rows(values, scale.view(batch.scale.dtype), batch.scheme)
