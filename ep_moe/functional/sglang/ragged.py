"""SGLang's `triton_kernel_*` calls: fused experts with triton_kernels' routing data and weights.

Weights have the columns of the tokens as rows, [E, H, 2I] and [E, I, H]. A transposed view of ours is used as it is;
a contiguous one is copied in each call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from ep_moe.config import DTYPES
from ep_moe.functional.common import check_like, experts_for, operator_arguments
from ep_moe.functional.formats import scheme_of
from ep_moe.functional.sglang.configs import found_tiles
from ep_moe.functional.sglang.experts import (
    ExpertsCall,
    check_tokens,
    halves_of,
    in_halves,
    kept_or_new,
    run_routed,
    swiglu,
)
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

_MXFP4_GROUP = 32


class _Call(NamedTuple):
    """The arguments of the operator."""

    hidden_states: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    num_topk: int
    activation: str
    apply_router_weight_on_input: bool
    use_fp8_w8a8: bool
    per_channel_quant: bool
    global_num_experts: int
    expert_map: torch.Tensor | None
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    a1_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None
    block_shape: list[int] | None
    gemm1_alpha: float | None
    gemm1_limit: float | None

    @property
    def is_mxfp4(self) -> bool:
        """Weights are MXFP4: bytes of two elements with scales beside them, without a flag."""
        return self.w1.dtype == torch.uint8 and not self.use_fp8_w8a8

    def as_experts(self, routing: Routing) -> ExpertsCall:
        """The same call with weights in the order of `outplace_fused_experts`: views."""
        scales = [
            scale if scale is None or self.block_shape is None else scale.transpose(1, 2)
            for scale in (self.w1_scale, self.w2_scale)
        ]
        return ExpertsCall(
            self.hidden_states,
            self.w1.transpose(1, 2),
            self.w2.transpose(1, 2),
            routing.topk_weights,
            routing.topk_ids,
            self.b1,
            self.b2,
            self.activation,
            self.apply_router_weight_on_input,
            self.use_fp8_w8a8,
            False,
            False,
            False,
            self.per_channel_quant,
            scales[0],
            scales[1],
            None,
            None,
            self.a1_scale,
            self.a2_scale,
            self.block_shape,
            False,
            None,
            self.gemm1_alpha,
            self.gemm1_limit,
        )


class _ByExpert(NamedTuple):
    """Routing data by expert."""

    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    num_topk: int


def _pairs(data: _ByExpert, num_tokens: int, expert_map: torch.Tensor | None) -> tuple[Routing, torch.Tensor]:
    """The routing [T, K] that the data by expert say, and the pair that each pair's row is read of."""
    num_topk = data.num_topk
    num_pairs, device = num_tokens * num_topk, data.gate_scal.device
    for name in ("gate_scal", "source", "target"):
        tensor = getattr(data, name)
        if tuple(tensor.shape) != (num_pairs,):
            argument = {"source": "gather_indx.src_indx", "target": "scatter_indx.dst_indx"}.get(name, name)
            raise ValueError(
                f"{argument} is {tuple(tensor.shape)}; ({num_pairs},) needed for {num_tokens} tokens and "
                f"n_expts_act {num_topk}"
            )
    ends, place = data.expt_hist.long().cumsum(0), torch.arange(num_pairs, device=device)
    expert = torch.searchsorted(ends, place, right=True)
    valid = (place < ends[-1]) & (data.target >= 0) & (data.source >= 0)
    if expert_map is not None:
        expert = expert_map.long()[expert.clamp(max=expert_map.shape[0] - 1)]
    target = torch.where(valid, data.target.long(), num_pairs)
    ids = torch.full((num_pairs + 1,), -1, device=device).scatter_(0, target, expert)
    weights = torch.zeros(num_pairs + 1, device=device).scatter_(0, target, data.gate_scal.float())
    source = torch.zeros(num_pairs + 1, dtype=torch.int64, device=device).scatter_(0, target, data.source.long())
    routing = Routing(
        topk_ids=ids[:-1].view(num_tokens, num_topk).int(), topk_weights=weights[:-1].view(num_tokens, num_topk)
    )
    return routing, source[:-1]


