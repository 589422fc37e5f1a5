"""The launches of one grouped GEMM by itself: the tile list and `_first_gemm_kernel` without an activation.

Letters: L experts, N and K rows and columns of a weight, M listed rows.
"""

import dataclasses
import functools
import threading
from typing import Any

import torch

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.launching import num_programs
from ep_moe.experts.prepared import choose_backend
from ep_moe.experts.requantize import prepare_tile_list
from ep_moe.experts.triton import TritonGemms
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.kernels.local.zero import _zero_rows_kernel
from ep_moe.quant import QuantScheme

_MOST_PREPARED = 256  # launches that are kept, of all threads
_ZERO_BLOCK = 1024  # columns that a program stores at a time
_ZERO_PROGRAMS_PER_SM = 8
_NO_SCALARS = ExpertScalars(None, None, None, None, None, None)
_NO_ACTIVATION = ActivationConfig(kind=ActivationKind.IDENTITY)


@functools.lru_cache(maxsize=_MOST_PREPARED)
def _sequence(
    thread: int,
    shape: CallShape,
    tiles: ExpertTiles | None,
    given: tuple[tuple[str, torch.dtype], ...],
    num_flags: int,
) -> LaunchSequence:
    """The launches of calls of one shape: zeros, the tile list, the gather of rows if there is one, and the GEMM.

    Args:
        tiles: None chooses by table. given: names and dtypes of the tensors of `ep_moe.local_moe.row_gemm`, in order.
        num_flags: of rows that may become zeros, 0 without.
    """
    del thread  # each has its own, so that none waits for another's launches
    backend, chosen = choose_backend(shape, [TritonGemms()], tiles)
    # no second GEMM sums the result in an order of its own
    chosen = dataclasses.replace(chosen, second=dataclasses.replace(chosen.second, swap=False))
    most = shape.max_tiles(chosen.block_m)
    pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tile_expert": ((most,), torch.int32),
        "first_tile": ((shape.num_experts,), torch.int32),
        "num_tiles": ((1,), torch.int32),
        **backend.workspace(shape, chosen),
    }
    tile_list = TileList("tile_expert", "first_tile", "num_tiles", None, None)
    rows, packed = Rows("row_start", "num_tokens", "source", "target", "factor"), Stored("packed", "packed_scale")
    x, x_scale = packed if "packed" in pieces else ("x", "x_scale")
    operands = Operands(x, x_scale, "w_values", "w_scale", "w_zero", "w_global_scale", "bias")
    listed = prepare_tile_list(shape.num_experts, most, chosen.block_m, shape.device)
    gather, gemm = backend.gather(shape, chosen), backend.first(shape, chosen, Between.ROUND)
    launches: list[tuple[Any, tuple[Any, ...]]] = [
        (listed, (Rows(None, "num_tokens", None), tile_list)),
        (gemm, (operands, Stored("out", None), _NO_SCALARS, rows, tile_list)),
    ]
    if gather is not None:
        listed_rows = Rows("row_start", "num_tokens", "source")
        launches.insert(1, (gather, ("x", "x_scale", packed, listed_rows, tile_list)))
    if num_flags:
        launches.insert(0, (_zero_launch(num_flags, shape.intermediate, shape.device), ("out", "zeros")))
    return LaunchSequence(launches, tuple(name for name, _ in given), pieces, shape.device)


def _zero_launch(num_flags: int, columns: int, device: torch.device) -> Kernel:
    """The launch that makes rows of a matrix zeros whose flag says so."""
    return Kernel(
        _zero_rows_kernel,
        num_programs(device, _ZERO_PROGRAMS_PER_SM, num_flags),
        settings=(num_flags, columns),
        constants={"BLOCK": _ZERO_BLOCK},
        device=device,
    )


def launch_row_gemm(
    tensors: dict[str, torch.Tensor],
    scheme: QuantScheme,
    *,
    hidden: int,
    expected_rows: int,
    tiles: ExpertTiles | None,
) -> LaunchSequence:
    """Compute `row_gemm.gemm_rows` of named tensors with `hidden` columns of a weight. Returns the launches."""
    x, out, scale = tensors["x"], tensors["out"], tensors.get("x_scale")
    shape = CallShape(
        device=x.device,
        scheme=scheme,
        dtype=out.dtype,
        activation=_NO_ACTIVATION,
        num_experts=tensors["w_values"].shape[0],
        hidden=hidden,
        intermediate=out.shape[1],
        expected_rows=expected_rows,
        max_rows=tensors["source"].shape[0],
        rows_apart=False,
        gathered=True,
        x_stride=x.stride(0),
        scale_height=1 if scale is None else max(scale.shape[0], 1),
        scale_strides=(0, 0, 0) if scale is None else (0, scale.stride(0), scale.stride(1)),
        static_scale=False,
        limited=False,
        up_first=False,
        alternating=False,
    )
    given = tuple((name, tensor.dtype) for name, tensor in tensors.items())
    num_flags = tensors["zeros"].shape[0] if "zeros" in tensors else 0
    sequence = _sequence(threading.get_ident(), shape, tiles, given, num_flags)
    if sequence.repeat([*map(torch.Tensor.data_ptr, tensors.values())]) is None:
        sequence.run(tensors)
    return sequence
