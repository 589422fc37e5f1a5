"""Points of `ep-moe bench transport`, the published suite of them, and the options of a run.

Letters: T tokens per rank, H hidden, K top-k, E experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import itertools
from typing import Any

import torch

from ep_moe.bench.round_check import ROUTINGS
from ep_moe.config import Layout, TransportConfig
from ep_moe.fields import check_fields
from ep_moe.quant import get_scheme, payload_bytes
from ep_moe.transport import TRANSPORTS

LEAST_MAX_TOKENS = 8  # M of a measurement with fewer tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportPoint:
    """One measurement of one transport.

    Args:
        tokens: T. hidden: H. num_topk: K, of num_experts: E.
        layout: of the batch. payload: name of a scheme. routing: a name of ROUTINGS.
        graph: replay a CUDA graph, if there is a GPU and the transport can be captured.
        num_sms: as of `TransportConfig`.
    Errors: ValueError names the value and the limit.
    """

    tokens: int = 128
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    layout: Layout = Layout.BATCHED
    payload: str = "fp8_block"
    routing: str = "uniform"
    graph: bool = True
    num_sms: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < 1:
            raise ValueError(f"tokens ({self.tokens}) must be at least 1")
        if not 1 <= self.num_topk <= self.num_experts:
            raise ValueError(f"num_topk ({self.num_topk}) is not in [1, num_experts ({self.num_experts})]")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing ({self.routing!r}) is not one of {', '.join(ROUTINGS)}")
        get_scheme(self.payload)
        self.config(torch.bfloat16)

    def config(self, dtype: torch.dtype) -> TransportConfig:
        """The transport's config. Errors: ValueError for a hidden size that no transport supports."""
        return TransportConfig(
            hidden=self.hidden,
            max_tokens_per_rank=max(self.tokens, LEAST_MAX_TOKENS),
            dtype=dtype,
            max_topk=self.num_topk,
            num_sms=self.num_sms,
        )

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a dispatched token: values, scales, ids and weights."""
        return payload_bytes(get_scheme(self.payload), self.hidden, dtype) + 8 * self.num_topk


_BASE = TransportPoint()


def _standard_points() -> tuple[TransportPoint, ...]:
    changes: list[dict[str, Any]] = [{"tokens": tokens} for tokens in (1, 16, 128, 512)]
    changes += [{"tokens": 4096, "layout": Layout.COMPACT}]
    changes += [{"layout": Layout.COMPACT}, {"layout": Layout.FLAT}, {"payload": "none"}]
    changes += [{"hidden": hidden} for hidden in (2048, 2880, 4096)]
    changes += [{"num_topk": num_topk} for num_topk in (1, 4, 6, 10)]
    changes += [{"routing": "skewed"}, {"graph": False}]
    changes += [{"tokens": 4096, "layout": Layout.COMPACT, "num_sms": num_sms} for num_sms in (16, 32, 64, 128)]
    return tuple(dataclasses.replace(_BASE, **change) for change in changes)


# From 1 to 4096 tokens; then 128 tokens with one change at a time; then 4096 tokens on fewer SMs.
SUITES = {"standard": _standard_points()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportBenchConfig:
    """Measurements of `ep-moe bench transport`.

    Args:
        suite: a name of SUITES, whose points are measured; "" measures all combinations of the next arguments.
        tokens, layouts, payloads: one measurement for each combination.
        hidden, num_topk, num_experts, routing, graph, num_sms: of all points, as of `TransportPoint`.
        transports: by name, each measured on all points.
        seed: of tokens, ids and weights.
        warmup, repeats: untimed and timed replays or eager pairs.
    Errors: ValueError names the value and the limit.
    """

    suite: str = ""
    tokens: tuple[int, ...] = (1, 16, 128, 512, 4096)
    layouts: tuple[Layout, ...] = (Layout.COMPACT,)
    payloads: tuple[str, ...] = (_BASE.payload,)
    hidden: int = _BASE.hidden
    num_topk: int = _BASE.num_topk
    num_experts: int = _BASE.num_experts
    routing: str = _BASE.routing
    graph: bool = _BASE.graph
    num_sms: int = _BASE.num_sms
    transports: tuple[str, ...] = ("auto",)
    seed: int = 0
    warmup: int = 5
    repeats: int = 20

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("tokens", "layouts", "payloads", "transports"):
            if not getattr(self, name):
                raise ValueError(f"{name} (()) must be one or more")
        for transport in self.transports:
            if transport not in ("auto", *TRANSPORTS):
                raise ValueError(f"transport ({transport!r}) is not one of auto, {', '.join(TRANSPORTS)}")
        for name, limit in {"seed": 0, "warmup": 1, "repeats": 1}.items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {limit}")
        if self.suite and self.suite not in SUITES:
            raise ValueError(f"suite ({self.suite!r}) is not one of {', '.join(SUITES)}")
        if self.suite:
            self._refuse_what_the_suite_says()
        _ = self.points  # each checks its sizes

    def _refuse_what_the_suite_says(self) -> None:
        ours = ("suite", "transports", "seed", "warmup", "repeats")
        for field in dataclasses.fields(self):
            if field.name not in ours and getattr(self, field.name) != field.default:
                value = getattr(self, field.name)
                raise ValueError(f"{field.name} ({value}) is what suite {self.suite!r} says; leave it out")

    @property
    def points(self) -> tuple[TransportPoint, ...]:
        """The points to measure, in order."""
        if self.suite:
            return SUITES[self.suite]
        return tuple(
            TransportPoint(
                tokens=tokens,
                hidden=self.hidden,
                num_topk=self.num_topk,
                num_experts=self.num_experts,
                layout=layout,
                payload=payload,
                routing=self.routing,
                graph=self.graph,
                num_sms=self.num_sms,
            )
            for layout, payload, tokens in itertools.product(self.layouts, self.payloads, self.tokens)
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError if the last of `num_ranks` ranks has too few experts for "one_rank" routing. Local."""
        for point in self.points:
            experts = point.num_experts // num_ranks
            if point.routing == "one_rank" and experts < point.num_topk:
                raise ValueError(
                    f"routing 'one_rank': num_topk ({point.num_topk}) exceeds the {experts} experts of the last of "
                    f"{num_ranks} ranks"
                )
