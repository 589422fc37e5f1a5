"""The launcher of the kernel that gathers rows into the order of the tile list."""

import triton

from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.launching import num_programs
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.gemm.arguments import RowGroups
from ep_moe.kernels.hopper.gather import _gather_rows_kernel

_ROWS = 4  # that a program copies at a time
_BLOCK_BYTES = 2048  # of a row, at a time
_PROGRAMS_PER_SM = 8


def prepare_gather(shape: CallShape, block_m: int) -> RepeatedLaunch:
    """Prepare the gather of calls of this shape, as `Backend.gather`. Local."""
    groups = shape.scheme.payload.num_groups(shape.hidden)
    rows, block = shape.max_tiles(block_m) * block_m, _BLOCK_BYTES // shape.row_dtype.itemsize
    return RepeatedLaunch(
        _gather_rows_kernel,
        num_programs(shape.device, _PROGRAMS_PER_SM, rows // _ROWS),
        settings=(shape.hidden, shape.x_stride, shape.scale_height, *shape.scale_strides, rows),
        constants={
            "PIECES": RowGroups(BLOCK_M=block_m, ROWS=_ROWS, BLOCK=block),
            "G": groups,
            "GROUPS": triton.next_power_of_2(max(groups, 1)),
        },
        options={"num_warps": 4},
        device=shape.device,
    )
