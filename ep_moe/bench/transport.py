"""`ep-moe bench transport`: dispatch and combine alone, checked bit for bit and timed beside NCCL's collectives.

Letters: T tokens per rank, H hidden, K top-k, E experts, R ranks, M max_tokens_per_rank.
"""

import contextlib
import dataclasses
import itertools
from typing import Any

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import TransportBenchConfig, TransportPoint
from ep_moe.bench.exchanges import HALVES, Exchange, by_collectives, by_transport, time_exchange
from ep_moe.bench.harness import Figures, Work, field_values
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.placement import create_placement
from ep_moe.profiling.timing import Captured, capture, medians, slowest
from ep_moe.quant import get_scheme
from ep_moe.report.records import GATHERED, OURS
from ep_moe.testing.whole_rounds import COUNTS, compare_rows, expected_output, make_routing, run_round
from ep_moe.transport import TRANSPORTS, Transport, create_transport

FLOOR_GBS = 370  # best rate out of an H200 over NVLink; the floor of a pair is its bytes at this rate
MANY_PAIRS, FEW_PAIRS, MANY_TOKENS = 40, 4, 512  # pairs per graph up to MANY_TOKENS tokens, and above
ALL_TO_ALL = "all_to_all_single"
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
    return harness.measure_all("transport", group, points, _TransportBench(group, engine, config).prepare)


