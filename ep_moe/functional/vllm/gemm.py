"""`invoke_moe_batched_triton_kernel`: one GEMM of every expert's rows.

Letters: E experts, C rows of an expert, K columns that the GEMM reduces over, N those of its result, G scale groups.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_moe.config import DTYPES
from ep_moe.functional.call import Operation, Written, with_arguments
from ep_moe.functional.formats import GivenWeight, is_view, matrix_of
from ep_moe.functional.plans import multiples, quotients
from ep_moe.functional.sglang.configs import tiles_of
from ep_moe.functional.vllm.formats import RowFormat, check_counts, flags_of, row_scales, scheme_of, used_flag
from ep_moe.functional.vllm.quantize import no_token
from ep_moe.local_moe.row_gemm import RowLists, by_kernels, gemm_by_kernels, gemm_rows
from ep_moe.quant import Quantized

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence

_TRITON_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GemmCall(NamedTuple):
    """The arguments of the operator."""

    A: torch.Tensor
    B: torch.Tensor
    C: Written
    expert_num_tokens: torch.Tensor
    dtype: torch.dtype
    A_scale: torch.Tensor | None
    B_scale: torch.Tensor | None
    B_zp: torch.Tensor | None
    flag: str | None
    per_act_token_quant: bool
    block_shape: list[int] | None
    keys: str
    sizes: list[int]


_FLAGS = "use_fp8_w8a8 use_int8_w8a16 use_int4_w4a16"


@with_arguments(
    GemmCall,
    f"A B C expert_num_tokens compute_type A_scale B_scale B_zp {_FLAGS} config per_act_token_quant block_shape",
    block_shape=None,
)
def invoke_moe_batched_triton_kernel(given: Any) -> None:
    """C[e, :n] = A[e, :n] @ B[e].T for the n tokens of every expert e; other rows of C are not written.

    Args:
        A: [E, C, K] in `compute_type`; e4m3 with `use_fp8_w8a8`; int8 is multiplied by int8 B, without a flag.
        B: [E, N, K], or [E, N, K / 2] with `use_int4_w4a16`, the first of two in the low bits.
        C: [E, C, N] float32, bfloat16 or float16, any strides. expert_num_tokens: [>= E] integers.
        compute_type: of triton.language or torch: float32, bfloat16 or float16, to which results are rounded.
        A_scale: float32: one number or one for each expert; with `per_act_token_quant` [E, C, 1]; with `block_shape`
            [n, k] [E, C, K / k].
        B_scale: [E], [E, N, 1], or [E, N / n, K / k]. For weights alone [E, N, 1], or with `block_shape` [0, k]
            [E, N, K / k], of unsigned integers around `B_zp`, else 128 and 8, or of int8.
        B_zp: zero points of weights alone in groups; of 4 bits those of two rows in a byte.
        config: sizes of the kernels' tiles, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K and others that vLLM's files have;
            steps and stages are cut to what the scales and the GPU take.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. By kernels no host sync, and safe in CUDA graphs after a call of the same kind; an
    operator under torch.compile.
    """
    dtype = _TRITON_NAMES.get(str(given.compute_type), given.compute_type)
    if dtype not in DTYPES.values():
        raise ValueError(f"compute_type ({given.compute_type}) is not one of {', '.join(DTYPES)}")
    options = (
        used_flag(dict(zip(_FLAGS.split(), given[8:11], strict=True))),
        given.per_act_token_quant,
        given.block_shape,
    )
    sizes = " ".join(given.config), [*map(int, given.config.values())]
    _OPERATION(GemmCall._make((*given[:4], dtype, *given[5:8], *options, *sizes)))


class _Plan(NamedTuple):
    """The launches of a call that has returned; places: of the rows of each expert, and of all rows."""

    launches: "LaunchSequence"
    starts: torch.Tensor
    places: torch.Tensor

    def launch(self, call: GemmCall) -> torch.Tensor | None:
        """C of a later call; None, with nothing launched, if a tensor is not aligned to 16 bytes."""
        counts = call.expert_num_tokens
        if counts.dtype != torch.int32:
            counts = counts.to(torch.int32)
        lists = self.starts, counts, self.places, self.places
        tensors = call.A, call.A_scale, *lists, call.B, call.B_scale, call.C
        addresses = [each.data_ptr() for each in tensors if each is not None]
        return None if self.launches.repeat(addresses) is None else call.C


def _first(call: GemmCall) -> tuple[torch.Tensor, _Plan | None]:
    """The call, checked. Errors: ValueError. Local."""
    A, B, C = call.A, call.B, call.C  # noqa: N806
    if A.dim() != 3 or C.dim() != 3 or A.shape[:2] != C.shape[:2] or C.shape[2] != B.shape[1]:
        found = f"A is {tuple(A.shape)}, B {tuple(B.shape)}, C {tuple(C.shape)}"
        raise ValueError(f"{found}; [E, rows, K], [E, N, K] and [E, rows, N] needed")
    experts, height, width = A.shape
    check_counts(call.expert_num_tokens, experts)
    if C.dtype not in DTYPES.values():
        raise ValueError(f"C is {C.dtype}, not one of {', '.join(DTYPES)}")
    scaled = call.flag == "use_fp8_w8a8" or (call.flag is None and A.dtype == torch.int8)
    flag = "use_int8_w8a8" if scaled and call.flag is None else call.flag
    kind = (torch.int8 if flag == "use_int8_w8a8" else torch.float8_e4m3fn) if scaled else None
    rows = RowFormat.of(kind, call.per_act_token_quant and scaled, call.block_shape)
    given = GivenWeight.of(call, "B")
    scheme = scheme_of(flag, rows, call.block_shape, given)
    needed = rows.dtype or call.dtype
    if A.dtype != needed:
        what = f"with {flag}" if scaled else f"with compute_type {call.dtype}"
        raise ValueError(f"A is {A.dtype}; {needed} needed {what}")
    if not scaled and call.A_scale is not None:
        raise ValueError(f"A_scale is given, {flag or 'no use_* flag'} takes none")
    matrix = matrix_of(given, scheme, flags_of(flag, call.block_shape), (experts, B.shape[1], width), call.dtype)
    config = {"GROUP_SIZE_M": 1} | dict(zip(call.keys.split(), call.sizes, strict=True))
    tiles = tiles_of(config, scheme, call.dtype, A.device, gated=False)
    values = A.reshape(-1, width)
    x: torch.Tensor | Quantized = values
    if scaled:
        scale = row_scales(call.A_scale, "A_scale", (experts, height, rows.groups(width)), rows.per)
        x = Quantized(values=values, scale=scale.reshape(values.shape[0], -1), scheme=scheme)
    starts = multiples(height, experts, A.device)
    places = quotients(1, experts * height, A.device)[0, : experts * height]
    lists = RowLists(
        expert_row_start=starts,
        expert_num_tokens=call.expert_num_tokens[:experts].to(torch.int32),
        source=places,
        target=places,
        expected_rows=max(height, 1),
    )
    direct, plan = C.is_contiguous() and C.dtype == call.dtype, None
    out = C.view(-1, C.shape[2]) if direct else C.new_empty(values.shape[0], C.shape[2], dtype=call.dtype)
    if by_kernels(A.device, scheme) and values.numel() and out.numel():
        launches = gemm_by_kernels(x, lists, matrix, scheme, bias=None, out=out, tiles=tiles)
        read = values.data_ptr() == A.data_ptr()
        if isinstance(x, Quantized) and call.A_scale is not None:
            read = read and x.scale.data_ptr() == call.A_scale.data_ptr()
        dense = all(tensor is None or tensor.is_contiguous() for tensor in (B, call.B_scale))
        if direct and read and dense and is_view(given, scheme) and call.expert_num_tokens.stride(0) == 1:
            plan = _Plan(launches, starts, places)
    else:
        gemm_rows(x, lists, matrix, scheme, out=out, tiles=tiles)
    if not direct:
        empty = no_token(call.expert_num_tokens, experts, height).unsqueeze(2)
        C.copy_(torch.where(empty, C, out.view(C.shape).to(C.dtype)))
    return C, plan


_OPERATION = Operation("batched_gemm", GemmCall, _first, launch=_Plan.launch, result="C")
