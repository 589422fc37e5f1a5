"""Routing as one Triton kernel, without host sync; launches do not depend on logits or ids.

Runs on a CPU under TRITON_INTERPRET=1.

Letters: T tokens on this rank, E experts, K top-k.
"""

import functools
import threading

import torch
import triton

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.route import Chosen, Scores, _map_ids_kernel, _route_kernel
from ep_moe.placement import Placement
from ep_moe.routing.base import BIASED_METHODS, EPSILON, Routing

_MOST_KERNELS = 256  # of different settings and numbers of programs
_READ = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the kernel reads
_MAPPED_IDS = 128  # of one program, one for each of its threads
_VECTOR_BYTES = 16  # the widest load
_MOST_STRIDE = 2**31 - 1  # strides are 32-bit arguments
_WEIGHTS = {
    RoutingMethod.DEFAULT: "softmax",
    RoutingMethod.RENORMALIZE: "softmax_chosen",
    RoutingMethod.RENORMALIZE_NAIVE: "softmax_chosen",
    RoutingMethod.TOPK: "logit",
}  # and "sigmoid" for the other methods


@functools.lru_cache(maxsize=_MOST_KERNELS)
def _kernel_of(
    thread: int,
    config: RoutingConfig,
    num_experts: int,
    programs: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    mapped: bool,
    replay: bool,
    alignment: int,
) -> RepeatedLaunch:
    """The kernel of calls with these settings. All that depends on them and not on the tensors is found here, once.

    It keeps its arguments in its own memory, so that threads do not share one. Pointers need only `alignment`: the
    kernel is not specialized by theirs. `dtypes` are those of logits, bias and weights, the latter as in `route`.
    """
    del thread  # Triton reads the dtypes of tensors off the arguments of the first call
    _, bias_dtype, weights_dtype = dtypes
    method = config.method
    groups = config.num_group if config.topk_group < config.num_group else 1
    group_size = num_experts // groups
    can_normalize = method in (*BIASED_METHODS, RoutingMethod.SIGMOID_RENORM)
    constants = {
        "K": config.num_topk,
        "COLUMNS": triton.next_power_of_2(config.num_topk),
        "G": groups,
        "GROUPS": triton.next_power_of_2(groups),
        "GROUP_SIZE": group_size,
        "MEMBERS": triton.next_power_of_2(group_size),
        "TOPK_GROUP": config.topk_group,
        "CHOICE": "sigmoid" if method in BIASED_METHODS else "logit",
        "WEIGHT": _WEIGHTS.get(method, "sigmoid"),
        "NORMALIZE": can_normalize and config.norm_topk_prob,
        "EPSILON": EPSILON,
        "FACTOR": config.routed_scaling_factor,
        "BIAS": bias_dtype is not None,
        "MAPPED": mapped,
        "REPLAY": replay,
        "ALIGNMENT": alignment,
        "ROUNDED": str(weights_dtype).removeprefix("torch."),
    }
    options = {"num_warps": 1}
    return RepeatedLaunch(_route_kernel, programs, fixed=(), constants=constants, options=options, device=device)


def _programs_for(count: int) -> int:
    """The next power of two, so that few grids occur; a program without a token ends at once."""
    return 1 << (count - 1).bit_length()


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy in a dtype and with strides that the kernel reads."""
    if tensor.dtype not in _READ:
        tensor = tensor.float()
    if tensor.stride(-1) != 1 or tensor.stride(0) > _MOST_STRIDE:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def route(
    router_logits: torch.Tensor,
    config: RoutingConfig,
    *,
    routing_bias: torch.Tensor | None = None,
    routing_replay_out: torch.Tensor | None = None,
    placement: Placement | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> Routing:
    """`ep_moe.routing.route` in one launch, for E up to `MAX_KERNEL_EXPERTS`.

    Local, on the current stream, no host sync; the first call with its settings compiles and loads their kernel.
    """
    logits = _readable(router_logits)
    bias = None if routing_bias is None else _readable(routing_bias)
    (num_tokens, num_experts), num_topk, device = logits.shape, config.num_topk, logits.device
    ids = torch.empty_strided((num_tokens, num_topk), (num_topk, 1), dtype=torch.int32, device=device)
    weights = torch.empty_strided((num_tokens, num_topk), (num_topk, 1), dtype=torch.float32, device=device)
    if num_tokens:
        physical = None
        if placement is not None and not placement.is_identity:
            physical = placement.logical_to_physical(device)
        stride = logits.stride(0)
        starts = _VECTOR_BYTES | logits.data_ptr() | stride * logits.element_size()
        if bias is not None:
            starts |= bias.data_ptr()
        kernel = _kernel_of(
            threading.get_ident(),
            config,
            num_experts,
            _programs_for(num_tokens),
            device,
            (logits.dtype, None if bias is None else bias.dtype, weights_dtype),
            physical is not None,
            routing_replay_out is not None,
            starts & -starts,  # the lowest bit
        )
        scores = Scores(logits, logits if bias is None else bias, logits if physical is None else physical)
        replay = ids if routing_replay_out is None else routing_replay_out
        with torch.cuda.device_of(logits):
            kernel((scores, Chosen(ids, weights, replay)), (num_tokens, stride, *replay.stride()))
    return Routing(topk_ids=ids, topk_weights=weights)


@functools.lru_cache(maxsize=_MOST_KERNELS)
def _map_kernel_of(
    thread: int,
    num_topk: int,
    num_mapped: int,
    added: int,
    programs: int,
    device: torch.device,
    ids_dtype: torch.dtype,
) -> RepeatedLaunch:
    """The kernel of `to_physical`; see `_kernel_of`."""
    del thread, ids_dtype
    constants = {"K": num_topk, "E": num_mapped, "ADDED": added, "BLOCK": _MAPPED_IDS}
    return RepeatedLaunch(_map_ids_kernel, programs, fixed=(), constants=constants, options={}, device=device)


def to_physical(topk_ids: torch.Tensor, placement: Placement) -> torch.Tensor:
    """`ep_moe.routing.to_physical` in at most one launch. Local, on the current stream, no host sync."""
    if placement.is_identity and topk_ids.dtype == torch.int32:
        return topk_ids
    (num_tokens, num_topk), device = topk_ids.shape, topk_ids.device
    ids = torch.empty_strided((num_tokens, num_topk), (num_topk, 1), dtype=torch.int32, device=device)
    if num_tokens:
        physical, num_mapped, added = topk_ids, 0, 0
        if not placement.is_identity:
            physical = placement.logical_to_physical(device)
            num_mapped = len(physical)
            added = placement.num_physical - num_mapped
        programs = _programs_for(triton.cdiv(ids.numel(), _MAPPED_IDS))
        thread = threading.get_ident()
        kernel = _map_kernel_of(thread, num_topk, num_mapped, added, programs, device, topk_ids.dtype)
        with torch.cuda.device_of(topk_ids):
            kernel(((topk_ids, physical, ids),), (ids.numel(), *topk_ids.stride()))
    return ids
