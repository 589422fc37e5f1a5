"""Routing as one Triton kernel, without host sync; launches do not depend on logits or ids.

Runs on a CPU under TRITON_INTERPRET=1.

Letters: T tokens on this rank, E experts, K top-k.
"""

import functools
from typing import NamedTuple

import torch
import triton

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.kernel import Kernel, Run, present
from ep_moe.kernel_launch.plan_cache import PlanCache
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.route import Chosen, IdMaps, Method, Scores, _map_ids_kernel, _route_kernel
from ep_moe.placement import Placement
from ep_moe.routing.base import BIASED_METHODS, EPSILON, Options, Routing, check, make_routing
from ep_moe.routing.positions import PositionTable

_MOST_KERNELS = 256  # of different settings and numbers of programs
_MOST_PLANS = 512
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


class _Table(NamedTuple):
    """How kernels read the words of a placement."""

    mapped: bool
    copies: bool
    counts: int  # where counts begin, 0 if nothing is counted
    padded: bool  # rows from `num_tokens` on are not counted


def _table_of(
    placement: Placement | PositionTable | None, device: torch.device, num_tokens: torch.Tensor | None
) -> tuple[torch.Tensor | None, _Table]:
    """The words of a placement, None if no kernel reads them."""
    if isinstance(placement, PositionTable):
        if placement.words.device != device:
            raise ValueError(f"the table of positions is on {placement.words.device}, the ids are on {device}")
        counts = placement.num_experts + placement.num_physical if placement.counted else 0
        table = _Table(placement.maps, placement.has_copies, counts, bool(counts) and num_tokens is not None)
        return placement.words if table.mapped or counts else None, table
    if placement is None or placement.is_identity:
        return None, _Table(mapped=False, copies=False, counts=0, padded=False)
    return placement.logical_to_physical(device), _Table(mapped=True, copies=False, counts=0, padded=False)


@functools.lru_cache(maxsize=_MOST_KERNELS)
def _kernel_of(
    config: RoutingConfig,
    num_experts: int,
    programs: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    table: _Table,
    replay: bool,
    alignment: int,
) -> Kernel:
    """The kernel of calls with these settings. All that depends on them and not on the tensors is found here, once.

    Pointers need only `alignment`: the kernel is not specialized by theirs. `dtypes` are those of logits, bias and
    weights, the latter as in `route`. A kernel reads `num_tokens` or not, so `table` says whether there is one.
    """
    _, bias_dtype, weights_dtype = dtypes  # Triton reads those of tensors off the arguments of the first call
    method = config.method
    biased = method in BIASED_METHODS
    weight = _WEIGHTS.get(method, "softmax" if biased and config.scoring == "softmax" else "sigmoid")
    groups = config.num_group if config.topk_group < config.num_group else 1
    group_size = num_experts // groups
    can_normalize = biased or method is RoutingMethod.SIGMOID_RENORM
    constants = Method(
        K=config.num_topk,
        COLUMNS=triton.next_power_of_2(config.num_topk),
        G=groups,
        GROUPS=triton.next_power_of_2(groups),
        GROUP_SIZE=group_size,
        MEMBERS=triton.next_power_of_2(group_size),
        TOPK_GROUP=config.topk_group,
        GROUP_BEST=config.group_best,
        CHOICE=config.scoring if biased else "logit",
        WEIGHT=weight,
        NORMALIZE=can_normalize and config.norm_topk_prob,
        EPSILON=EPSILON,
        FACTOR=config.routed_scaling_factor,
        BIAS=bias_dtype is not None,
        MAPPED=table.mapped,
        COPIES=table.copies,
        COUNTS=table.counts,
        REPLAY=replay,
        ALIGNMENT=alignment,
        ROUNDED=str(weights_dtype).removeprefix("torch."),
    )
    options = {"num_warps": 1}
    return Kernel(_route_kernel, programs, constants={"METHOD": constants}, options=options, device=device)


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


