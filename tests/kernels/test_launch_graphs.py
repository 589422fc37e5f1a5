"""Calls that come again with the same addresses, which are started as CUDA graphs from then on."""

import itertools
import threading
from typing import Any

import pytest
import torch

from ep_moe.config import ActivationConfig, MoEConfig
from ep_moe.experts import create_experts
from ep_moe.kernel_launch.cuda_driver import Launches
from ep_moe.kernel_launch.launch_graph import LaunchGraph
from ep_moe.local_moe import local_moe
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.weights import ExpertWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 512, 256, 16, 4
CALLS = 30  # with the same addresses


class Calls:
    """Calls of `local_moe` whose tokens change in place, and the same launched one by one on copies of them.

    Args: scheme: of the weights. tokens: of a call.
    """

    one_by_one = False  # what `started` reads

    def __init__(self, scheme: str, tokens: int) -> None:
        config: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS}
        made = RandomExperts(
            MoEConfig(**config, scheme=scheme), torch.bfloat16, torch.device("cuda"), bias=False, seed=3
        )
        self.weights: ExpertWeights = made.local(range(EXPERTS), get_scheme(scheme))
        self.experts = create_experts("auto", ActivationConfig(), torch.device("cuda"))
        self.random = torch.Generator("cuda").manual_seed(tokens)
        self.x, self.other_x = torch.empty(2, tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids, self.other_ids = torch.empty(2, tokens, TOPK, dtype=torch.int32, device="cuda")
        self.factors, self.other_factors = torch.empty(2, tokens, TOPK, device="cuda")
        self.out, self.other_out = torch.empty(2, tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def change(self) -> None:
        """Other tokens, experts and weights in the same memory."""
        self.x.normal_(generator=self.random)
        self.factors.uniform_(generator=self.random)
        scores = torch.rand(len(self.x), EXPERTS, generator=self.random, device="cuda")
        self.ids.copy_(scores.topk(TOPK).indices)
        self.out.fill_(torch.nan)

    def call(self) -> torch.Tensor:
        """A call that may be started as a graph."""
        routing = Routing(topk_ids=self.ids, topk_weights=self.factors)
        return local_moe(self.x, routing, self.weights, self.experts, out=self.out)

    def expected(self) -> torch.Tensor:
        """What it computes."""
        self.other_x.copy_(self.x)
        self.other_ids.copy_(self.ids)
        self.other_factors.copy_(self.factors)
        routing = Routing(topk_ids=self.other_ids, topk_weights=self.other_factors)
        Calls.one_by_one = True
        local_moe(self.other_x, routing, self.weights, self.experts, out=self.other_out.fill_(torch.nan))
        Calls.one_by_one = False
        return self.other_out


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each start of a graph."""
    numbers, count = list[int](), itertools.count()
    start, find = LaunchGraph.__call__, Launches._graph_of

    def counted(self: LaunchGraph, stream: int) -> int:
        numbers.append(next(count))
        return start(self, stream)

    def graph_of(self: Launches, values: tuple[int, ...]) -> LaunchGraph | None:
        return None if Calls.one_by_one else find(self, values)

    monkeypatch.setattr(LaunchGraph, "__call__", counted)
    monkeypatch.setattr(Launches, "_graph_of", graph_of)
    return numbers


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "mxfp4_w4a16"])
def test_the_same_bits_one_by_one_and_as_graphs(scheme: str, tokens: int, started: list[int]) -> None:
    """On the current stream, on another one, in another thread, and captured by torch."""
    calls = Calls(scheme, tokens)
    for number in range(CALLS):
        calls.change()
        wanted = calls.expected()
        assert torch.equal(calls.call(), wanted), number
    before = len(started)
    assert before > 0

    def elsewhere() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(CALLS):
                calls.change()
                wanted = calls.expected()
                found.append(torch.equal(calls.call(), wanted))
        torch.cuda.default_stream().wait_stream(stream)

    found: list[bool] = []
    elsewhere()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert found == [True] * 2 * CALLS
    assert len(started) > before
    before, graph = len(started), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.call()
    assert len(started) == before  # torch records each kernel
    calls.change()
    wanted = calls.expected()
    graph.replay()
    assert torch.equal(calls.out, wanted)


def test_a_thread_records_while_another_captures(started: list[int]) -> None:
    """Torch's capture stays valid while another thread's calls become graphs."""
    calls, other = Calls("none", 16), Calls("none", 24)
    for made in (calls, other, calls, other, calls, other):
        made.change()
        made.call()
    torch.cuda.synchronize()
    graph, goes_on, recorded = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()

    def record() -> None:
        assert goes_on.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(CALLS):
                other.call()
        recorded.set()

    thread = threading.Thread(target=record)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        goes_on.set()
        assert recorded.wait(60)
        calls.call()
    thread.join(60)
    assert started
    calls.change()
    wanted = calls.expected()
    graph.replay()
    assert torch.equal(calls.out, wanted)
