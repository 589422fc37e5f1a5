"""SGLang's `invoke_fused_moe_kernel`: one of the two GEMMs, over the pairs that `moe_align_block_size` sorted.

Letters: T tokens, K top-k, E experts, N and C rows and columns of a weight, M sorted pairs, Q blocks of them.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.library import custom_op
from torch.nn.functional import silu

from ep_moe.config import DTYPES
from ep_moe.functional.common import check_like, operator_arguments
from ep_moe.functional.formats import Flags, GivenWeight, is_view, matrix_of, scheme_of
from ep_moe.functional.plans import kinds, plans_of
from ep_moe.functional.sglang.configs import tiles_of
from ep_moe.local_moe.row_gemm import RowLists, by_kernels, gemm_rows
from ep_moe.quant import Quantized, QuantScheme, quantize

if TYPE_CHECKING:
    from ep_moe.functional.sglang.gemm_plan import GemmArguments, GemmPlan

_INTEGERS = (torch.int32, torch.int64)
_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of Triton's dtypes


class _Call(NamedTuple):
    """The arguments of the operator: those of the call, with its config as keys and numbers."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    b_zp: torch.Tensor | None
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    mul_routed_weight: bool
    top_k: int
    keys: str
    sizes: list[int]
    use_fp8_w8a8: bool
    use_int8_w8a8: bool
    use_int8_w8a16: bool
    use_int4_w4a16: bool
    per_channel_quant: bool
    block_shape: list[int] | None
    a_use_tma: bool
    c_sorted: bool

    @property
    def flags(self) -> Flags:
        """How B and A are stored."""
        return Flags(
            self.use_fp8_w8a8,
            self.use_int8_w8a8,
            self.use_int8_w8a16,
            self.use_int4_w4a16,
            self.per_channel_quant,
            self.block_shape,
        )


_TENSORS = _Call._fields.index("mul_routed_weight")  # before it are tensors alone
_SIZES = _Call._fields.index("sizes")
_FLAGS = slice(_SIZES + 1, _Call._fields.index("block_shape"))


def invoke_fused_moe_kernel(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    bias: torch.Tensor | None,
    C: torch.Tensor,  # noqa: N803
    A_scale: torch.Tensor | None,  # noqa: N803
    B_scale: torch.Tensor | None,  # noqa: N803
    B_zp: torch.Tensor | None,  # noqa: N803
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    config: Mapping[str, Any],
    compute_type: Any,
    use_fp8_w8a8: bool,
    use_int8_w8a8: bool,
    use_int8_w8a16: bool,
    use_int4_w4a16: bool,
    per_channel_quant: bool,
    block_shape: Sequence[int] | None = None,
    no_combine: bool = False,
    a_use_tma: bool = False,
    b_use_tma: bool = False,
    c_sorted: bool = False,
    filter_expert: bool = True,
    fuse_sum_all_reduce: bool = False,
    router_topk: int = 1,
    fuse_add_to_output: bool = False,
    add_output_mask: torch.Tensor | None = None,
    mask_output: bool = False,
    lora_preserve_base: bool = False,
    fuse_swiglu: bool = False,
    a_output_slices: int = 1,
) -> None:
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
    del no_combine, b_use_tma, filter_expert
    lora = {
        "fuse_add_to_output": fuse_add_to_output,
        "add_output_mask": add_output_mask is not None,
        "mask_output": mask_output,
        "lora_preserve_base": lora_preserve_base,
        "a_output_slices": a_output_slices != 1,
    }
    for name, given in lora.items():
        if given:
            raise ValueError(f"{name} is given, an option of LoRA that is not computed here")
    if fuse_swiglu and (fuse_sum_all_reduce or mul_routed_weight):
        raise ValueError("fuse_swiglu is set with fuse_sum_all_reduce or mul_routed_weight, of the second GEMM")
    if fuse_sum_all_reduce and (c_sorted or router_topk < 1 or topk_ids.numel() % router_topk):
        raise ValueError(
            f"fuse_sum_all_reduce is set with c_sorted {c_sorted} and router_topk {router_topk}; rows by pair, and a "
            f"divisor of the {topk_ids.numel()} pairs needed"
        )
    named = str(compute_type)
    wanted = compute_type if isinstance(compute_type, torch.dtype) else _NAMES.get(named)
    if wanted != C.dtype:
        raise ValueError(f"compute_type is {named}, C {C.dtype}: both are the same, one of {', '.join(DTYPES)}")
    keys = sorted(config)
    for key in keys:
        if not isinstance(config[key], int):
            raise ValueError(f"config: {key} ({config[key]!r}) is not an integer")
    rows = C
    if fuse_swiglu or fuse_sum_all_reduce:
        rows = C.new_zeros(len(sorted_token_ids) if c_sorted else topk_ids.numel(), B.shape[1])
    call = _Call(
        A,
        B,
        bias,
        rows,
        A_scale,
        B_scale,
        B_zp,
        topk_weights,
        topk_ids,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        mul_routed_weight,
        top_k,
        " ".join(keys),
        [int(config[key]) for key in keys],
        use_fp8_w8a8,
        use_int8_w8a8,
        use_int8_w8a16,
        use_int4_w4a16,
        per_channel_quant,
        None if block_shape is None else list(block_shape),
        a_use_tma,
        c_sorted,
    )
    (_op if torch.compiler.is_compiling() else _compute)(*call)
    if fuse_sum_all_reduce:
        _add_sums(rows.view(-1, router_topk, rows.shape[1]), C)
    if fuse_swiglu:
        _store_swiglu(call, C)