class _Plan:
    """What calls of one configuration, whose tensors differ in their addresses alone, share.

    Args:
        logits, options: of a call that was checked. Keeps config and placement alive, whose ids are in `_key_of`.

    Attributes:
        in_place: the kernel reads logits and bias as they are.
        starts: what the alignment depends on besides addresses. numbers: of a launch, without a replay tensor.
        signature: of the `Routing`s.
        repeats: launches that are loaded, by the alignment of the logits' rows and the bias.
        sequence: the launch of aligned tensors by itself, over "logits" and "bias"; None before one, and with a
            placement.
    """

    def __init__(self, logits: torch.Tensor, options: Options) -> None:
        config, bias, _, placement, self._weights_dtype, num_tokens = options
        self._config, self._placement = config, placement
        self.num_tokens = logits.shape[0]
        self.device, shape = logits.device, (self.num_tokens, config.num_topk)
        self.new_ids, self.new_weights = (
            allocator(shape, (config.num_topk, 1), dtype, logits.device) for dtype in (torch.int32, torch.float32)
        )
        self._words, self.table = _table_of(placement, self.device, num_tokens)
        self.words_address = 0 if self._words is None else self._words.data_ptr()
        self.in_place = all(tensor is None or _readable(tensor) is tensor for tensor in (logits, bias))
        self.numbers = self.num_tokens, logits.stride(0), config.num_topk, 1
        self.signature = torch.Size(shape), torch.int32, logits.device
        self.starts = _VECTOR_BYTES | logits.stride(0) * logits.element_size()
        self.repeats: dict[int, Run] = {}
        self.sequence: LaunchSequence | None = None

    def launch(
        self, logits: torch.Tensor, bias: torch.Tensor | None, chosen: Chosen, num_tokens: torch.Tensor | None
    ) -> None:
        """Launch a call's kernel; without a replay tensor, it is kept in `repeats`."""
        logits, bias = _readable(logits), None if bias is None else _readable(bias)
        stride = logits.stride(0)
        starts = _VECTOR_BYTES | stride * logits.element_size() | logits.data_ptr()
        if bias is not None:
            starts |= bias.data_ptr()
        replay, alignment = chosen.replay_ptr is not None, starts & -starts  # the lowest bit
        launch = _kernel_of(
            self._config,
            logits.shape[1],
            _programs_for(self.num_tokens),
            self.device,
            (logits.dtype, None if bias is None else bias.dtype, self._weights_dtype),
            self.table,
            replay,
            alignment,
        )
        if not replay:
            chosen = chosen._replace(replay_ptr=chosen.ids_ptr)
        words = logits if self._words is None else self._words
        live = num_tokens if self.table.padded else None
        scores = Scores(logits, logits if bias is None else bias, words, live)
        _launch(launch, (scores, chosen), (self.num_tokens, stride, *chosen.replay_ptr.stride()))
        if launch.run is not None and self.in_place and not replay:
            self.repeats[alignment] = launch.run
            if alignment == self.starts & -self.starts and self._words is None:
                self.sequence = self._as_sequence(launch, biased=bias is not None)

    def _as_sequence(self, launch: Kernel, *, biased: bool) -> LaunchSequence:
        """A loaded launch, whose workspace has "ids" [T, K] int32 and "weights" [T, K] float32."""
        shape = self.num_tokens, self._config.num_topk
        pieces = {"ids": (shape, torch.int32), "weights": (shape, torch.float32)}
        read = "logits", "bias" if biased else "logits", "logits"
        given = ("logits", "bias") if biased else ("logits",)
        return LaunchSequence([(launch, (read, ("ids", "weights", "ids"), self.numbers))], given, pieces, self.device)


@functools.cache
def _plans() -> PlanCache[_Plan]:
    """The plans of this process, by `_key_of`."""
    return PlanCache(_MOST_PLANS)


def _key_of(logits: torch.Tensor, options: Options) -> tuple[object, ...]:
    """All that a plan and `check` depend on."""
    config, bias, replay_out, placement, weights_dtype, num_tokens = options
    key: tuple[object, ...] = (id(config), id(placement), weights_dtype, logits.shape, logits.stride(), logits.dtype)
    key += (logits.device,)
    for tensor in (bias, replay_out, num_tokens):
        key += (None,) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return key


