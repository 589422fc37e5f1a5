"""What a server counts and times, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ep_moe.serving.core import Leader

CLIENT_LEFT = 499  # the status of a request whose client went away, as nginx logs it
_SECS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PLAN_SECS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of their own; each plan of the leader is observed."""

    def __init__(self, leader: Leader) -> None:
        leader.on_plan = lambda kind, secs: self.plan_secs.labels(kind).observe(secs)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ep_moe_requests",
            "Requests by endpoint, HTTP status and outcome: ok, refused, failed, or left by the client",
            ["endpoint", "outcome", "status"],
            registry=self._registry,
        )
        self.prompt_tokens = Counter("ep_moe_prompt_tokens", "Tokens of accepted prompts", registry=self._registry)
        self.generated_tokens = Counter("ep_moe_generated_tokens", "Tokens generated", registry=self._registry)
        self.first_token = Histogram(
            "ep_moe_time_to_first_token_seconds",
            "From a request to its first text",
            buckets=_SECS,
            registry=self._registry,
        )
        self.request_secs = Histogram(
            "ep_moe_request_seconds", "From a request to its last token", buckets=_SECS, registry=self._registry
        )
        self.plan_secs = Histogram(
            "ep_moe_plan_seconds",
            "Of a prefill, or of a few decode passes, on all ranks",
            ["kind"],
            buckets=_PLAN_SECS,
            registry=self._registry,
        )
        for name, what, count in (
            ("ep_moe_running_sequences", "Sequences that have a row", lambda: leader.num_running),
            ("ep_moe_waiting_sequences", "Generations that wait for a row", lambda: leader.num_waiting),
        ):
            Gauge(name, what, registry=self._registry).set_function(count)

    def count(self, endpoint: str, status: int) -> None:
        """Count a request that ended with this status, that of its error event in a stream."""
        outcome = "ok" if status < 400 else "left" if status == CLIENT_LEFT else "refused" if status < 500 else "failed"
        self._requests.labels(endpoint, outcome, str(status)).inc()

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)