def _add_sums(rows: torch.Tensor, c: torch.Tensor) -> None:
    """Add the sum of the rows [S, K, N] of each of S results."""
    if c.shape != (rows.shape[0], rows.shape[2]):
        raise ValueError(f"C is {tuple(c.shape)}; {(rows.shape[0], rows.shape[2])} needed with fuse_sum_all_reduce")
    c.copy_(c.float() + rows.float().sum(1))


def _store_swiglu(call: _Call, c: torch.Tensor) -> None:
    """Store silu(gate) * up of the rows of experts, whose columns alternate."""
    rows = call.c
    if c.numel() != rows.numel() // 2 or c.shape[-1] != rows.shape[1] // 2 or rows.shape[1] % 2:
        raise ValueError(f"C is {tuple(c.shape)}; {len(rows)} rows of half of {rows.shape[1]} needed with fuse_swiglu")
    listed = _listed(call, dict(zip(call.keys.split(), call.sizes, strict=True))["BLOCK_SIZE_M"])
    there = torch.zeros(len(rows) + 1, dtype=torch.bool, device=rows.device)
    there.index_fill_(0, torch.where(listed.named, listed.target, len(rows)), True)
    inner = silu(rows[:, 0::2].float()) * rows[:, 1::2].float()
    c.copy_(torch.where(there[:-1, None], inner.to(c.dtype), c.reshape(inner.shape)).view(c.shape))


def _key_of(call: _Call) -> tuple[object, ...]:
    """All that a plan depends on: the kinds of all tensors, and all other arguments."""
    fields: tuple[Any, ...] = call
    there = [tensor for tensor in fields[:_TENSORS] if tensor is not None]
    absent = call.bias is None, call.a_scale is None, call.b_scale is None, call.b_zp is None
    block = None if call.block_shape is None else (*call.block_shape,)
    numbers = *fields[_TENSORS:_SIZES], (*call.sizes,), block, *fields[_FLAGS.stop + 1 :]
    return *numbers, *fields[_FLAGS], *absent, *kinds(there)


