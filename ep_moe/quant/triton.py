"""Quantization of activations as a Triton kernel, bitwise equal to torch's. Runs on a CPU under TRITON_INTERPRET=1.

Letters: T rows, H row width, G scale groups of a row.
"""

import functools

import torch
import triton

from ep_moe.kernel_launch.constants import constants
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.rows.quantize import Groups, MicroTile, _quantize_micro_rows_kernel, _quantize_rows_kernel
from ep_moe.quant.base import TensorFormat, as_bytes

_PROGRAM_COLUMNS = 2048  # the most columns of a program, unless a single group is wider
_THREAD_COLUMNS = 16  # one 16-byte store
_MAX_WARPS = 16
_MOST_LAUNCHES = 256  # that are kept, one for each T
_MICRO_TOKENS = 16  # of a program: scales of a group, a byte each, lie next to each other by token


def quantize(
    x: torch.Tensor, stored: TensorFormat, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.quant.quantize` for x [T, H], in one launch: values and scale.

    A dynamic scale per tensor needs two torch reductions before it. Local, on the current stream, no host sync.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if stored.family == "micro":
        assert static_scale is None
        return _quantize_micro(x, stored)
    (num_tokens, width), groups = x.shape, stored.num_groups(x.shape[1])
    values = torch.empty(num_tokens, width, dtype=stored.dtype, device=x.device)
    scale = torch.empty(groups, num_tokens, dtype=torch.float32, device=x.device)
    if values.numel():
        mode, given = "own", None
        if static_scale is not None:
            mode, given = "static", static_scale.float()
        elif stored.granularity == "tensor":
            mode, given = "tensor", x.detach().abs().amax().float()
        launch = _launch_of(stored, num_tokens, width, x.stride(0), mode, x.dtype, x.device)
        launch((x, given, values, scale))
    return values, scale.t()


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def _launch_of(
    stored: TensorFormat,
    num_tokens: int,
    width: int,
    stride: int,
    mode: str,
    dtype: torch.dtype,
    device: torch.device,
) -> RepeatedLaunch:
    """The launch of calls with these sizes, of x in `dtype`."""
    del dtype  # Triton reads it off the tensors of the first call
    group, groups = stored.block[1] if stored.granularity == "group" else width, stored.num_groups(width)
    columns = triton.next_power_of_2(group)
    program_groups = min(max(_PROGRAM_COLUMNS // columns, 1), triton.next_power_of_2(num_tokens * groups))
    return RepeatedLaunch(
        _quantize_rows_kernel,
        triton.cdiv(num_tokens * groups, program_groups),
        settings=(num_tokens, stride),
        constants={
            "GROUPS": constants(Groups, H=width, WIDTH=group, COLUMNS=columns, G=groups, BLOCK=program_groups),
            "SCALE": mode,
            "POWER_OF_TWO": stored.power_of_two,
        },
        options={"num_warps": min(max(program_groups * columns // (32 * _THREAD_COLUMNS), 1), _MAX_WARPS)},
        device=device,
    )


def _quantize_micro(x: torch.Tensor, stored: TensorFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` for a format of `ep_moe.quant.micro` without a global scale: MXFP8 or NVFP4 rows."""
    (num_tokens, width), group = x.shape, stored.block[1]
    values = torch.empty(num_tokens, stored.row_values(width), dtype=stored.dtype, device=x.device)
    scale = torch.empty(stored.num_groups(width), num_tokens, dtype=stored.scale_dtype, device=x.device)
    if values.numel():
        tokens = min(_MICRO_TOKENS, triton.next_power_of_2(num_tokens))
        columns = max(min(_PROGRAM_COLUMNS // tokens, triton.next_power_of_2(width)), group)
        with torch.cuda.device_of(x):
            _quantize_micro_rows_kernel[(triton.cdiv(num_tokens, tokens) * triton.cdiv(width, columns),)](
                x,
                values,
                as_bytes(scale),
                num_tokens,
                x.stride(0),
                TILE=constants(MicroTile, H=width, WIDTH=group, TOKENS=tokens, COLUMNS=columns),
                num_warps=max(tokens * columns // stored.packed // (32 * _THREAD_COLUMNS), 1),
            )
    return values, scale.t()
