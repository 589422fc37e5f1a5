"""What a server counts and times, in Prometheus' text format."""

import functools
import itertools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ep_moe.balance import balancedness
from ep_moe.balance.rebalancer import RebalanceState
from ep_moe.serving.core import Leader

_OFF = "off"
CLIENT_LEFT = 499  # the status of a request whose client went away, as nginx logs it
_SECS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PLAN_SECS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of their own; each plan of the leader is observed."""

    def __init__(self, leader: Leader) -> None:
        leader.on_plan = lambda kind, secs: self.plan_secs.labels(kind).observe(secs)
        leader.on_start = lambda secs: self._queue_secs.observe(secs)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ep_moe_requests",
            "Requests by endpoint, HTTP status and outcome: ok, refused, failed, or left by the client",
            ["endpoint", "outcome", "status"],
            registry=self._registry,
        )
        self.prompt_tokens = Counter("ep_moe_prompt_tokens", "Tokens of accepted prompts", registry=self._registry)
        self.cached_tokens = Counter(
            "ep_moe_cached_prompt_tokens", "Tokens of prompts that came from the prefix cache", registry=self._registry
        )
        self.generated_tokens = Counter("ep_moe_generated_tokens", "Tokens generated", registry=self._registry)
        self.first_token = self._histogram("time_to_first_token", "From a request to its first text", _SECS)
        self.request_secs = self._histogram("request", "From a request to its last token", _SECS)
        self._queue_secs = self._histogram("queue", "From a request to a row for its sequence", _SECS)
        tokens = "Of the tokens of a sequence after its first text"
        self.token_secs = self._histogram("time_per_output_token", tokens, _PLAN_SECS)
        plans = "Of a prefill, or of a few decode passes, on all ranks"
        self.plan_secs = self._histogram("plan", plans, _PLAN_SECS, "kind")
        limits = leader.limits
        self._gauge("running_sequences", "Sequences that have a row", lambda: leader.num_running)
        self._gauge("waiting_sequences", "Generations that wait for a row", lambda: leader.num_waiting)
        self._gauge("ranks", "Ranks that serve now", lambda: leader.num_ranks)
        self._gauge("rows", "Most sequences of a rank", lambda: limits.num_rows)
        self._gauge("positions", "Most positions of a sequence", lambda: limits.num_positions)
        self._gauge("draining", "1 once the server has been asked to end", lambda: int(leader.draining))
        balance = "Tokens of the mean rank's experts in the last minute over the fullest one's, both summed over layers"
        self._gauge("balancedness", balance, lambda: balancedness(leader.recent_rank_load))
        rows, positions, load, prefixes = (
            Gauge(f"ep_moe_rank_{name}", what, ["rank"], registry=self._registry)
            for name, what in (
                ("rows", "Rows of a rank that have a sequence"),
                ("positions", "Positions that these have filled"),
                ("expert_tokens", "Tokens that went to the experts of a rank so far, counted every two seconds"),
                ("prefix_tokens", "Tokens in the prefix cache of a rank"),
            )
        )
        self._registry.register(_Rebalancing(leader))
        self._registry.register(_Heals(leader))
        waits = Gauge(
            "ep_moe_rank_wait_seconds",
            "Time that rounds of a rank have waited for a source rank so far, counted every two seconds",
            ["rank", "source"],
            registry=self._registry,
        )
        for rank, source in itertools.product(range(limits.num_ranks), repeat=2):
            waits.labels(rank, source).set_function(
                functools.partial(lambda *at: leader.waits[at[0]][at[1]], rank, source)
            )
        for rank in range(limits.num_ranks):
            rows.labels(rank).set_function(functools.partial(lambda rank: leader.usage(rank)[0], rank))
            positions.labels(rank).set_function(functools.partial(lambda rank: leader.usage(rank)[1], rank))
            load.labels(rank).set_function(functools.partial(_tokens_of, leader, rank))
            prefixes.labels(rank).set_function(functools.partial(leader.prefix_tokens, rank))

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"ep_moe_{name}_seconds", what, labels, buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        Gauge(f"ep_moe_{name}", what, registry=self._registry).set_function(value)

    def count(self, endpoint: str, status: int) -> None:
        """Count a request that ended with this status, that of its error event in a stream."""
        outcome = "ok" if status < 400 else "left" if status == CLIENT_LEFT else "refused" if status < 500 else "failed"
        self._requests.labels(endpoint, outcome, str(status)).inc()

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)


def _tokens_of(leader: Leader, rank: int) -> float:
    """Tokens that went to the experts of a rank so far."""
    return sum(ranks[rank] for ranks in leader.rank_load)


class _Rebalancing:
    """Collects what the ranks' rebalancers have reported; state "off" without one."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        found = self._leader.rebalancing
        counted = CounterMetricFamily(
            "ep_moe_rebalances", "Rebalances that moved experts, gained too little to, or failed", labels=["outcome"]
        )
        for outcome, name in (("complete", "rebalances"), ("declined", "declined"), ("failed", "failures")):
            counted.add_metric([outcome], found.get(name, 0))
        yield counted
        for name, what, key in (
            ("experts", "Experts that ranks have received from others", "moved_experts"),
            ("bytes", "Bytes of weights that ranks have received from others", "moved_bytes"),
        ):
            yield CounterMetricFamily(f"ep_moe_rebalance_{name}", what, value=found.get(key, 0))
        yield GaugeMetricFamily("ep_moe_rebalance_seconds", "Of the last complete rebalance", found.get("seconds", 0))
        state = GaugeMetricFamily("ep_moe_rebalance_state", "1 for what ranks do about it now", labels=["state"])
        for name in (_OFF, *(each.value for each in RebalanceState)):
            state.add_metric([name], int(name == found.get("state", _OFF)))
        yield state


class _Heals:
    """Collects how often ranks were lost, and what became of their sequences."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        leader = self._leader
        yield GaugeMetricFamily("ep_moe_lost_ranks", "Ranks of the launch that do not take part", len(leader.lost))
        for name, what, value in (
            ("heals", "Times that ranks were lost and the others went on", leader.num_heals),
            ("heal_seconds", "Time without plans of these times", leader.heal_secs),
            (
                "moved_sequences",
                "Sequences that have lost their row with its rank, and go on elsewhere",
                leader.num_moved,
            ),
        ):
            yield CounterMetricFamily(f"ep_moe_{name}", what, value=value)
