"""SGLang's `invoke_fused_moe_kernel`: one of the two GEMMs, over the pairs that `moe_align_block_size` sorted.

Letters: T tokens, K top-k, E experts, N and C rows and columns of a weight, M sorted pairs, Q blocks of them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import silu

from ep_moe.config import DTYPES
from ep_moe.functional.call import Operation, with_arguments
from ep_moe.functional.common import check_like
from ep_moe.functional.formats import GivenWeight, is_view, matrix_of, scheme_of
from ep_moe.functional.sglang.configs import tiles_of
from ep_moe.functional.sglang.pairs import GemmCall, row_lists, sorted_pairs
from ep_moe.local_moe.row_gemm import by_kernels, gemm_rows
from ep_moe.quant import Quantized, QuantScheme, quantize

if TYPE_CHECKING:
    from ep_moe.functional.sglang.gemm_plan import GemmPlan

_INTEGERS = (torch.int32, torch.int64)
_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of Triton's dtypes
_LORA: dict[str, Any] = {
    "fuse_add_to_output": False,
    "add_output_mask": None,
    "mask_output": False,
    "lora_preserve_base": False,
    "a_output_slices": 1,
}
_LISTS = "topk_weights topk_ids sorted_token_ids expert_ids num_tokens_post_padded"
_FLAGS = "use_fp8_w8a8 use_int8_w8a8 use_int8_w8a16 use_int4_w4a16 per_channel_quant block_shape"
_OPTIONS = "no_combine a_use_tma b_use_tma c_sorted filter_expert fuse_sum_all_reduce router_topk"


@with_arguments(
    GemmCall,
    f"A B bias C A_scale B_scale B_zp {_LISTS} mul_routed_weight top_k config compute_type {_FLAGS} {_OPTIONS} "
    "fuse_add_to_output add_output_mask mask_output lora_preserve_base fuse_swiglu a_output_slices",
    no_combine=False,
    b_use_tma=False,
    filter_expert=True,
    fuse_sum_all_reduce=False,
    router_topk=1,
    fuse_swiglu=False,
    **_LORA,
)
def invoke_fused_moe_kernel(given: Any) -> None:
    """C[pair] = A[pair // top_k] @ B[expert].T + bias[expert], times the pair's weight, for all sorted pairs.

    Args:
        A: [T, C] float32, bfloat16 or float16, quantized here if a flag says so; [T * K, C] with `top_k` 1.
        B: [E, N, C], two integers of 4 bits in a byte. bias: [E, N].
        C: [..., N] in `compute_type`, its rows the T * K pairs; written in place.
        A_scale: one number, static, `use_fp8_w8a8` without blocks. B_scale, B_zp, flags and `block_shape`: as
            `w1_scale`, `w1_zp` and so on of `fused_experts_impl`.
        topk_weights, topk_ids: [T, K]; of the ids only their number is used.
        sorted_token_ids: [M], pairs by expert, T * K and above where there is none. expert_ids: [Q], the expert of
            each block of BLOCK_SIZE_M pairs, -1 for no expert. num_tokens_post_padded: [1] or [2], first how many
            of the M count.
        mul_routed_weight: multiply by the weights. top_k: pairs that share a row of A.
        config: of `try_get_optimal_moe_config`; BLOCK_SIZE_M also says how pairs are sorted.
        compute_type: Triton's or torch's name of C's dtype.
        no_combine, b_use_tma: without meaning here: rows are stored by pair, B is read as the GPU can.
        a_use_tma: row i of A is that of sorted_token_ids[i], since blocks of rows are read at once.
        c_sorted: row i of C is that of sorted_token_ids[i]; the rows of no pair and of expert -1 are not written.
        filter_expert: without meaning: without `c_sorted` rows of expert -1 become zeros in any case.
        fuse_sum_all_reduce: C is [T * K / router_topk, N], and the sum of `router_topk` rows is added to each of its.
        fuse_swiglu: C is [..., N / 2], and has silu(gate) * up of rows of B that alternate, gate first; those of expert
            -1 are not written.
        fuse_add_to_output, add_output_mask, mask_output, lora_preserve_base, a_output_slices: of LoRA, refused.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. By kernels no host sync, and safe in CUDA graphs after a call of the same kind; an
    operator under torch.compile.
    """
    for name, default in _LORA.items():
        value = getattr(given, name)
        if isinstance(value, torch.Tensor) or value != default:
            raise ValueError(f"{name} is given, an option of LoRA that is not computed here")
    c, swiglu, adds, per_sum = given.C, given.fuse_swiglu, given.fuse_sum_all_reduce, given.router_topk
    num_pairs = given.topk_ids.numel()
    if swiglu and (adds or given.mul_routed_weight):
        raise ValueError("fuse_swiglu is set with fuse_sum_all_reduce or mul_routed_weight, of the second GEMM")
    if adds and (given.c_sorted or per_sum < 1 or num_pairs % per_sum):
        raise ValueError(
            f"fuse_sum_all_reduce is set with c_sorted {given.c_sorted} and router_topk {per_sum}; rows by pair, and a "
            f"divisor of the {num_pairs} pairs needed"
        )
    dtype, config = given.compute_type, given.config
    if (dtype if isinstance(dtype, torch.dtype) else _NAMES.get(str(dtype))) != c.dtype:
        raise ValueError(f"compute_type is {dtype}, C {c.dtype}: both are the same, one of {', '.join(DTYPES)}")
    for key, size in config.items():
        if not isinstance(size, int):
            raise ValueError(f"config: {key} ({size!r}) is not an integer")
    sizes = " ".join([f"{key}={int(config[key])}" for key in sorted(config)])
    rows = c
    if swiglu or adds:
        rows = c.new_zeros(len(given.sorted_token_ids) if given.c_sorted else num_pairs, given.B.shape[1])
    block = None if given.block_shape is None else list(given.block_shape)
    last = block, given.a_use_tma, given.c_sorted
    call = GemmCall._make((*given[:3], rows, *given[4:14], sizes, *given[16:21], *last))
    _OPERATION(call)
    if adds:
        _add_sums(rows.view(-1, per_sum, rows.shape[1]), c)
    if swiglu:
        _store_swiglu(call, c)


def _add_sums(rows: torch.Tensor, c: torch.Tensor) -> None:
    """Add the sum of the rows [S, K, N] of each of S results."""
    if c.shape != (rows.shape[0], rows.shape[2]):
        raise ValueError(f"C is {tuple(c.shape)}; {(rows.shape[0], rows.shape[2])} needed with fuse_sum_all_reduce")
    c.copy_(c.float() + rows.float().sum(1))


def _store_swiglu(call: GemmCall, c: torch.Tensor) -> None:
    """Store silu(gate) * up of the rows of experts, whose columns alternate."""
    rows = call.C
    if c.numel() != rows.numel() // 2 or c.shape[-1] != rows.shape[1] // 2 or rows.shape[1] % 2:
        raise ValueError(f"C is {tuple(c.shape)}; {len(rows)} rows of half of {rows.shape[1]} needed with fuse_swiglu")
    listed = sorted_pairs(call, call.config["BLOCK_SIZE_M"])
    there = torch.zeros(len(rows) + 1, dtype=torch.bool, device=rows.device)
    there.index_fill_(0, torch.where(listed.of_expert, listed.target, len(rows)), True)
    inner = silu(rows[:, 0::2].float()) * rows[:, 1::2].float()
    c.copy_(torch.where(there[:-1, None], inner.to(c.dtype), c.reshape(inner.shape)).view(c.shape))


def _launch(plan: "GemmPlan", call: GemmCall) -> torch.Tensor:
    return call.C if plan.again(call) else _compute(call, plan)[0]


def _compute(call: GemmCall, plan: "GemmPlan | None" = None) -> tuple[torch.Tensor, "GemmPlan | None"]:
    """The call, checked, by the plan of calls like it if there is one. Errors: ValueError. Local."""
    given = GivenWeight.of(call, "B", "A_scale", call.A_scale)
    scheme, block = scheme_of(call.flags, [given]), call.config["BLOCK_SIZE_M"]
    if call.A.dim() != 2 or call.A.dtype not in DTYPES.values() or call.B.dim() != 3:
        raise ValueError(f"A is {tuple(call.A.shape)} {call.A.dtype}, B {tuple(call.B.shape)}; [rows, C] and [E, N, C]")
    shape = (*call.B.shape[:2], call.A.shape[1])
    weight = matrix_of(given, scheme, call.flags, shape, call.A.dtype)
    if call.bias is not None:
        check_like(call.bias, "bias", shape[:2], tuple(DTYPES.values()))
    tiles = tiles_of(call.config, scheme, call.C.dtype, call.A.device, gated=False)
    c = _rows_of(call.C, shape[1])
    _check_lists(call, block, c.shape[0])
    if not scheme.payload.quantized and call.A.dtype != c.dtype:
        raise ValueError(f"A is {call.A.dtype}, C {c.dtype}: both are the same unless tokens are quantized")
    static = None if call.A_scale is None else _one(call.A_scale)
    if _by_plan(call, scheme):
        if plan is None:
            from ep_moe.functional.sglang.gemm_plan import GemmPlan  # Triton exists only on Linux

            plan = GemmPlan(call, scheme, block)
        in_place = is_view(given, scheme) and c.data_ptr() == call.C.data_ptr() and _dense(call)
        plan.run(call, weight, c, tiles, again=in_place)
    else:
        tokens: torch.Tensor | Quantized = call.A
        if scheme.payload.quantized:
            tokens = quantize(call.A, scheme, static_scale=static)
        gemm_rows(tokens, row_lists(call, block, c.shape[0]), weight, scheme, bias=call.bias, out=c, tiles=tiles)
    if c.data_ptr() != call.C.data_ptr():
        call.C.copy_(c.view(call.C.shape))
    return call.C, plan


def _by_plan(call: GemmCall, scheme: QuantScheme) -> bool:
    """Whether kernels make the lists: those of rows that lie by pair."""
    if call.a_use_tma or call.c_sorted or call.A.stride(1) != 1:
        return False
    sizes = call.sorted_token_ids.numel(), call.topk_ids.numel(), *call.B.shape, *call.A.shape
    return min(sizes) > 0 and by_kernels(call.A.device, scheme)


def _dense(call: GemmCall) -> bool:
    """Whether kernels read the weight and its bias where they are."""
    return all(tensor is None or tensor.is_contiguous() for tensor in (call.B, call.B_scale, call.bias))


def _one(scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"A_scale is {tuple(scale.shape)} {scale.dtype}; one float32 number needed")
    return scale.reshape(1)


def _rows_of(c: torch.Tensor, columns: int) -> torch.Tensor:
    """C as contiguous rows: a view, or a copy that is copied back."""
    if c.dim() < 2 or c.shape[-1] != columns or c.dtype not in DTYPES.values():
        raise ValueError(f"C is {tuple(c.shape)} {c.dtype}; rows of {columns} in one of {', '.join(DTYPES)} needed")
    return c.reshape(-1, columns) if c.is_contiguous() else c.contiguous().view(-1, columns)


def _check_lists(call: GemmCall, block: int, num_rows: int) -> None:
    """Raise ValueError unless the lists fit A, and C of `num_rows`; their values are not read."""
    pairs, blocks, num_pairs = call.sorted_token_ids, call.expert_ids, call.topk_ids.numel()
    most = pairs.shape[0] if pairs.dim() else 1
    for name, tensor in {"sorted_token_ids": pairs, "expert_ids": blocks}.items():
        if tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; one dimension of int32 needed")
    if blocks.shape[0] * block < most:
        raise ValueError(f"expert_ids has {blocks.shape[0]} blocks of {block}; sorted_token_ids has {most} pairs")
    if call.num_tokens_post_padded.numel() not in (1, 2):
        raise ValueError(f"num_tokens_post_padded is {tuple(call.num_tokens_post_padded.shape)}; 1 or 2 numbers needed")
    if call.topk_weights.numel() != num_pairs:
        shapes = f"topk_weights are {tuple(call.topk_weights.shape)}, topk_ids {tuple(call.topk_ids.shape)}"
        raise ValueError(f"{shapes}; the same needed")
    if call.top_k < 1:
        raise ValueError(f"top_k ({call.top_k}) must be at least 1")
    needed = most if call.a_use_tma else -(-num_pairs // call.top_k)
    if call.A.shape[0] < needed:
        raise ValueError(f"A has {call.A.shape[0]} rows; {needed} needed for {num_pairs} pairs and top_k {call.top_k}")
    needed = most if call.c_sorted else num_pairs
    if num_rows < needed:
        raise ValueError(f"C has {num_rows} rows; {needed} needed")


_OPERATION = Operation("invoke_fused_moe_kernel", GemmCall, _compute, launch=_launch, result="C")
