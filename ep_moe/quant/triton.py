"""Quantization of activations as a Triton kernel, bitwise equal to torch's. Runs on a CPU under TRITON_INTERPRET=1.

Letters: T rows, H row width, G scale groups of a row.
"""

import torch
import triton

from ep_moe.kernel_launch.constants import constants
from ep_moe.kernels.rows.quantize import Groups, _quantize_rows_kernel
from ep_moe.quant.base import TensorFormat

_PROGRAM_COLUMNS = 2048  # the most columns of a program, unless a single group is wider
_THREAD_COLUMNS = 16  # one 16-byte store
_MAX_WARPS = 16


def quantize(
    x: torch.Tensor, stored: TensorFormat, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.quant.quantize` for x [T, H] and a format of `ep_moe.quant.scaled`, in one launch: values and scale.

    A dynamic scale per tensor needs two torch reductions before it. Local, on the current stream, no host sync.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    (num_tokens, width), groups = x.shape, stored.num_groups(x.shape[1])
    values = torch.empty(num_tokens, width, dtype=stored.dtype, device=x.device)
    scale = torch.empty(groups, num_tokens, dtype=torch.float32, device=x.device)
    if values.numel():
        mode, given = "own", None
        if static_scale is not None:
            mode, given = "static", static_scale.float()
        elif stored.granularity == "tensor":
            mode, given = "tensor", x.detach().abs().amax().float()
        group = stored.block[1] if stored.granularity == "group" else width
        columns = triton.next_power_of_2(group)
        program_groups = min(max(_PROGRAM_COLUMNS // columns, 1), triton.next_power_of_2(num_tokens * groups))
        with torch.cuda.device_of(x):
            _quantize_rows_kernel[(triton.cdiv(num_tokens * groups, program_groups),)](
                x,
                given,
                values,
                scale,
                num_tokens,
                x.stride(0),
                GROUPS=constants(Groups, H=width, WIDTH=group, COLUMNS=columns, G=groups, BLOCK=program_groups),
                SCALE=mode,
                POWER_OF_TWO=stored.power_of_two,
                num_warps=min(max(program_groups * columns // (32 * _THREAD_COLUMNS), 1), _MAX_WARPS),
            )
    return values, scale.t()