def _arguments(call: _Call) -> "GemmArguments":
    from ep_moe.functional.sglang.gemm_plan import GemmArguments  # Triton exists only on Linux

    return GemmArguments(
        call.a,
        call.b,
        call.b_scale,
        call.bias,
        call.c,
        call.a_scale,
        call.topk_weights,
        call.sorted_token_ids,
        call.expert_ids,
        call.num_tokens_post_padded,
    )


def _compute(*arguments: Any) -> None:
    call = _Call(*arguments)
    plans, key = plans_of("invoke_fused_moe_kernel", threading.get_ident()), _key_of(call)
    plan: GemmPlan | None = plans.get(key)
    if plan is not None and plan.repeat(_arguments(call)):
        return
    config = dict(zip(call.keys.split(), call.sizes, strict=True))
    given = GivenWeight("B", call.b, "B_scale", call.b_scale, "B_zp", call.b_zp, "A_scale", call.a_scale)
    scheme = scheme_of(call.flags, [given])
    if call.a.dim() != 2 or call.a.dtype not in DTYPES.values() or call.b.dim() != 3:
        raise ValueError(f"A is {tuple(call.a.shape)} {call.a.dtype}, B {tuple(call.b.shape)}; [rows, C] and [E, N, C]")
    shape = (*call.b.shape[:2], call.a.shape[1])
    weight = matrix_of(given, scheme, call.flags, shape, call.a.dtype)
    if call.bias is not None:
        check_like(call.bias, "bias", shape[:2], tuple(DTYPES.values()))
    tiles = tiles_of(config, scheme, call.c.dtype, call.a.device, gated=False)
    c = _rows_of(call.c, shape[1])
    _check_lists(call, config["BLOCK_SIZE_M"], c.shape[0])
    if not scheme.payload.quantized and call.a.dtype != c.dtype:
        raise ValueError(f"A is {call.a.dtype}, C {c.dtype}: both are the same unless tokens are quantized")
    static = None if call.a_scale is None else _one(call.a_scale)
    if _by_plan(call, scheme):
        if plan is None:
            plan = _new_plan(call, scheme, config["BLOCK_SIZE_M"])
            plans.keep(key, plan, call.a.device)
        in_place = is_view(given, scheme) and c.data_ptr() == call.c.data_ptr() and _dense(call)
        plan.run(_arguments(call), weight, c, tiles, repeats=in_place)
    else:
        lists = _lists(call, config["BLOCK_SIZE_M"], c.shape[0])
        tokens: torch.Tensor | Quantized = call.a
        if scheme.payload.quantized:
            tokens = quantize(call.a, scheme, static_scale=static)
        gemm_rows(tokens, lists, weight, scheme, bias=call.bias, out=c, tiles=tiles)
    if c.data_ptr() != call.c.data_ptr():
        call.c.copy_(c.view(call.c.shape))


def _by_plan(call: _Call, scheme: QuantScheme) -> bool:
    """Whether kernels make the lists: those of rows that lie by pair."""
    if call.a_use_tma or call.c_sorted or call.a.stride(1) != 1:
        return False
    sizes = call.sorted_token_ids.numel(), call.topk_ids.numel(), *call.b.shape, *call.a.shape
    return min(sizes) > 0 and by_kernels(call.a.device, scheme)


def _dense(call: _Call) -> bool:
    """Whether kernels read the weight and its bias where they are."""
    return all(tensor is None or tensor.is_contiguous() for tensor in (call.b, call.b_scale, call.bias))


def _new_plan(call: _Call, scheme: QuantScheme, block: int) -> "GemmPlan":
    from ep_moe.functional.sglang.gemm_plan import GemmPlan  # Triton exists only on Linux

    return GemmPlan(
        _arguments(call),
        scheme,
        num_pairs=call.topk_ids.numel(),
        num_experts=call.b.shape[0],
        block=block,
        top_k=call.top_k,
        weighted=call.mul_routed_weight,
    )


