"""`ep-moe bench transport`: dispatch and combine alone, checked bit for bit and timed beside NCCL's collectives.

Letters: T tokens per rank, H hidden, K top-k, E experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.bench.exchanges import (
    HALVES,
    AllToAll,
    Baseline,
    GatherScatter,
    TransportExchange,
    capture_many,
    pair,
    time_eager,
    time_halves,
    time_replays,
)
from ep_moe.bench.layer import implementation_name, num_nodes, tell
from ep_moe.bench.records import report_outcome
from ep_moe.bench.round_check import (
    Round,
    compare_rows,
    differences,
    expected_output,
    make_routing,
    run_round,
)
from ep_moe.bench.timing import Captured, part_times, profile_kernels, slowest
from ep_moe.bench.transport_points import TransportBenchConfig, TransportPoint
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.transport import TRANSPORTS, CollectiveTransport, LocalTransport, Transport, create_transport

FLOOR_GBS = 370  # best rate out of an H200 over NVLink; the floor of a pair is its bytes at this rate
MANY_PAIRS, FEW_PAIRS, MANY_TOKENS = 40, 4, 512  # pairs per graph up to MANY_TOKENS tokens, and above
PROFILED_REPLAYS = 5
HOST_BOUND = (CollectiveTransport, LocalTransport)  # they read back to the host, which a CUDA graph cannot capture
ROW_ALIGNMENT_BYTES = 16  # of the baselines' payload rows, with which NCCL is fastest


def is_timed(device: torch.device) -> bool:
    """True for a GPU: times of gloo or of Triton's interpreter are meaningless. Local."""
    return device.type == "cuda"


