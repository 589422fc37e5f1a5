"""Cases of the one-sided exchange: one rank's launches of a round; of the other ranks there are only addresses."""

import contextlib
import dataclasses
import types
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from compile_check.case import Case, Rule
from ep_moe.config import Layout, TransportConfig
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, get_scheme
from ep_moe.routing import Routing
from ep_moe.transport.one_sided import memory
from ep_moe.transport.one_sided.combine_launcher import CombineLauncher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher
from ep_moe.transport.one_sided.memory import ranks_of, regions_of
from ep_moe.transport.one_sided.round_plan import KernelContext, RoundPlans
from ep_moe.transport.one_sided.slot_state import SlotStates
from ep_moe.transport.one_sided.tuning import Tuning

CPU = torch.device("cpu")
MOST_PROGRAMS = 100
BYTE_SCALES: dict[tuple[str, Rule], str] = {
    ("_dispatch_kernel", "narrow"): "a row's scales are of one byte, and lie as far apart in a layout as there are rows"
}
SPILLS: dict[tuple[str, Rule], str] = {
    (kernel, "spill"): "some words of a thread, under the limit that lets programs of all slots share the processors"
    for kernel in ("_dispatch_kernel", "_combine_kernel")
}
LOOKS_FIRST: dict[tuple[str, Rule], str] = {
    ("_combine_kernel", "narrow"): "one number of each rank's row is looked at before the rows are read"
}


class _Buffer:
    """Memory of this rank; the addresses of the others are never accessed."""

    def __init__(self, group: Any, num_bytes: int) -> None:
        self.local = torch.empty(num_bytes, dtype=torch.uint8)
        self.addresses = tuple(2**46 + rank * 2**38 for rank in range(group.num_ranks))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launchers:
    """The launchers of rank 0's kernels, as on a GPU."""

    plans: RoundPlans
    dispatches: DispatchLauncher
    combines: CombineLauncher


def make_launchers(config: TransportConfig, placement: Placement, device_code: str = "") -> Launchers:
    """The launchers of a transport that has this rank's memory only.

    device_code: NVSHMEM's, by whose puts all other ranks are reached; else they are by addresses.
    """
    puts = (1 << placement.num_ranks) - 2 if device_code else 0
    ranks, tuning = ranks_of(placement, 0, puts), Tuning(most_receivers=MOST_PROGRAMS, num_sms=config.num_sms)
    alone = {"barrier": lambda: None, "all_gather_object": lambda value: [value]}
    group: Any = types.SimpleNamespace(num_ranks=placement.num_ranks, rank=0, device=CPU, **alone)
    with mock.patch.object(memory, "SymmetricBuffer", _Buffer):
        peers = memory.PeerMemory(group, regions_of(config, ranks), config.num_slots, puts=puts)
    if device_code:
        peers.libraries = {"libnvshmem_device": device_code}
    context = KernelContext(
        config=config,
        ranks=ranks,
        device=CPU,
        memory=peers,
        states=SlotStates(config, CPU, ranks),
        tuning=tuning,
        timeout_ns=10**10,
        waiting=lambda *_: contextlib.nullcontext(),
    )
    plans = RoundPlans(config, placement, ranks, tuning, CPU)
    return Launchers(plans=plans, dispatches=DispatchLauncher(context, plans), combines=CombineLauncher(context))


def _round(
    name: str,
    scheme_name: str,
    layout: Layout,
    *,
    tokens: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = 7168,
    topk: int = 8,
    ranks: int = 8,
    experts: int = 32,
    num_sms: int = 0,
    halves: bool = False,
    counted: bool = False,
    quantized: bool = False,
    shared: bool = False,
    poisoned: bool = False,
    ids_dtype: torch.dtype = torch.int32,
    device_code: str = "",
    excuses: Mapping[tuple[str, Rule], str] | None = None,
) -> Case:
    """Dispatch and combine of `tokens` tokens per rank, by default of DeepSeek-V3."""
    scheme = get_scheme(scheme_name)

    def launch() -> None:
        sizes = {"hidden": hidden, "max_tokens_per_rank": tokens, "max_topk": topk}
        config = TransportConfig(**sizes, dtype=dtype, num_slots=1, num_sms=num_sms)
        launchers = make_launchers(config, Placement.linear(ranks * experts, ranks), device_code)
        dispatches, combines = launchers.dispatches, launchers.combines
        x: Any = torch.empty(tokens, hidden, dtype=dtype)
        if quantized:
            payload = scheme.payload
            values = torch.empty(tokens, payload.row_values(hidden), dtype=payload.dtype)
            scale = torch.empty(tokens, payload.num_groups(hidden), dtype=payload.scale_dtype)
            x = Quantized(values=values, scale=scale, scheme=scheme)
        routing = Routing(topk_ids=torch.empty(tokens, topk, dtype=ids_dtype), topk_weights=torch.empty(tokens, topk))
        count = torch.zeros(1, dtype=torch.int32) if counted else None
        round_ = dispatches.begin((0, 0, 0), x, routing, layout, scheme, count)
        if halves:
            dispatches.send(round_)
        batch = dispatches.receive(round_, send=not halves)
        y = None if poisoned else torch.empty(batch.output_shape, dtype=dtype)
        added = torch.empty(tokens, hidden, dtype=dtype) if shared else None
        out = torch.empty(tokens, hidden, dtype=dtype)
        if halves:
            combines.send(round_, y)
        combines.receive(round_, None if halves else y, send=not halves, shared=added, out=out)

    widths = {"_dispatch_kernel": 16} if poisoned else {"_dispatch_kernel": 16, "_combine_kernel": 16}
    excused = {**SPILLS, **(excuses or {}), **(LOOKS_FIRST if dtype.itemsize == 2 and not num_sms else {})}
    return Case(name=f"nvlink {name}", launch=launch, payload_width_bytes=widths, excuses=excused)


def small_round(device_code: str = "") -> Case:
    """Rows and words between two ranks: the smallest kernels that still have all parts. device_code: NVSHMEM's."""
    sizes = {"tokens": 72, "hidden": 256, "topk": 1, "ranks": 2, "experts": 2}
    return _round("small", "none", Layout.COMPACT, device_code=device_code, **sizes)  # type: ignore[arg-type]


def exchange_cases() -> list[Case]:
    """Rows and words, whole and in halves, with several payload formats and layouts."""
    gpt_oss: dict[str, Any] = {"hidden": 2880, "topk": 4, "experts": 16}
    compact, batched, flat = Layout.COMPACT, Layout.BATCHED, Layout.FLAT
    return [
        _round("fp8_block batched", "fp8_block", batched, counted=True),
        _round("mxfp8 abandoned", "mxfp8", batched, quantized=True, poisoned=True, excuses=BYTE_SCALES),
        _round("fp8_block, 512 tokens", "fp8_block", batched, tokens=512, ranks=2, experts=128),
        _round("fp8_block, 4096 tokens", "fp8_block", compact, tokens=4096, counted=True),
        _round("fp8_block, 4096 tokens on 32 SMs", "fp8_block", compact, tokens=4096, ranks=2, experts=128, num_sms=32),
        _round("bf16 flat in halves, 8 tokens", "none", flat, tokens=8, halves=True),
        _round("int8_token, 8 tokens, 1 expert", "int8_token", compact, tokens=8, experts=1),
        _round("fp8_block gpt-oss, 8 tokens", "fp8_block", batched, **gpt_oss, tokens=8),
        _round("bf16 top 10", "none", compact, topk=10),
        _round("float16 top 1 of 1 rank", "none", batched, dtype=torch.float16, topk=1, ranks=1),
    ]