def _one(scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"A_scale is {tuple(scale.shape)} {scale.dtype}; one float32 number needed")
    return scale.reshape(1)


def _rows_of(c: torch.Tensor, columns: int) -> torch.Tensor:
    """C as contiguous rows: a view, or a copy that is copied back."""
    if c.dim() < 2 or c.shape[-1] != columns or c.dtype not in DTYPES.values():
        raise ValueError(f"C is {tuple(c.shape)} {c.dtype}; rows of {columns} in one of {', '.join(DTYPES)} needed")
    return c.reshape(-1, columns) if c.is_contiguous() else c.contiguous().view(-1, columns)


def _check_lists(call: _Call, block: int, num_rows: int) -> None:
    """Raise ValueError unless the lists fit A, and C of `num_rows`; their values are not read."""
    pairs, blocks, num_pairs = call.sorted_token_ids, call.expert_ids, call.topk_ids.numel()
    most = pairs.shape[0] if pairs.dim() else 1
    for name, tensor in (("sorted_token_ids", pairs), ("expert_ids", blocks)):
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
    if call.a.shape[0] < needed:
        raise ValueError(f"A has {call.a.shape[0]} rows; {needed} needed for {num_pairs} pairs and top_k {call.top_k}")
    needed = most if call.c_sorted else num_pairs
    if num_rows < needed:
        raise ValueError(f"C has {num_rows} rows; {needed} needed")


class _Listed(NamedTuple):
    """The sorted pairs [M] of a call."""

    pair: torch.Tensor  # in [0, P)
    expert: torch.Tensor
    target: torch.Tensor  # rows of C
    valid: torch.Tensor  # whether it is a pair
    named: torch.Tensor  # and of an expert


def _listed(call: _Call, block: int) -> _Listed:
    pairs, num_pairs, num_experts = call.sorted_token_ids, call.topk_ids.numel(), call.b.shape[0]
    place = torch.arange(pairs.shape[0], device=pairs.device)
    expert = call.expert_ids.repeat_interleave(block)[: pairs.shape[0]].long()
    valid = (place < call.num_tokens_post_padded.reshape(-1)[0]) & (pairs >= 0) & (pairs < num_pairs)
    pair = pairs.long().clamp(0, max(num_pairs - 1, 0))
    named = valid & (expert >= 0) & (expert < num_experts)
    return _Listed(pair, expert, place if call.c_sorted else pair, valid, named)


def _lists(call: _Call, block: int, num_rows: int) -> RowLists:
    """The pairs of each expert, and which rows of C are of no expert, by torch."""
    listed, num_experts = _listed(call, block), call.b.shape[0]
    key = torch.where(listed.named, listed.expert, num_experts)
    device = key.device
    order = torch.sort(key, stable=True).indices
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    starts = counts.cumsum(0) - counts
    source = torch.arange(len(key), device=device) if call.a_use_tma else listed.pair // call.top_k
    zeros = None
    if not call.c_sorted:
        zeros = torch.zeros(num_rows + 1, dtype=torch.bool, device=device)
        zeros.index_fill_(0, torch.where(listed.valid & ~listed.named, listed.target, num_rows), True)
        zeros = zeros[:-1]
    return RowLists(
        expert_row_start=starts[:-1].int(),
        expert_num_tokens=counts[:-1].int(),
        source=source[order].int(),
        target=listed.target[order].int(),
        factor=call.topk_weights.reshape(-1).float()[listed.pair[order]] if call.mul_routed_weight else None,
        zeros=zeros,
        expected_rows=max(-(-call.topk_ids.numel() // num_experts), 1),
    )


_op = custom_op(
    "ep_moe::invoke_fused_moe_kernel",
    _compute,
    mutates_args=("c",),
    schema=f"({operator_arguments(_Call, 'c')}) -> ()",
)


@_op.register_fake
def _fake(*arguments: Any) -> None:
    """It returns nothing; the real call checks its arguments."""
    del arguments