def routed_pairs(num_tokens: int, routing_data: Any, gather_indx: Any, scatter_indx: Any) -> Routing:
    """The routing [T, K] of pairs whose rows are those of their tokens.

    Errors: ValueError for other shapes, and indices that are not the same tensor, so that rows might be others.
    """
    source, target = gather_indx.src_indx, scatter_indx.dst_indx
    if source.data_ptr() != target.data_ptr():
        raise ValueError("gather_indx.src_indx and scatter_indx.dst_indx are not the same tensor")
    data = _ByExpert(routing_data.gate_scal, routing_data.expt_hist, source, target, routing_data.n_expts_act)
    return _pairs(data, num_tokens, None)[0]


def _compute(*arguments: Any) -> torch.Tensor:
    call = _Call(*arguments)
    _check(call)
    data = _ByExpert(call.gate_scal, call.expt_hist, call.source, call.target, call.num_topk)
    routing, source = _pairs(data, call.hidden_states.shape[0], call.expert_map)
    scheme, weights = _weights(call, routing)
    x, num_topk = call.hidden_states, call.num_topk
    alpha = call.gemm1_alpha
    activation = call.as_experts(routing).between if alpha is None else swiglu(alpha, call.gemm1_limit)
    experts = experts_for(activation, scheme, x.device, None if call.is_mxfp4 else _tiles(call, routing, scheme))
    on_input = call.apply_router_weight_on_input
    if call.target.data_ptr() == call.source.data_ptr():  # a pair's row is that of its token
        return run_routed(x, routing, weights, experts, on_input=on_input)
    apart = Routing(topk_ids=routing.topk_ids.view(-1, 1), topk_weights=routing.topk_weights.view(-1, 1))
    y = run_routed(x[source // num_topk], apart, weights, experts, on_input=on_input)
    return y.view(*routing.topk_ids.shape, y.shape[1]).float().sum(1).to(x.dtype)


def _tiles(call: _Call, routing: Routing, scheme: QuantScheme) -> Any:
    given = call.as_experts(routing)
    return found_tiles(given.flags, given.w2, call.hidden_states, scheme)


def _check(call: _Call) -> None:
    check_tokens(call.hidden_states)
    packed, hidden = 2 if call.is_mxfp4 else 1, call.hidden_states.shape[1]
    if call.w1.dim() != 3 or call.w2.dim() != 3:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}, w2 {tuple(call.w2.shape)}; 3 dimensions each needed")
    num_experts, _, width = call.w1.shape
    for name, needed in (
        ("w1", (num_experts, hidden // packed, width)),
        ("w2", (num_experts, width // 2 // packed, hidden)),
    ):
        found = tuple(getattr(call, name).shape)
        if found != needed:
            raise ValueError(
                f"{name} is {found}; {needed} needed beside hidden_states {tuple(call.hidden_states.shape)}"
            )
    total = call.expt_hist.shape[0]
    mapped = None if call.expert_map is None else call.expert_map.shape[0]
    if (mapped or num_experts) != total or call.global_num_experts not in (-1, total):
        raise ValueError(
            f"routing data has {total} experts, global_num_experts is {call.global_num_experts}, "
            f"w1 has {num_experts}, expert_map {mapped}: all of them, and expert_map names those of w1"
        )
    if call.b1 is not None and call.apply_router_weight_on_input:
        raise ValueError("b1 is given, apply_router_weight_on_input takes none")


def _weights(call: _Call, routing: Routing) -> tuple[QuantScheme, ExpertWeights]:
    given = call.as_experts(routing)
    if not call.is_mxfp4:
        scheme = scheme_of(given.flags, given.weights)
        tensors = call.w1, call.w1_scale, call.b1, call.w2, call.w2_scale, call.b2
        return scheme, kept_or_new("triton_kernel", tensors, given, scheme)
    for argument in ("per_channel_quant", "block_shape", "a1_scale", "a2_scale"):
        if getattr(call, argument) not in (False, None):
            raise ValueError(f"{argument} is given, MXFP4 weights take none")
    scheme = get_scheme("mxfp4_w4a16")
    matrices = []
    for name, values in (("w1", given.w1), ("w2", given.w2)):
        scale = getattr(call, f"{name}_scale")
        if scale is None:
            raise ValueError(f"{name}_pcg has no weight_scale, {name} is {values.dtype} and needs one")
        groups = 2 * values.shape[2] // _MXFP4_GROUP
        if tuple(scale.shape) != (values.shape[0], groups, values.shape[1]) or scale.element_size() != 1:
            raise ValueError(
                f"{name}_pcg.weight_scale is {tuple(scale.shape)} {scale.dtype}; "
                f"{(values.shape[0], groups, values.shape[1])} of one byte needed"
            )
        turned = scale.transpose(1, 2).contiguous().view(torch.float8_e8m0fnu)
        matrices.append(StoredMatrix(values.contiguous(), scale=turned))
    bias = call.b1
    for name, tensor, rows in (("b1", call.b1, given.w1.shape[1]), ("b2", call.b2, given.w2.shape[1])):
        if tensor is not None:
            check_like(tensor, name, (given.w1.shape[0], rows), tuple(DTYPES.values()))
    if call.gemm1_alpha is not None:
        matrices[0] = halves_of(matrices[0], scheme)
        bias = None if bias is None else in_halves(bias)
    return scheme, ExpertWeights(w13=matrices[0], w2=matrices[1], scheme=scheme, w13_bias=bias, w2_bias=call.b2)


def _plain(weight: Any, name: str) -> torch.Tensor:
    """The memory of a weight or of scales: a tensor, or triton_kernels' class of a tensor that is not swizzled."""
    if isinstance(weight, torch.Tensor):
        return weight
    storage = getattr(weight, "storage", None)
    data, layout = getattr(storage, "data", None), type(getattr(storage, "layout", None)).__name__
    if not isinstance(data, torch.Tensor):
        raise ValueError(f"{name} is {type(weight).__name__}, which is no tensor and has none")
    if layout not in ("StridedLayout", "NoneType"):
        raise ValueError(f"{name} has layout {layout}, which is swizzled; StridedLayout is read")
    return data


def _run(call: _Call, inplace: bool) -> torch.Tensor:
    y = (_op if torch.compiler.is_compiling() else _compute)(*call)
    return call.hidden_states.copy_(y) if inplace else y


def triton_kernel_fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    routing_data: Any,
    gather_indx: Any,
    scatter_indx: Any,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, of pairs that are sorted by expert.

    Args:
        hidden_states: [T, H]. w1, w2: [E, H, 2I], columns [gate; up], and [E, I, H].
        routing_data, gather_indx, scatter_indx: triton_kernels' or ours; they are read as on a GPU, without checks of
            their values.
        inplace: the result is written into `hidden_states`. activation: "silu" or "gelu" (erf).
        apply_router_weight_on_input: weights multiply tokens and not the experts' outputs.
        use_fp8_w8a8, per_channel_quant, block_shape, scales: as of `outplace_fused_experts`; scales of blocks lie as
            the weights, [E, H / k, 2I / n].
        global_num_experts: experts of the routing data, -1 any. expert_map: [those], an expert of w1 each, -1 none.
    Returns: [T, H] in the dtype of `hidden_states`.
    Errors, host sync, torch.compile: as of `outplace_fused_experts`.
    """
    call = _Call(
        hidden_states,
        _plain(w1, "w1"),
        None,
        _plain(w2, "w2"),
        None,
        routing_data.gate_scal,
        routing_data.expt_hist,
        gather_indx.src_indx,
        scatter_indx.dst_indx,
        routing_data.n_expts_act,
        activation,
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
        None,
        None,
    )
    return _run(call, inplace)


def triton_kernel_fused_experts_with_bias(
    hidden_states: torch.Tensor,
    w1: Any,
    w1_pcg: Any,
    b1: torch.Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: torch.Tensor | None,
    routing_data: Any,
    gather_indx: Any,
    scatter_indx: Any,
    inplace: bool = False,
    activation: str = "silu",
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
) -> torch.Tensor:
    """`triton_kernel_fused_experts` with biases and gpt-oss's activation, of columns of w1 that alternate, gate first.

    Args:
        w1, w2: as there, or bytes of two MXFP4 elements, [E, H / 2, 2I] and [E, I / 2, H].
        w1_pcg, w2_pcg: triton_kernels' PrecisionConfig, whose `weight_scale` [E, H / 32, 2I] MXFP4 needs; else None.
        b1, b2: [E, 2I] and [E, H]. activation: "silu", whatever the alpha.
        gemm1_alpha, gemm1_clamp_limit: (clamp(up) + 1) * gate * sigmoid(alpha * gate); a limit of None does not clamp.
        The others, result and errors: as there. w1 is copied into our order in each call.
    """
    if activation != "silu":
        raise ValueError(f"activation ({activation!r}) is not 'silu', of which this call has the form with an alpha")
    if gemm1_alpha is None:
        raise ValueError(f"gemm1_alpha ({gemm1_alpha}) is missing, the activation needs it")
    scales = [
        given if given is not None or getattr(pcg, "weight_scale", None) is None else _plain(pcg.weight_scale, name)
        for given, pcg, name in (
            (w1_scale, w1_pcg, "w1_pcg.weight_scale"),
            (w2_scale, w2_pcg, "w2_pcg.weight_scale"),
        )
    ]
    call = _Call(
        hidden_states,
        _plain(w1, "w1"),
        b1,
        _plain(w2, "w2"),
        b2,
        routing_data.gate_scal,
        routing_data.expt_hist,
        gather_indx.src_indx,
        scatter_indx.dst_indx,
        routing_data.n_expts_act,
        activation,
        False,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        scales[0],
        scales[1],
        a1_scale,
        a2_scale,
        block_shape,
        float(gemm1_alpha),
        gemm1_clamp_limit,
    )
    return _run(call, inplace)


def triton_kernel_moe_forward(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`triton_kernel_fused_experts` with the routing in a tuple and the activation of `moe_runner_config`.

    Args: topk_output: SGLang's or our `TritonKernelTopKOutput`. The others: as there.
    """
    return triton_kernel_fused_experts(
        hidden_states,
        w1,
        w2,
        *_routing_of(topk_output),
        False,
        moe_runner_config.activation,
        apply_router_weight_on_input,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
    )


def triton_kernel_moe_with_bias_forward(
    hidden_states: torch.Tensor,
    w1: Any,
    w1_pcg: Any,
    b1: torch.Tensor | None,
    w2: Any,
    w2_pcg: Any,
    b2: torch.Tensor | None,
    topk_output: Any,
    moe_runner_config: Any,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
) -> torch.Tensor:
    """`triton_kernel_fused_experts_with_bias` with routing, activation, alpha and limit in objects."""
    return triton_kernel_fused_experts_with_bias(
        hidden_states,
        w1,
        w1_pcg,
        b1,
        w2,
        w2_pcg,
        b2,
        *_routing_of(topk_output),
        False,
        moe_runner_config.activation,
        use_fp8_w8a8,
        per_channel_quant,
        global_num_experts,
        expert_map,
        w1_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        block_shape,
        moe_runner_config.gemm1_alpha,
        moe_runner_config.gemm1_clamp_limit,
    )


def _routing_of(topk_output: Any) -> tuple[Any, Any, Any]:
    found = tuple(topk_output)
    if len(found) != 3 or not hasattr(found[0], "expt_hist"):
        raise ValueError(f"topk_output ({type(topk_output).__name__}) is not (routing_data, gather_indx, scatter_indx)")
    return found


_op = custom_op(
    "ep_moe::triton_kernel_fused_experts",
    _compute,
    mutates_args=(),
    schema=f"({operator_arguments(_Call)}) -> Tensor",
)


@_op.register_fake
def _fake(*arguments: Any) -> torch.Tensor:
    return torch.empty_like(arguments[0])
