"""One grouped GEMM over lists of rows, against loops in float64; on a GPU and in Triton's interpreter."""

import pytest
import torch

from ep_moe.experts.tuning import ExpertTiles, GemmTiles
from ep_moe.local_moe.row_gemm import RowLists, gemm_rows
from ep_moe.quant import Quantized, StoredMatrix, dequantize, dequantize_weight, get_scheme, quantize, quantize_weight
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from interpreted.common import DEVICE, generator

EXPERTS, TOKENS, COLUMNS, ROWS = 3, 7, 64, 48
SMALL = GemmTiles(block_n=32, block_k=32, num_stages=2)
TILES = {"": None, "small": ExpertTiles(block_m=16, first=SMALL, second=SMALL, group_m=1)}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", ["none", "fp8_block_32x32", "int4_w4a16_g32_zp"])
def test_listed_rows(name: str, tiles: str, kernels: bool) -> None:
    scheme, random = get_scheme(name), generator(name)
    real = torch.randn(EXPERTS, ROWS, COLUMNS, generator=random) / 8
    weight = quantize_weight(real, scheme) if scheme.weight.quantized else StoredMatrix(real.bfloat16())
    x = torch.randn(TOKENS, COLUMNS, generator=random).bfloat16()
    given: torch.Tensor | Quantized = quantize(x, scheme) if scheme.payload.quantized else x
    seen = dequantize(given) if isinstance(given, Quantized) else x
    # expert 2 is listed first and expert 0 has no rows; entry 3 is of nobody
    starts, counts = torch.tensor([9, 4, 0]), torch.tensor([0, 2, 3])
    source, target = torch.tensor([6, 0, 6, 99, 1, 2]), torch.tensor([4, 1, 0, 99, 7, 3])
    factor, bias = torch.rand(6, generator=random) + 0.5, torch.randn(EXPERTS, ROWS, generator=random)
    expected = torch.full((8, ROWS), torch.nan, dtype=torch.float64)
    matrix = dequantize_weight(weight, scheme).double()
    for entry, expert in ((0, 2), (1, 2), (2, 2), (4, 1), (5, 1)):
        row = matrix[expert] @ seen[source[entry]].double() + bias[expert].double()
        expected[target[entry]] = row * factor[entry].double()
    zeros = torch.tensor([False, False, True] + [False] * 5)
    expected[2] = 0
    out = torch.full((8, ROWS), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    lists = [tensor.int().to(DEVICE) for tensor in (starts, counts, source, target)]
    if isinstance(given, Quantized):
        given = Quantized(values=given.values.to(DEVICE), scale=given.scale.t().to(DEVICE).t(), scheme=scheme)
    gemm_rows(
        given if isinstance(given, Quantized) else given.to(DEVICE),
        RowLists(
            **dict(zip(("expert_row_start", "expert_num_tokens", "source", "target"), lists, strict=True)),
            factor=factor.to(DEVICE),
            zeros=zeros.to(DEVICE),
            expected_rows=2,
        ),
        weight.map(lambda tensor: tensor.to(DEVICE)),
        scheme,
        bias=bias.to(DEVICE),
        out=out,
        tiles=TILES[tiles],
        kernels=kernels,
    )
    found = out.cpu()
    written = ~expected.isnan().any(1)
    assert torch.equal(found.isnan().all(1), ~written)
    assert bool((found[2] == 0).all())
    written[2] = False
    assert float(worst_row_error(found[written], expected[written])) < ROW_ERROR_LIMITS["bfloat16"]


def test_bad_tensors_are_named() -> None:
    lists = torch.zeros(2, dtype=torch.int32)
    rows = RowLists(expert_row_start=lists, expert_num_tokens=lists, source=lists, target=lists, expected_rows=1)
    weight, scheme = StoredMatrix(torch.zeros(2, 32, 16)), get_scheme("none")
    x, out = torch.zeros(4, 16), torch.zeros(4, 32)
    with pytest.raises(ValueError, match=r"x is \(4, 32\).*\[rows, 16\]"):
        gemm_rows(out, rows, weight, scheme, out=out)
    with pytest.raises(ValueError, match=r"out is \(4, 16\).*\[rows, 32\]"):
        gemm_rows(x, rows, weight, scheme, out=x)
    with pytest.raises(ValueError, match=r"bias is \(4, 32\).*\(2, 32\)"):
        gemm_rows(x, rows, weight, scheme, out=out, bias=out)
