"""One case for each kind of error, and for right kernels that are close to it."""

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from compile_check.case import Case, Target
from compile_check.faulty import kernels

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

ON_HOPPER = (
    "_copy_kernel",
    "_decoded_product_kernel",
    "_not_compiling_kernel",
    "_polling_kernel",
    "_publishing_kernel",
    "_spilling_kernel",
    "_store_products",
    "_strided_load_kernel",
    "publish",
)
TARGETS_OF = {f"compile_check.faulty.kernels.{name}": (90,) for name in ON_HOPPER}  # as `_case` says


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


POLLS = (90, "gfx942")


def _case(
    name: str,
    kernel: JITFunction,
    *args: Any,
    excuses: Any = (),
    payload_width_bytes: Any = (),
    targets: tuple[Target, ...] | None = (90,),
    **options: Any,
) -> Case:
    """By default of one target: instructions of products are other ones on the second, and all else is the same."""
    return Case(
        name=name,
        launch=lambda: kernel[(4,)](*args, **{"enable_fp_fusion": True, **options}),
        excuses=dict(excuses),
        payload_width_bytes=dict(payload_width_bytes),
        targets=targets,
    )


def _product(
    name: str,
    dtype: torch.dtype,
    *,
    m: int,
    widen: bool = False,
    excuses: Any = (),
    num_stages: int = 3,
    targets: tuple[int, ...] | None = (90,),
) -> Case:
    x, w, bias = _empty(m, 512, dtype=dtype), _empty(128, 512, dtype=dtype), _empty(128, dtype=BF16)
    flag, y = _empty(1, dtype=torch.uint8), _empty(m, 128, dtype=BF16)
    sizes: dict[str, Any] = {"M": m, "N": 128, "K": 128, "WIDEN": widen, "num_stages": num_stages}
    return _case(name, kernels._product_kernel, x, w, bias, flag, y, 512, excuses=excuses, targets=targets, **sizes)


def _decoded_product(name: str) -> Case:
    x, w, y = _empty(64, 512, dtype=BF16), _empty(128, 512, dtype=torch.int8), _empty(64, 128, dtype=BF16)
    return _case(name, kernels._decoded_product_kernel, x, w, y, 512, M=64, N=128, K=64, num_stages=3)


def _copy(name: str, dtype: torch.dtype, *, aligned: bool, payload_width_bytes: Any = ()) -> Case:
    x, table = _empty(4096, dtype=dtype), _empty(4, dtype=torch.int64)
    sizes = {"ALIGNED": aligned, "BLOCK": 2048, "payload_width_bytes": payload_width_bytes}
    return _case(name, kernels._copy_kernel, x, table, 4096, **sizes)


def _failing_launcher() -> None:
    raise ValueError("no such size")


def cases() -> list[Case]:
    """All cases; those whose name begins with "right" have no finding."""
    x = _empty(4096, dtype=BF16)
    words = {"_copy_kernel": 16}
    narrow_tile = {("_product_kernel", "tensor_core"): "16 rows are too few for the fp8 instructions of a warp group"}
    return [
        _product("right fp8", FP8, m=64, targets=None),
        _product("right bf16", BF16, m=64, targets=None),
        _product("right bf16 with few rows", BF16, m=16),
        _product("widened", FP8, m=64, widen=True, targets=None),
        _product("few rows", FP8, m=16, targets=None),
        _product("few rows, excused", FP8, m=16, num_stages=2, excuses=narrow_tile),
        _product("idle excuse", FP8, m=64, excuses=narrow_tile),
        _product("too many stages", BF16, m=64, num_stages=6),
        _decoded_product("running on"),
        _copy("right copy", FP8, aligned=True),
        _copy("right copy of words", torch.int32, aligned=True, payload_width_bytes=words),
        _copy("bytes", FP8, aligned=False),
        _copy("halves", BF16, aligned=False),
        _copy("words", torch.int32, aligned=False, payload_width_bytes=words),
        _case("spill", kernels._spilling_kernel, _empty(8192, dtype=torch.float32), BLOCK=8192, maxnreg=32),
        _case("strided", kernels._strided_load_kernel, x, x, 1, BLOCK=2048),
        _case("right polls", kernels._polling_kernel, x.view(torch.int32), x.view(torch.int32), BEHIND=True),
        _case("polls", kernels._polling_kernel, x.view(torch.int32), x.view(torch.int32), BEHIND=False, targets=POLLS),
        _case("right words", kernels._publishing_kernel, x.view(torch.int64), cache_modifier=".wt"),
        _case("weak words", kernels._publishing_kernel, x.view(torch.int64), cache_modifier=".cg"),
        _case("error", kernels._not_compiling_kernel, x),
        Case(name="unsaid fusion", launch=lambda: kernels._not_compiling_kernel[(4,)](x), targets=(90,)),
        Case(name="failing", launch=_failing_launcher),
        Case(name="idle", launch=lambda: None),
    ]
