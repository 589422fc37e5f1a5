"""One GEMM of all experts by itself: the kernel against torch, in every layout and kind of scales.

Letters: L experts, C rows of an expert, K and N columns of rows and of results.
"""

from typing import Any

import pytest
import torch

from ep_moe.experts.rows_gemm import rows_gemm
from ep_moe.experts.rows_launch import by_kernels
from ep_moe.layout import Batched, Compact, ExpertBatch
from ep_moe.quant import StoredMatrix, get_scheme, quantize, quantize_weight
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from interpreted.common import DEVICE, generator

COUNTS, HEIGHT, WIDTH, COLUMNS = [3, 0, 21], 24, 144, 80
FORMATS = [
    ("none", torch.float32),
    ("none", torch.bfloat16),
    ("fp8_tensor", torch.bfloat16),
    ("fp8_token", torch.float16),
    ("fp8_block", torch.bfloat16),
    ("fp8_block_64x32", torch.float32),
    ("int8_token", torch.bfloat16),
    ("int8_block_16x48", torch.bfloat16),
    ("int8_w8a16", torch.bfloat16),
    ("int4_w4a16_g48_zp_f32", torch.float16),
]


def make(scheme_name: str, dtype: torch.dtype, layout: str) -> tuple[ExpertBatch, StoredMatrix, torch.Tensor]:
    """A batch whose unused rows are NaN where the format has NaN, weights and a bias, all on the device."""
    scheme, random = get_scheme(scheme_name), generator(f"{scheme_name} {layout}")
    experts = len(COUNTS)
    x = torch.randn(experts, HEIGHT, WIDTH, generator=random).to(dtype)
    for expert, count in enumerate(COUNTS):
        x[expert, count:] = torch.nan
    matrix: Any = torch.randn(experts, COLUMNS, WIDTH, generator=random) / WIDTH**0.5
    matrix = quantize_weight(matrix, scheme) if scheme.weight.quantized else StoredMatrix(matrix.to(dtype))
    values, scale = x, None
    if scheme.payload.quantized:
        rows = [quantize(each[:count], scheme) for each, count in zip(x, COUNTS, strict=True)]
        values = torch.zeros(x.shape, dtype=torch.uint8)
        scale = torch.full((experts, HEIGHT, scheme.payload.num_groups(WIDTH)), torch.nan)
        for expert, (count, own) in enumerate(zip(COUNTS, rows, strict=True)):
            values[expert, :count], scale[expert, :count] = own.values.view(torch.uint8), own.scale
        values = values.view(rows[0].values.dtype)
        if scheme.payload.granularity == "tensor":  # one number for each expert, in every row
            scale = scale[:, :1].expand(-1, HEIGHT, -1)
        scale = scale.to(DEVICE)
    starts = torch.arange(experts, dtype=torch.int32) * HEIGHT
    common: dict[str, Any] = {
        "scheme": scheme,
        "dtype": dtype,
        "expert_num_tokens": torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE),
        "expected_rows": 8,
    }
    bias = torch.randn(experts, COLUMNS, generator=random).to(DEVICE)
    matrix = matrix.map(lambda tensor: tensor.to(DEVICE))
    values = values.to(DEVICE)
    if layout == "batched":
        return (
            Batched(x=values, scale=scale, expert_row_start=starts.to(DEVICE), row_index=None, **common),
            matrix,
            bias,
        )
    if scale is not None:
        scale = scale.reshape(experts * HEIGHT, -1)
    index, first = None, starts
    if layout == "indexed":  # the rows of an expert the other way round
        index = torch.cat(
            [
                torch.arange(HEIGHT) * 0 - 1,
                *(start + torch.arange(n).flip(0) for start, n in zip(starts, COUNTS, strict=True)),
            ]
        )
        first = HEIGHT + torch.tensor([0, *COUNTS]).cumsum(0)[:-1].int()
        index = index.int().to(DEVICE)
    x = values.reshape(experts * HEIGHT, -1)
    return Compact(x=x, scale=scale, expert_row_start=first.to(DEVICE), row_index=index, **common), matrix, bias


def on_cpu(batch: ExpertBatch) -> dict[str, Any]:
    names = ("x", "scale", "expert_row_start", "expert_num_tokens", "row_index")
    tensors = {name: getattr(batch, name) for name in names}
    moved = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
    return moved | {"scheme": batch.scheme, "dtype": batch.dtype, "expected_rows": batch.expected_rows}


@pytest.mark.parametrize("layout", ["batched", "compact", "indexed"])
@pytest.mark.parametrize(("scheme", "dtype"), FORMATS, ids=str)
def test_formats_and_layouts(scheme: str, dtype: torch.dtype, layout: str) -> None:
    batch, matrix, bias = make(scheme, dtype, layout)
    bias_or_none = None if layout == "compact" else bias
    lead = batch.x.shape[:-1] if batch.row_index is None else batch.row_index.shape
    out = torch.full((*lead, COLUMNS), torch.nan, dtype=dtype, device=DEVICE)
    assert by_kernels(batch, matrix, bias_or_none, out) is out
    expected = rows_gemm(
        type(batch)(**on_cpu(batch)),
        matrix.map(lambda tensor: tensor.cpu()),
        bias=None if bias_or_none is None else bias_or_none.cpu(),
        out=torch.full(out.shape, torch.nan, dtype=dtype),
    )
    found, expected = out.cpu().reshape(-1, COLUMNS), expected.reshape(-1, COLUMNS)
    used = ~expected.isnan().any(1)
    assert int(used.sum()) == sum(COUNTS)
    assert bool(found[~used].isnan().all())
    assert float(worst_row_error(found[used], expected[used])) < ROW_ERROR_LIMITS[str(dtype).removeprefix("torch.")]


def test_the_reference_is_a_matrix_product() -> None:
    batch, matrix, bias = make("none", torch.float32, "batched")
    batch = Batched(**on_cpu(batch))
    found = rows_gemm(batch, matrix.map(lambda tensor: tensor.cpu()), bias=bias.cpu())
    for expert, count in enumerate(COUNTS):
        x, w = batch.x[expert, :count].double(), matrix.values[expert].cpu().double()
        torch.testing.assert_close(found[expert, :count].double(), x @ w.T + bias[expert].cpu(), rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named() -> None:
    batch, matrix, bias = make("none", torch.bfloat16, "batched")
    with pytest.raises(ValueError, match=r"w is \(2, 80, 144\); \[3 experts, N, K\] needed"):
        rows_gemm(batch, matrix[:2])
    with pytest.raises(ValueError, match=r"bias is \(\(3, 79\), torch.float32\); \(3, 80\)"):
        rows_gemm(batch, matrix, bias=bias[:, 1:])
    with pytest.raises(ValueError, match=r"out is \(\(3, 24, 80\), torch.float32\); \(3, 24, 80\) torch.bfloat16"):
        rows_gemm(batch, matrix, out=torch.empty(3, HEIGHT, COLUMNS, device=DEVICE))
