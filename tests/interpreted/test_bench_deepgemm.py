"""`bench experts --beside deepgemm` with a stand-in for the package, which is for GPUs: it has the signature of
sgl-deep-gemm 0.1.5.post1, asserts what that needs of dtypes, shapes and the layout of scales, and computes in torch.
"""

import dataclasses
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_moe.bench.configs import ExpertsBenchConfig
from ep_moe.bench.experts_alone import experts_rank_main
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from interpreted.common import ON_CPU

pytestmark = pytest.mark.skipif(not ON_CPU, reason="on a GPU the package itself is measured")
ENGINE = EngineConfig(dtype="bfloat16", scheme="fp8_block", experts="triton", device="cpu")
CONFIG = ExpertsBenchConfig(
    preset="tiny", ep_size=8, rows=(5,), warmup=1, repeats=1, sample_experts=2, beside="deepgemm"
)
Pair = tuple[torch.Tensor, torch.Tensor]


def spread_out(scale: torch.Tensor, height: int, width: int, rows: int, columns: int) -> torch.Tensor:
    """Scales [E, A, B] of blocks of height x width as one for each of [E, rows, columns]."""
    return scale.repeat_interleave(height, 1)[:, :rows].repeat_interleave(width, 2)[:, :, :columns]


def masked_gemm(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Any = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d[e, :masked_m[e]] = a[e] @ b[e].T, of fp8 values with scales of 1x128 and 128x128."""
    (x, x_scale), (w, w_scale) = a, b
    experts, rows, columns = x.shape
    assert x.dtype == w.dtype == torch.float8_e4m3fn
    assert x_scale.dtype == w_scale.dtype == torch.float32
    assert (w.shape[0], w.shape[2]) == (experts, columns)
    assert x.is_contiguous()
    assert w.is_contiguous()
    assert x_scale.shape == (experts, rows, -(-columns // 128))
    aligned = -(-rows // 4) * 4  # a copy by TMA begins at 16 bytes; scales in another order would be copied first
    assert x_scale.stride() == (aligned * x_scale.shape[2], 1, aligned)
    assert w_scale.shape == (experts, -(-w.shape[1] // 128), -(-columns // 128))
    assert w_scale.is_contiguous()
    assert (d.shape, d.dtype, d.is_contiguous()) == ((experts, rows, w.shape[1]), torch.bfloat16, True)
    assert (masked_m.shape, masked_m.dtype, masked_m.is_contiguous()) == ((experts,), torch.int32, True)
    assert type(expected_m) is int
    assert expected_m > 0
    assert (recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast) == (None, None, None, "nk", True)
    real = x.float() * spread_out(x_scale, 1, 128, rows, columns)
    weight = w.float() * spread_out(w_scale, 128, 128, w.shape[1], columns)
    d.fill_(float("nan"))  # rows behind the last one are left to chance
    for expert, count in enumerate(masked_m.tolist()):
        assert 0 <= count <= rows
        d[expert, :count] = (real[expert, :count] @ weight[expert].t()).to(d.dtype)


def install(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None] | None = masked_gemm) -> None:
    module = types.ModuleType("deep_gemm")
    module.__file__, module.__version__ = "/there/deep_gemm/__init__.py", "0.1.5"  # type: ignore[attr-defined]
    if kernel is not None:
        module.m_grouped_fp8_fp4_gemm_nt_masked = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)


def measure(engine: EngineConfig = ENGINE) -> dict[str, Any]:
    """The row of 5 rows per expert."""
    (row,) = experts_rank_main(EPGroup.single("cpu"), engine, CONFIG)["rows"]
    return row


def test_each_gemm_is_checked_and_timed_beside_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    install(monkeypatch, lambda *args, **options: (calls.append("gemm"), masked_gemm(*args, **options))[1])
    row = measure()
    assert row["ok"], row["broken"]
    ours, theirs = row["figures"], row["baselines"]["deepgemm"]
    for name in ("first", "second"):
        times = ours[f"{name}_gemm_call_us"], theirs[f"{name}_gemm_call_us"]
        assert min(times) > 0
        assert theirs[f"{name}_gemm_speedup_ratio"] == times[1] / times[0]
    assert ours["call_us"] > 0
    assert "call_us" not in theirs  # torch computes between its GEMMs
    assert 1e-3 < theirs["worst_row_error"] < 3e-2
    assert row["setup"]["gemm_backend"] == row["setup"]["backend"] == "triton"
    assert row["setup"]["deepgemm"] == "0.1.5"
    assert len(calls) == 2 + 2 * 2  # the check; one warm-up and one timed call of each GEMM


def test_a_wrong_gemm_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(a: Pair, b: Pair, d: torch.Tensor, *args: Any, **options: Any) -> None:
        masked_gemm(a, b, d, *args, **options)
        d[1] *= 1.1

    install(monkeypatch, louder)
    row = measure()
    assert not row["ok"]
    assert [text.split(" (")[0] for text in row["broken"]] == ["deepgemm worst_row_error"]
    assert set(row["figures"]) == set(row["baselines"]["deepgemm"]) == {"worst_row_error"}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"scheme": "fp8_token"}, ValueError, "needs --quant fp8_block, --dtype bfloat16, .*these are fp8_token"),
        ({"dtype": "float16"}, ValueError, "these are fp8_block, float16, no biases, hidden (256)"),
        ({"experts": "torch"}, ValueError, "needs experts that are kernels (triton, hopper), not 'torch' on cpu"),
        ({}, RuntimeError, "beside (deepgemm) needs the package deep_gemm: "),
    ],
    ids=["scheme", "dtype", "experts", "package"],
)
def test_what_is_missing_is_said_before_anything_runs(
    changes: dict[str, str], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setattr("ep_moe.testing.random_experts.RandomExperts.local", pytest.fail)
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(error, match=pattern):
        measure(dataclasses.replace(ENGINE, **changes))


def test_another_deepgemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    words = r"needs m_grouped_fp8_fp4_gemm_nt_masked, which deep_gemm in /there/deep_gemm/__init__\.py has not"
    with pytest.raises(RuntimeError, match=words):
        measure()
