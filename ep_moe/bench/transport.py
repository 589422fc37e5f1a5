"""`ep-moe bench transport`: dispatch and combine alone, checked bit for bit and timed beside NCCL's collectives.

Letters: T tokens per rank, H hidden, K top-k, E experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import itertools
from typing import Any

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import TransportBenchConfig, TransportPoint
from ep_moe.bench.exchanges import (
    HALVES,
    Exchange,
    all_to_all,
    by_transport,
    capture_many,
    gather_scatter,
    time_eager,
    time_halves,
    time_replays,
)
from ep_moe.bench.round_check import COUNTS, compare_rows, expected_output, make_routing, run_round
from ep_moe.bench.timing import Captured, part_times, profile_kernels, slowest
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import get_scheme
from ep_moe.report.records import GATHERED
from ep_moe.routing import Routing
from ep_moe.transport import TRANSPORTS, Transport, create_transport

FLOOR_GBS = 370  # best rate out of an H200 over NVLink; the floor of a pair is its bytes at this rate
MANY_PAIRS, FEW_PAIRS, MANY_TOKENS = 40, 4, 512  # pairs per graph up to MANY_TOKENS tokens, and above
PROFILED_REPLAYS = 5
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
    harness.tell(group, f"bench transport: {group.num_ranks} ranks on {group.device.type}{timed}")
    points = itertools.product(config.transport, config.points)
    return harness.measure_all("transport", group, points, _TransportBench(group, engine, config).measure)


class _TransportBench:
    """One rank, measuring one transport on one point after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: TransportBenchConfig) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._dtype = engine.torch_dtype
        self._run = {"warmup": config.warmup, "repeats": config.repeats}
        self._nodes = harness.num_nodes(group)
        self._seen: set[tuple[str, TransportPoint]] = set()

    def measure(self, named: tuple[str, TransportPoint]) -> harness.Row | None:
        """Check a transport, then time it and the baselines; returns the row, None if measured before. Collective."""
        (name, point), group = named, self._group
        placement = create_placement("linear", point.num_experts, group.num_ranks)
        transport = create_transport(name, group, placement, point.config(self._dtype))
        try:
            chosen = harness.implementation_name(transport, TRANSPORTS)
            captured = point.graph and is_timed(group.device) and not harness.waits_on_host(transport, group.device)
            point = dataclasses.replace(point, graph=captured)
            if (chosen, point) in self._seen:
                return None
            self._seen.add((chosen, point))
            return self._row(transport, chosen, point)
        finally:
            transport.destroy()
            if group.device.type == "cuda":
                torch.cuda.empty_cache()  # the next point has other sizes

    def _row(self, transport: Transport, chosen: str, point: TransportPoint) -> harness.Row:
        group, config, what = self._group, self._config, f"{point.tokens} tokens, {point.layout.value}, {point.payload}"
        generator = torch.Generator(group.device).manual_seed(config.seed * 1000 + group.rank + 1)
        x = torch.randn(point.tokens, point.hidden, generator=generator, device=group.device).to(self._dtype)
        sizes = {"num_tokens": point.tokens, "num_topk": point.num_topk}
        routing = make_routing(point.routing, transport.placement, generator=generator, **sizes)
        harness.tell(group, f"{chosen}, {what}: check")
        exchange, graph, broken = self._check(transport, x, routing, point)
        sent = self._sent(routing, transport.placement)
        figures = {"wire_bytes": self._wire_bytes(sent, point)}
        row = harness.make_row(
            broken,
            shapes=harness.field_values(point, "tokens", "hidden", "num_topk", "num_experts"),
            setup={
                "transport": chosen,
                **harness.field_values(point, "layout", "payload"),
                "dtype": self._engine.dtype,
                **harness.field_values(point, "graph", "routing", "num_sms"),
                "nodes": self._nodes,
                **harness.field_values(config, "seed", "warmup", "repeats"),
            },
            figures=figures,
            baselines={},
        )
        if row["ok"] and is_timed(group.device):
            harness.tell(group, f"{chosen}, {what}: time")
            with group.guard("time"):
                figures |= self._time(exchange, graph, point)
                transport.check()
            figures["wire_gbs"] = figures["wire_bytes"] / figures["sum_us"] / 1e3
            figures["floor_share_ratio"] = figures["wire_bytes"] / FLOOR_GBS / 1e3 / figures["sum_us"]
            with group.guard("time baselines"):
                for name, baseline in self._baselines(sent, point).items():
                    theirs = self._time_baseline(baseline, point)
                    row["baselines"][name] = theirs | {"speedup_ratio": theirs["sum_us"] / figures["sum_us"]}
        return row

    def _check(
        self, transport: Transport, x: torch.Tensor, routing: Routing, point: TransportPoint
    ) -> tuple[Exchange, Captured | None, list[str]]:
        """Compare two rounds with one of `collective` and with the expected output, and a graph with its own rounds.

        The second round runs on the buffers as the first left them.
        Returns: the exchange, its graph if it is to be replayed, and all ranks' differences. Collective.
        """
        group, wrong = self._group, []
        how: dict[str, Any] = {"layout": point.layout, "scheme": get_scheme(point.payload)}
        with group.guard("check"):
            other = create_transport("collective", group, transport.placement, transport.config)
            try:
                their_rows, _, their_output = run_round(other, x, routing, **how)
            finally:
                other.destroy()
            expected = expected_output(x, routing, transport.placement, how["scheme"])
            for _ in range(2):
                rows, y, output = run_round(transport, x, routing, **how)
                for name, theirs in their_rows.items():
                    found = compare_rows(name, rows[name], theirs)
                    wrong += found
                    if found and name == COUNTS:
                        break  # row n is not the same token's
                wrong += compare_rows("output against the other transport's", output, their_output)
                wrong += compare_rows("output against the expectation", output, expected)
        exchange, graph = by_transport(transport, x, routing, y, **how), None
        if point.graph:
            with group.guard("check graph"):
                graph = capture_many(exchange.pair, group.device, count=self._num_pairs(point))
                wrong += compare_rows("output of the graph", graph.replayed(), output)
                transport.check()
        ranks = group.all_gather_object(list(dict.fromkeys(wrong)))
        return exchange, graph, [f"rank {rank}: {text}" for rank, texts in enumerate(ranks) for text in texts]

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

    def _time(self, exchange: Exchange, graph: Captured | None, point: TransportPoint) -> dict[str, float]:
        """Microseconds of a pair and of its halves, on the slowest rank. Collective."""
        group, count = self._group, self._num_pairs(point)
        if graph is None:
            samples = time_eager(exchange, group, count=count, **self._run)
        else:
            samples = {"sum": time_replays(graph, group, count=count, **self._run)}
            samples |= self._time_kernels(exchange, graph, count)
        return {f"{name}_us": timing.median_us for name, timing in slowest(group, samples, whole="sum").items()}

    def _time_kernels(self, exchange: Exchange, graph: Captured, count: int) -> dict[str, list[float]]:
        """Times of each half's kernels in the graph; of eager calls by events if kernels cannot be assigned."""
        kernels = profile_kernels(graph.replay, self._group, repeats=PROFILED_REPLAYS)
        halves, problem = {}, ""
        try:
            halves = part_times(kernels, HALVES, repeats=PROFILED_REPLAYS)
        except ValueError as error:
            problem = str(error)
        problems = [text for text in self._group.all_gather_object(problem) if text]
        if problems:
            harness.tell(self._group, f"dispatch and combine are timed by events of eager calls: {problems[0]}")
            return time_halves(exchange, self._group, repeats=self._config.repeats)
        return {name: [us / count for us in times] for name, times in halves.items()}

    def _time_baseline(self, exchange: Exchange, point: TransportPoint) -> dict[str, float]:
        """Figures of a baseline, timed in the same way as our pair. Collective."""
        group, count = self._group, self._num_pairs(point)
        samples: dict[str, list[float]] = {}
        if point.graph:
            # a baseline's halves are independent, so each has its own graph
            calls: dict[str, Any] = {"sum": exchange.pair, "dispatch": exchange.dispatch, "combine": exchange.combine}
            for name, call in calls.items():
                graph = capture_many(call, group.device, count=count)
                samples[name] = time_replays(graph, group, count=count, **self._run)
        else:
            samples = time_eager(exchange, group, count=count, **self._run)
        timings = slowest(group, samples, whole="sum")
        return {f"{name}_us": timings[name].median_us for name in (*HALVES, "sum")}

    def _baselines(self, sent: list[int], point: TransportPoint) -> dict[str, Exchange]:
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

        everyones, counts = group.num_ranks * point.tokens, {"send_counts": sent, "recv_counts": received}
        return {
            GATHERED: gather_scatter(group, payload(point.tokens), outputs(everyones)),
            "all_to_all_single": all_to_all(group, payload(sum(sent)), outputs(sum(received)), **counts),
        }