def transport_rank_main(group: EPGroup, engine: EngineConfig, config: TransportBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, and a row for each measurement.

    Stops at the first wrong result, which is not timed. On a CPU nothing is timed. Equal points are measured once, such
    as graph and eager for a transport that cannot be captured.
    Errors: ValueError as of `TransportBenchConfig.check_ranks`. Collective.
    """
    config.check_ranks(group.num_ranks)
    timed = "" if is_timed(group.device) else ": results are checked, nothing is timed on a CPU"
    tell(group, f"bench transport: {group.num_ranks} ranks on {group.device.type}{timed}")
    bench = _TransportBench(group, engine, config)
    rows: list[dict[str, Any]] = []
    for name, point in itertools.product(config.transports, config.points):
        row = bench.measure(name, point)
        rows += [] if row is None else [row]
        if group.device.type == "cuda":
            torch.cuda.empty_cache()  # the next point has other sizes
        if row is not None and not row["ok"]:
            break
    return report_outcome("transport", group.device, group.num_ranks, rows)


class _TransportBench:
    """One rank, measuring one transport on one point after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: TransportBenchConfig) -> None:
        self._group, self._config = group, config
        self._dtype_name, self._dtype = engine.dtype, engine.torch_dtype
        self._nodes = num_nodes(group)
        self._seen: set[tuple[str, TransportPoint]] = set()

    def measure(self, name: str, point: TransportPoint) -> dict[str, Any] | None:
        """Check a transport, then time it and the baselines; returns the row, None if measured before. Collective."""
        placement = create_placement("linear", point.num_experts, self._group.num_ranks)
        transport = create_transport(name, self._group, placement, point.config(self._dtype))
        try:
            chosen = implementation_name(transport, TRANSPORTS)
            captured = point.graph and is_timed(self._group.device) and not isinstance(transport, HOST_BOUND)
            point = dataclasses.replace(point, graph=captured)
            if (chosen, point) in self._seen:
                return None
            self._seen.add((chosen, point))
            return self._row(transport, chosen, point)
        finally:
            transport.destroy()

    def _row(self, transport: Transport, chosen: str, point: TransportPoint) -> dict[str, Any]:
        group, scheme = self._group, get_scheme(point.payload)
        generator = torch.Generator(group.device).manual_seed(self._config.seed * 1000 + group.rank + 1)
        x = torch.randn(point.tokens, point.hidden, generator=generator, device=group.device).to(self._dtype)
        routing = make_routing(
            point.routing,
            transport.placement,
            num_tokens=point.tokens,
            num_topk=point.num_topk,
            generator=generator,
        )
        tell(group, f"{chosen}, {point.tokens} tokens, {point.layout.value}, {point.payload}: check")
        with group.guard("check"):
            ours, wrong = self._check(transport, x, routing, point)
        exchange = TransportExchange(
            transport, x, routing, layout=point.layout, scheme=scheme, y=ours.y, out=torch.full_like(x, float("nan"))
        )
        graph = None
        if point.graph:
            with group.guard("check graph"):
                graph = capture_many(functools.partial(pair, exchange), group.device, count=self._num_pairs(point))
                wrong.append(compare_rows("output of the graph", graph.replayed(), ours.output))
                transport.check()
        broken = self._tell_all([text for text in wrong if text])
        sent = self._sent(routing, transport.placement)
        figures = {"wire_bytes": self._wire_bytes(sent, point)}
        row: dict[str, Any] = {
            "ok": not broken,
            "broken": broken,
            "shapes": {name: getattr(point, name) for name in ("tokens", "hidden", "num_topk", "num_experts")},
            "setup": self._setup(chosen, point),
            "figures": figures,
            "baselines": {},
        }
        if row["ok"] and is_timed(group.device):
            tell(group, f"{chosen}, {point.tokens} tokens, {point.layout.value}, {point.payload}: time")
            with group.guard("time"):
                figures |= self._time(exchange, graph, point)
                transport.check()
            figures["wire_gbs"] = figures["wire_bytes"] / figures["sum_us"] / 1e3
            figures["floor_share_ratio"] = figures["wire_bytes"] / FLOOR_GBS / 1e3 / figures["sum_us"]
            with group.guard("time baselines"):
                row["baselines"] = self._time_baselines(sent, point, ours_us=figures["sum_us"])
        return row

    def _check(
        self, transport: Transport, x: torch.Tensor, routing: Routing, point: TransportPoint
    ) -> tuple[Round, list[str]]:
        """Compare two rounds with one of `collective` and with the expected output; returns this rank's errors.

        The second round runs on the buffers as the first left them.
        """
        scheme, placement = get_scheme(point.payload), transport.placement
        collective = create_transport("collective", self._group, placement, transport.config)
        try:
            theirs = run_round(collective, x, routing, layout=point.layout, scheme=scheme)
        finally:
            collective.destroy()
        expected = expected_output(x, routing, placement, scheme)
        wrong = []
        for _ in range(2):
            ours = run_round(transport, x, routing, layout=point.layout, scheme=scheme)
            wrong += differences(ours, theirs, expected)
        return ours, list(dict.fromkeys(wrong))

    def _tell_all(self, wrong: list[str]) -> list[str]:
        """The errors of all ranks. Collective."""
        ranks = self._group.all_gather_object(wrong)
        return [f"rank {rank}: {text}" for rank, texts in enumerate(ranks) for text in texts]

    @staticmethod
    def _num_pairs(point: TransportPoint) -> int:
        return MANY_PAIRS if point.tokens <= MANY_TOKENS else FEW_PAIRS

    @staticmethod
    def _sent(routing: Routing, placement: Placement) -> list[int]:
        """The number of tokens sent to each rank, this one included. Host sync."""
        spans = zip(placement.starts[:-1], placement.starts[1:], strict=True)
        ids = routing.topk_ids
        return [int(((ids >= first) & (ids < last)).any(1).sum()) for first, last in spans]

    def _wire_bytes(self, sent: list[int], point: TransportPoint) -> float:
        """Bytes sent by a rank in one pair, mean over the ranks. Collective."""
        ranks = self._group.all_gather_object(sent)
        copies = sum(count for rank, counts in enumerate(ranks) for to, count in enumerate(counts) if to != rank)
        # for every copy that is sent, its destination rank returns a row
        return copies * (point.row_bytes(self._dtype) + point.hidden * self._dtype.itemsize) / len(ranks)

    def _time(self, exchange: TransportExchange, graph: Captured | None, point: TransportPoint) -> dict[str, float]:
        """Microseconds of a pair and of its halves, on the slowest rank. Collective."""
        group, count = self._group, self._num_pairs(point)
        run = {"warmup": self._config.warmup, "repeats": self._config.repeats}
        if graph is None:
            samples = time_eager(exchange, group, count=count, **run)
        else:
            samples = {"sum": time_replays(graph, group, count=count, **run)}
            samples |= self._time_kernels(exchange, graph, count)
        return {f"{name}_us": timing.median_us for name, timing in slowest(group, samples, whole="sum").items()}

    def _time_kernels(self, exchange: TransportExchange, graph: Captured, count: int) -> dict[str, list[float]]:
        """Times of each half's kernels in the graph; of eager calls by events if kernels cannot be assigned."""
        kernels = profile_kernels(graph.replay, self._group, repeats=PROFILED_REPLAYS)
        halves, problem = {}, ""
        try:
            halves = part_times(kernels, HALVES, repeats=PROFILED_REPLAYS)
        except ValueError as error:
            problem = str(error)
        problems = [text for text in self._group.all_gather_object(problem) if text]
        if problems:
            tell(self._group, f"dispatch and combine are timed by events of eager calls: {problems[0]}")
            return time_halves(exchange, self._group, repeats=self._config.repeats)
        return {name: [us / count for us in times] for name, times in halves.items()}

    def _time_baselines(self, sent: list[int], point: TransportPoint, *, ours_us: float) -> dict[str, dict[str, float]]:
        """The figures of each baseline, timed in the same way as our pair. Collective."""
        found = {}
        for name, exchange in self._baselines(sent, point).items():
            figures = self._time_baseline(exchange, point)
            found[name] = figures | {"speedup_ratio": figures["sum_us"] / ours_us}
        return found

    def _time_baseline(self, exchange: Baseline, point: TransportPoint) -> dict[str, float]:
        group, count = self._group, self._num_pairs(point)
        run = {"warmup": self._config.warmup, "repeats": self._config.repeats}
        samples: dict[str, list[float]] = {}
        if point.graph:
            # a baseline's halves are independent, so each has its own graph
            calls: dict[str, Callable[[], torch.Tensor]] = {
                "sum": functools.partial(pair, exchange),
                "dispatch": exchange.dispatch,
                "combine": exchange.combine,
            }
            for name, call in calls.items():
                graph = capture_many(call, group.device, count=count)
                samples[name] = time_replays(graph, group, count=count, **run)
        else:
            eager = time_eager(exchange, group, count=count, **run)
            samples = {name: eager[name] for name in ("sum", *HALVES)}
        timings = slowest(group, samples, whole="sum")
        return {f"{name}_us": timings[name].median_us for name in (*HALVES, "sum")}

    def _baselines(self, sent: list[int], point: TransportPoint) -> dict[str, Baseline]:
        """NCCL's collectives on rows of the payload's size; none for one rank. Collective."""
        group = self._group
        if group.process_group is None:
            return {}
        row_bytes = -(-point.row_bytes(self._dtype) // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        received = [counts[group.rank] for counts in group.all_gather_object(sent)]

        def payload(rows: int) -> torch.Tensor:
            return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device=group.device)

        def outputs(rows: int) -> torch.Tensor:
            return torch.randn(rows, point.hidden, device=group.device).to(self._dtype)

        return {
            "allgather_reducescatter": GatherScatter(
                group, payload(point.tokens), outputs(group.num_ranks * point.tokens)
            ),
            "all_to_all_single": AllToAll(
                group, payload(sum(sent)), outputs(sum(received)), send_counts=sent, recv_counts=received
            ),
        }

    def _setup(self, chosen: str, point: TransportPoint) -> dict[str, int | str | bool]:
        return {
            "transport": chosen,
            "layout": point.layout.value,
            "payload": point.payload,
            "dtype": self._dtype_name,
            "graph": point.graph,
            "routing": point.routing,
            "num_sms": point.num_sms,
            "nodes": self._nodes,
            "seed": self._config.seed,
            "warmup": self._config.warmup,
            "repeats": self._config.repeats,
        }
