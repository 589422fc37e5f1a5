"""Rows that become zeros where flags say so."""

import triton
import triton.language as tl


@triton.jit
def _zero_rows_kernel(
    x,  # [rows, N]
    is_zero,  # [rows] uint8
    num_rows,
    num_columns,
    BLOCK: tl.constexpr,
):
    """Each program looks at every num_programs-th row, and touches only those that become zeros."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        if tl.load(is_zero + row) != 0:
            first = (row + tl.zeros([BLOCK], tl.int64)) * num_columns
            for start in range(0, num_columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], tl.float32).to(x.dtype.element_ty)
                tl.store(x + first + column, zeros, mask=column < num_columns)