class _TransportBench:
    """One rank, measuring one transport on one point after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: TransportBenchConfig) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._dtype, self._nodes = engine.torch_dtype, harness.num_nodes(group)
        self._seen: set[tuple[str, TransportPoint]] = set()

    def prepare(self, named: tuple[str, TransportPoint], stack: contextlib.ExitStack) -> Work | None:
        """A transport on a point, and the baselines; None if it was measured before. Collective."""
        (name, point), group, config = named, self._group, self._config
        if group.device.type == "cuda":
            stack.callback(torch.cuda.empty_cache)  # the next point has other sizes
        placement = create_placement("linear", point.num_experts, group.num_ranks)
        transport = create_transport(name, group, placement, point.config(self._dtype))
        stack.callback(transport.destroy)
        chosen = harness.implementation_name(transport, TRANSPORTS)
        captured = point.graph and is_timed(group.device) and not harness.waits_on_host(transport, group.device)
        point = dataclasses.replace(point, graph=captured)
        if (chosen, point) in self._seen:
            return None
        self._seen.add((chosen, point))
        checked = _Round(group, transport, point, config)
        return Work(
            what=f"{chosen}, {point.tokens} tokens, {point.layout.value}, {point.payload}",
            shapes=field_values(point, "tokens", "hidden", "num_topk", "num_experts"),
            setup={
                "transport": f"{chosen} {point.nvshmem_stores}" if chosen == "nvshmem" else chosen,
                **field_values(point, "layout", "payload"),
                "dtype": self._engine.dtype,
                **field_values(point, "graph", "routing", "num_sms"),
                "nodes": self._nodes,
                **field_values(config, "seed", "warmup", "repeats"),
            },
            check=checked.check,
            time=checked.time,
            whole="sum_us",
            known={"wire_bytes": checked.wire_bytes},
        )


class _Round:
    """Rounds of one transport on one point: the same tokens each time."""

    def __init__(
        self, group: EPGroup, transport: Transport, point: TransportPoint, config: TransportBenchConfig
    ) -> None:
        self._group, self._transport, self._point = group, transport, point
        self._run = field_values(config, "warmup", "repeats")
        self._dtype, self._num_pairs = transport.config.dtype, MANY_PAIRS if point.tokens <= MANY_TOKENS else FEW_PAIRS
        generator = torch.Generator(group.device).manual_seed(config.seed * 1000 + group.rank + 1)
        self._x = torch.randn(point.tokens, point.hidden, generator=generator, device=group.device).to(self._dtype)
        sizes = {"num_tokens": point.tokens, "num_topk": point.num_topk}
        self._routing = make_routing(point.routing, transport.placement, generator=generator, **sizes)
        starts, ids = transport.placement.starts, self._routing.topk_ids
        spans = zip(starts[:-1], starts[1:], strict=True)
        # tokens sent to each rank, this one included
        self._sent = [int(((ids >= first) & (ids < last)).any(1).sum()) for first, last in spans]
        self._exchange: Exchange | None = None
        self._graph: Captured | None = None
        ranks = group.all_gather_object(self._sent)
        self._received = [counts[group.rank] for counts in ranks]
        copies = sum(count for rank, counts in enumerate(ranks) for to, count in enumerate(counts) if to != rank)
        # bytes sent by a rank in one pair, mean over the ranks: for every copy its destination returns a row
        self.wire_bytes = copies * (point.row_bytes(self._dtype) + point.hidden * self._dtype.itemsize) / len(ranks)

    def check(self) -> tuple[Figures, list[str]]:
        """Compare two rounds with one of `collective` and with the expected output, and a graph with its own rounds.

        The second round runs on the buffers as the first left them.
        Returns: no errors, and all ranks' differences. Collective.
        """
        group, transport, x, routing, wrong = self._group, self._transport, self._x, self._routing, list[str]()
        how: dict[str, Any] = {"layout": self._point.layout, "scheme": get_scheme(self._point.payload)}
        with group.guard("check"):
            other = create_transport("collective", group, transport.placement, transport.config)
            try:
                their_rows, _, their_output = run_round(other, x, routing, **how)
            finally:
                other.destroy()
            expected = expected_output(x, routing, transport.placement, how["scheme"], transport.ranks_per_sum)
            for _ in range(2):
                rows, y, output = run_round(transport, x, routing, **how)
                for name, theirs in their_rows.items():
                    found = compare_rows(name, rows[name], theirs)
                    wrong += found
                    if found and name == COUNTS:
                        break  # row n is not the same token's
                if transport.ranks_per_sum == other.ranks_per_sum:
                    wrong += compare_rows("output against the other transport's", output, their_output)
                wrong += compare_rows("output against the expectation", output, expected)
        self._exchange = by_transport(transport, x, routing, y, **how)
        if self._point.graph:
            with group.guard("check graph"):
                self._graph = capture(self._exchange.pair, group.device, self._num_pairs)
                wrong += compare_rows("output of the graph", self._graph.replayed(), output)
                transport.check()
        ranks = group.all_gather_object(list(dict.fromkeys(wrong)))
        broken = [f"rank {rank}: {text}" for rank, texts in enumerate(ranks) for text in texts]
        baselines = (GATHERED, ALL_TO_ALL) if is_timed(group.device) and group.process_group is not None else ()
        return {name: {} for name in (OURS, *baselines)}, broken

    def time(self, name: str) -> dict[str, float]:
        """Microseconds of a pair and of its halves, on the slowest rank, all systems in the same way. Collective."""
        if not is_timed(self._group.device):
            return {}
        exchange, graph = self._exchange, self._graph
        if name != OURS:
            exchange = self._baseline(name)
            graph = capture(exchange.pair, self._group.device, self._num_pairs) if self._point.graph else None
        assert exchange is not None  # it was checked
        samples = time_exchange(exchange, graph, self._group, count=self._num_pairs, **self._run)
        figures = medians(slowest(self._group, samples, whole="sum"))
        if name != OURS:
            return {f"{part}_us": figures[f"{part}_us"] for part in (*HALVES, "sum")}
        self._transport.check()
        figures["wire_gbs"] = self.wire_bytes / figures["sum_us"] / 1e3
        return figures | {"floor_share_ratio": figures["wire_gbs"] / FLOOR_GBS}

    def _baseline(self, name: str) -> Exchange:
        """A collective of NCCL on rows of the payload's size."""
        group, point = self._group, self._point
        gathers = name == GATHERED
        out_rows, back_rows = sum(self._sent), sum(self._received)
        if gathers:
            out_rows, back_rows = point.tokens, group.num_ranks * point.tokens
        row_bytes = -(-point.row_bytes(self._dtype) // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        payload = torch.randint(0, 256, (out_rows, row_bytes), dtype=torch.uint8, device=group.device)
        y = torch.randn(back_rows, point.hidden, device=group.device).to(self._dtype)
        return by_collectives(group, payload, y, None if gathers else (self._sent, self._received))