def route(router_logits: torch.Tensor, options: Options) -> Routing:
    """`ep_moe.routing.route` in one launch, for E up to `MAX_KERNEL_EXPERTS`.

    Local, on the current stream, no host sync; the first call with its settings compiles and loads their kernel.
    """
    key, plans = _key_of(router_logits, options), _plans()
    plan = plans.get(key)
    if plan is None:
        check(router_logits, options)
        plan = plans.keep(key, _Plan(router_logits, options))
    ids, weights = plan.new_ids(), plan.new_weights()
    if plan.in_place and options.replay_out is None:
        logits, ids_address = router_logits.data_ptr(), ids.data_ptr()
        bias = logits if options.bias is None else options.bias.data_ptr()
        starts = plan.starts | logits | bias
        repeat = plan.repeats.get(starts & -starts)
        if repeat is not None:
            words = plan.words_address or logits
            live = (options.num_tokens.data_ptr(),) if plan.table.padded and options.num_tokens is not None else ()
            repeat((logits, bias, words, *live, ids_address, weights.data_ptr(), ids_address, *plan.numbers))
            return make_routing(ids, weights, plan.signature)
    if plan.num_tokens:
        plan.launch(router_logits, options.bias, Chosen(ids, weights, options.replay_out), options.num_tokens)
    return make_routing(ids, weights, plan.signature)


def loaded_sequence(router_logits: torch.Tensor, options: Options) -> LaunchSequence | None:
    """What earlier calls of `route` with tensors like these launched, if it was one kernel that reads them in place.

    Its workspace has "ids" and "weights", the routing; given are "logits" and, if there is one, "bias". Local.
    """
    plan = _plans().get(_key_of(router_logits, options))
    return None if plan is None else plan.sequence


def _launch(launch: Kernel, tensors: tuple[tuple[torch.Tensor | None, ...], ...], numbers: tuple[int, ...]) -> None:
    """Launch a kernel that is not specialized by the alignment of its pointers."""
    if launch.run is None:
        if not present(tensors)[0].is_cuda:
            launch.through_triton(tensors, numbers)
            return
        launch.load(tensors, numbers)
        assert launch.run is not None
    launch.run([*(tensor.data_ptr() for tensor in present(tensors)), *numbers])


@functools.lru_cache(maxsize=_MOST_KERNELS)
def _map_kernel_of(
    num_topk: int,
    num_mapped: int,
    added: int,
    programs: int,
    device: torch.device,
    ids_dtype: torch.dtype,
    table: _Table,
) -> Kernel:
    """The kernel of `to_physical`; see `_kernel_of`."""
    del ids_dtype
    constants = {"K": num_topk, "E": num_mapped, "ADDED": added, "BLOCK": _MAPPED_IDS}
    constants |= {"MAPPED": table.mapped, "COPIES": table.copies, "COUNTS": table.counts}
    return Kernel(_map_ids_kernel, programs, constants=constants, options={}, device=device)


def to_physical(
    topk_ids: torch.Tensor, placement: Placement | PositionTable, num_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """`ep_moe.routing.to_physical` in at most one launch. Local, on the current stream, no host sync."""
    (rows, num_topk), device = topk_ids.shape, topk_ids.device
    words, table = _table_of(placement, device, num_tokens)
    if words is None and topk_ids.dtype == torch.int32:
        return topk_ids
    ids = torch.empty_strided((rows, num_topk), (num_topk, 1), dtype=torch.int32, device=device)
    if rows:
        num_mapped, added = 0, 0
        if words is not None:
            num_mapped = placement.num_experts if isinstance(placement, PositionTable) else len(words)
            added = placement.num_physical - num_mapped
        programs = _programs_for(triton.cdiv(ids.numel(), _MAPPED_IDS))
        kernel = _map_kernel_of(num_topk, num_mapped, added, programs, device, topk_ids.dtype, table)
        maps = IdMaps(topk_ids, topk_ids if words is None else words, ids, num_tokens if table.padded else None)
        _launch(kernel, (maps,), (ids.numel(), *topk_ids.stride()))
    return ids
