"""Quantization of activations as a Triton kernel, bitwise equal to torch's. Runs on a CPU under TRITON_INTERPRET=1.

Letters: T rows, H row width, G scale groups of a row.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.rows.quantize import Groups, MicroTile, Scaling, _quantize_rows_kernel
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
    (num_tokens, width), groups = x.shape, stored.num_groups(x.shape[1])
    values = torch.empty(num_tokens, stored.row_values(width), dtype=stored.dtype, device=x.device)
    scale = torch.empty(groups, num_tokens, dtype=stored.scale_dtype, device=x.device)
    if values.numel():
        number = largest_or_scale(x, stored, static_scale)
        shape = QuantizeShape(stored, num_tokens, width, x.stride(0), static_scale is not None, x.dtype)
        quantize_launch(shape, x.device)((x, number, values, as_bytes(scale)))
    return values, scale.t()


def largest_or_scale(x: torch.Tensor, stored: TensorFormat, static_scale: torch.Tensor | None) -> torch.Tensor | None:
    """The number [1] float32 that scales of `quantize` follow from: the static scale, or the largest magnitude of x if
    one scale is for all of it; else None. Local, on the current stream, no host sync.
    """
    if static_scale is not None:
        return static_scale.float()
    return x.detach().abs().amax().float() if stored.granularity == "tensor" else None


class QuantizeShape(NamedTuple):
    """What determines the launch of `quantize`."""

    stored: TensorFormat
    num_tokens: int
    width: int
    stride: int  # between rows of x
    static: bool
    dtype: torch.dtype  # of x, which Triton reads off the tensors of the first call


class QuantizeKernel(NamedTuple):
    """How a shape is quantized: programs, their warps, and the constants of the kernel."""

    programs: int
    num_warps: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, shape: QuantizeShape, *, few: bool = False) -> "QuantizeKernel":
        """The kernel of this shape; each program has groups of one token if they are few."""
        stored, num_tokens, width = shape.stored, shape.num_tokens, shape.width
        group, groups = stored.block[1] if stored.granularity == "group" else width, stored.num_groups(width)
        if stored.family == "micro":
            assert not shape.static
            tokens = 1 if few else min(_MICRO_TOKENS, triton.next_power_of_2(num_tokens))
            columns = max(min(_PROGRAM_COLUMNS // tokens, triton.next_power_of_2(width)), group)
            programs = triton.cdiv(num_tokens, tokens) * triton.cdiv(width, columns)
            num_warps = max(tokens * columns // stored.packed // (32 * _THREAD_COLUMNS), 1)
            tile = MicroTile(H=width, WIDTH=group, TOKENS=tokens, COLUMNS=columns)
            return cls(programs, num_warps, {"GROUPS": tile, "SCALING": Scaling(MICRO=True)})
        columns = triton.next_power_of_2(group)
        parts, of_part = (num_tokens, groups) if few else (1, num_tokens * groups)  # no program has groups of two parts
        program_groups = min(max(_PROGRAM_COLUMNS // columns, 1), triton.next_power_of_2(of_part))
        programs = parts * triton.cdiv(of_part, program_groups)
        num_warps = min(max(program_groups * columns // (32 * _THREAD_COLUMNS), 1), _MAX_WARPS)
        scale = "static" if shape.static else "tensor" if stored.granularity == "tensor" else "own"
        found = Groups(H=width, WIDTH=group, COLUMNS=columns, G=groups, BLOCK=program_groups)
        scaling = Scaling(SCALE=scale, POWER_OF_TWO=stored.power_of_two)
        return cls(programs, num_warps, {"GROUPS": found, "SCALING": scaling})


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def quantize_launch(shape: QuantizeShape, device: torch.device) -> Kernel:
    """The launch of calls of this shape.

    It takes x, `largest_or_scale`, values, and scales [G, T] as bytes if they have one byte.
    """
    kernel = QuantizeKernel.of(shape)
    return Kernel(
        _quantize_rows_kernel,
        kernel.programs,
        settings=(shape.num_tokens, shape.stride),
        constants=kernel.constants,
        options={"num_warps": kernel.num_warps},
        device=device,
        early=True,
    )


def quantize_sequence(x: torch.Tensor, stored: TensorFormat, *, static: bool) -> LaunchSequence:
    """The launch of `quantize` for tokens like x [T, H], for longer sequences.

    It takes "tokens" and, if static or with one scale for all, "number", `largest_or_scale`; its workspace has
    "values" and "values_scale" [G, T], which kernels read as "values_scale:stored". Local; nothing is launched.
    """
    (num_tokens, width), kept = x.shape, torch.uint8 if stored.scale_dtype.itemsize == 1 else stored.scale_dtype
    assert stored.dtype is not None
    pieces = {
        "values": ((num_tokens, stored.row_values(width)), stored.dtype),
        "values_scale": ((stored.num_groups(width), num_tokens), stored.scale_dtype),
    }
    launch = quantize_launch(QuantizeShape(stored, num_tokens, width, x.stride(0), static, x.dtype), x.device)
    given = ("tokens", "number") if static or stored.granularity == "tensor" else ("tokens",)
    launches = [(launch, ("tokens", "number", "values", "values_scale:stored"))]
    aliases = {"values_scale:stored": ("values_scale", kept)}
    return LaunchSequence(launches, given, pieces, x.device, aliases=aliases)
