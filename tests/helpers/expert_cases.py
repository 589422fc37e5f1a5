"""Received rows and weights of four experts, each different: the cases of the experts' tests.

Letters: L local experts, H hidden, I intermediate, N received rows.
"""

import dataclasses
import math
from typing import Any

import torch

from ep_moe.config import ActivationConfig, ActivationKind, Layout
from ep_moe.layout import Batched, Compact, ExpertBatch, Packed, TokenRows, pack
from ep_moe.quant import StoredMatrix, get_scheme, quantize, quantize_weight
from ep_moe.weights import ExpertWeights, PerExpert

EXPERTS = 4
# -1 everywhere in row 2; expert 1 has no token, expert 3 nearly all; 11 received rows
TOPK_IDS = [[0, 3], [3, -1], [-1, -1], [3, 0], [-1, 3], [2, 3], [3, -1], [0, 3], [3, 2], [3, -1], [3, 0]]
SILU = ActivationConfig()
GPT_OSS = ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=2.0)
ACTIVATIONS = {
    "silu": SILU,
    "gelu": ActivationConfig(kind=ActivationKind.GELU),
    "gpt-oss": GPT_OSS,
    "swiglu-unlimited": ActivationConfig(kind=ActivationKind.SWIGLU, alpha=0.7, beta=-0.5),
    "relu2": ActivationConfig(kind=ActivationKind.RELU2),
    "identity": ActivationConfig(kind=ActivationKind.IDENTITY),
    "gelu_tanh": ActivationConfig(kind=ActivationKind.GELU_TANH),
    "swiglu_step": ActivationConfig(kind=ActivationKind.SWIGLU_STEP, limit=0.5),
    "situ": ActivationConfig(kind=ActivationKind.SITU, alpha=1.5, beta=2.0, limit=1.0),
    "situ-linear": ActivationConfig(kind=ActivationKind.SITU, alpha=4.0),
} | {kind.value: ActivationConfig(kind=kind) for kind in ActivationKind if kind.value.endswith("_no_mul")}
OWN = {  # numbers of each expert
    "alpha": [1.702, 1.0, 0.4, 2.5],
    "beta": [1.0, 3.0, -0.5, 0.25],
    "limit": [7.0, 0.1, math.inf, 0.6],
    "w13_output_scale": [0.5, 9.0, 2.0, 1.25],
    "w13_gate_output_scale": [3.0, 9.0, 0.75, 1.5],
    "w2_output_scale": [0.125, 9.0, -3.0, 0.8],
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Received rows and weights."""

    rows: TokenRows
    weights: ExpertWeights
    dtype: torch.dtype

    def packed(self, layout: Layout) -> Packed:
        """The rows laid out, with NaN in all rows that hold no token."""
        packed = pack(
            self.rows,
            layout,
            scheme=self.weights.scheme,
            dtype=self.dtype,
            num_local_experts=EXPERTS,
            capacity=self.rows.x.shape[0] + 2,
            alignment=4,
        )
        batch = packed.batch
        if layout is not Layout.FLAT:
            fill_with_nan(batch.x, ~used_rows(batch))
            if batch.scale is not None:
                fill_with_nan(batch.scale, ~used_rows(batch))
        return packed

    def batch(self, layout: Layout, expected_rows: int = 5) -> ExpertBatch:
        """The batch of `packed`, with this hint."""
        return dataclasses.replace(self.packed(layout).batch, expected_rows=expected_rows)

    def with_weights(self, **changes: Any) -> "Case":
        """The case with other fields of the weights."""
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, **changes))

    def with_own(self, *names: str) -> "Case":
        """The case with these of `OWN`, in memory that is not contiguous."""
        device = self.rows.x.device
        own = {name: torch.tensor(OWN[name], device=device)[:, None].expand(EXPERTS, 2)[:, 0] for name in names}
        return self.with_weights(per_expert=PerExpert(**own))

    def gathered(self, pool: str) -> tuple[ExpertBatch, ExpertBatch]:
        """The COMPACT batch, and the same rows gathered from the pool of a "flat" or "batched" one."""
        compact, source = self.batch(Layout.COMPACT), self.batch(Layout.FLAT if pool == "flat" else Layout.BATCHED)
        row_index = torch.full((compact.x.shape[0],), 10**9, dtype=torch.int32)  # entries without a token are invalid
        ids = self.rows.local_topk_ids.tolist()
        for expert, start in enumerate(compact.expert_row_start.tolist()):
            rows = [token for token, chosen in enumerate(ids) if expert in chosen]
            if pool == "batched":
                rows = [expert * source.x.shape[1] + place for place in range(len(rows))]
            row_index[start : start + len(rows)] = torch.tensor(rows, dtype=torch.int32)
        fields = {field.name: getattr(compact, field.name) for field in dataclasses.fields(ExpertBatch)}
        fields |= {"x": source.x, "scale": source.scale, "row_index": row_index.to(compact.x.device)}
        return compact, (Compact if pool == "flat" else Batched)(**fields)


def fill_with_nan(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Write NaN, or another value if a dtype has none, into the rows [..., H] of x that a mask selects, in place."""
    nan = torch.full((1,), math.nan).to(x.dtype).to(x.device)
    if x.element_size() == 1:  # torch on a CPU writes fp8 by mask as bytes only
        x, nan = x.view(torch.uint8), nan.view(torch.uint8)
    x[rows] = nan


def used_rows(batch: ExpertBatch) -> torch.Tensor:
    """Mask of the output rows that hold a token."""
    used = torch.zeros(batch.output_shape[:-1], dtype=torch.bool, device=batch.x.device)
    for start, count in zip(batch.expert_row_start.tolist(), batch.expert_num_tokens.tolist(), strict=True):
        used.view(-1)[start : start + count] = True
    return used


def interleaved(rows: torch.Tensor | None) -> torch.Tensor | None:
    """[L, 2I, ...] of gate and up rows, one after the other."""
    if rows is None or rows.dim() < 2:
        return rows
    stored = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    turns = torch.stack(stored.chunk(2, dim=1), dim=2).flatten(1, 2)
    return turns.view(rows.dtype)


def make_case(
    scheme_name: str = "none",
    dtype: torch.dtype = torch.float32,
    activation: ActivationConfig = SILU,
    *,
    hidden: int = 144,
    intermediate: int = 80,
    biased: bool = True,
    static: bool = False,
    ids: list[list[int]] = TOPK_IDS,
    device: torch.device | str = "cpu",
) -> Case:
    """Random rows (NaN for rows without an expert) and weights in the scheme."""
    random, scheme = torch.Generator().manual_seed(11), get_scheme(scheme_name)
    width = intermediate * (2 if activation.kind.gated else 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    growing = torch.linspace(0.5, 2, EXPERTS)[:, None, None]
    w13 = normal(EXPERTS, width, hidden) * growing * 2 / hidden**0.5
    w2 = normal(EXPERTS, hidden, intermediate) * growing / intermediate**0.5
    fields: dict[str, Any] = {}
    for name, matrix in (("w13", w13), ("w2", w2)):
        stored = quantize_weight(matrix, scheme) if scheme.weight.quantized else StoredMatrix(matrix.to(dtype))
        fields[name] = stored.map(lambda tensor: tensor.to(device))
    if biased:
        for name, columns in (("w13_bias", width), ("w2_bias", hidden)):
            fields[name] = normal(EXPERTS, columns).to(device, dtype)
    if static:
        fields["w2_input_scale"] = torch.tensor([0.001, 0.02, 0.03, 0.005], device=device)
    topk_ids = torch.tensor(ids, dtype=torch.int32).reshape(len(ids), 2)
    x, scale = normal(len(ids), hidden).to(dtype), None
    if scheme.payload.quantized:
        first_scale = torch.tensor([0.006]) if static else None  # of x, whose largest magnitudes saturate
        payload = quantize(x, scheme, static_scale=first_scale)
        x, scale = payload.values, payload.scale
        fill_with_nan(scale, (topk_ids < 0).all(dim=1))
    fill_with_nan(x, (topk_ids < 0).all(dim=1))
    rows = TokenRows(
        x=x.to(device),
        scale=None if scale is None else scale.to(device),
        local_topk_ids=topk_ids.to(device),
        topk_weights=torch.where(topk_ids >= 0, torch.rand(topk_ids.shape, generator=random), 0.0).to(device),
    )
    return Case(rows=rows, weights=ExpertWeights(scheme=scheme, **fields), dtype=dtype)
