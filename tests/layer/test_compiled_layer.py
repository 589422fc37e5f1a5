"""torch.compile over the layer: one operator, without graph breaks, that runs even if nobody needs its result."""

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ep_moe.config import MoEConfig, RoutingConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix
from ep_moe.routing import route
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 32, 16, 6, 2, 24
ROUTING = RoutingConfig(method=4, num_topk=NUM_TOPK)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_layers(
    group: EPGroup, count: int = 1, *, transport: str = "auto", dtype: torch.dtype = torch.float32
) -> list[ExpertParallelMoE]:
    """Layers on one transport, every expert of each different; layers from the second on have shared experts."""
    placement = Placement.linear(NUM_EXPERTS, group.num_ranks)
    sizes = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=MAX_TOKENS, dtype=dtype)
    exchange = create_transport(transport, group, placement, sizes)
    config = MoEConfig(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=NUM_EXPERTS, routing=ROUTING)
    layers = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        mine = list(placement.local_experts(group.rank))
        shapes = ((NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
        w13, w2 = (
            StoredMatrix((torch.randn(shape, generator=generator) / 4)[mine].to(group.device, dtype))
            for shape in shapes
        )
        shared = torch.nn.Linear(HIDDEN, HIDDEN).to(group.device, dtype).requires_grad_(False)
        torch.nn.init.eye_(shared.weight)
        weights = ExpertWeights(w13=w13, w2=w2)
        layers.append(ExpertParallelMoE(config, weights, exchange, shared_experts=shared if index else None))
    return layers


class Model(torch.nn.Module):
    """A routed layer, and one that is routed before."""

    def __init__(self, layers: list[ExpertParallelMoE]) -> None:
        super().__init__()
        self.first, self.second = layers
        self.gate = torch.nn.Linear(HIDDEN, NUM_EXPERTS, bias=False).requires_grad_(False)
        torch.nn.init.orthogonal_(self.gate.weight)
        self.to(self.first.transport.device, self.first.transport.config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x = x + self.first(x, self.gate(x))
        weights, ids = self.gate(x).float().softmax(-1).topk(NUM_TOPK)
        return x + self.second.forward_routed(x, ids, weights)


def tokens(count: int, seed: int = 0, **like: Any) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * seed + count)).to(**like)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def alone(count: int = 1) -> list[ExpertParallelMoE]:
    return make_layers(EPGroup.single("cpu"), count)


@pytest.mark.parametrize(
    ("mode", "dynamic"), [(torch.no_grad, False), (torch.inference_mode, None), (torch.enable_grad, True)]
)
def test_a_compiled_model_gives_the_same_bits(mode: Callable[[], Any], dynamic: bool | None) -> None:
    model = Model(alone(2))
    fast = compiled(model, dynamic=dynamic)
    with mode():
        for count in (5, 0, 1, 24):
            x = tokens(count)
            found = fast(x)
            assert found.shape == (count, HIDDEN)
            assert torch.equal(found, model(x)), count


def test_one_graph_serves_all_counts() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = Model(alone(2))
    fast = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (5, 9, 24, 3, 17):
            assert torch.equal(fast(tokens(count)), model(tokens(count)))
    assert counter.frame_count == 1
    operators = [str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert operators.count("ep_moe.layer") + operators.count("ep_moe.layer.default") == 2


def test_one_graph_serves_all_layers() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = alone(torch._dynamo.config.recompile_limit + 2)
    x, logits = tokens(5), torch.randn(5, NUM_EXPERTS)
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
        with torch.no_grad():
            assert torch.equal(layer(x, logits), layer.forward(x, logits))
    assert counter.frame_count == 1


def test_a_call_whose_result_is_unused_still_runs() -> None:
    [layer] = alone()

    def call(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        layer(x, logits)
        layer.forward_routed(x, logits[:, :NUM_TOPK].int().clamp(0, 1), logits[:, :NUM_TOPK])
        return x + 1

    fast, x = compiled(call), tokens(4)
    for mode in (torch.no_grad, torch.enable_grad):
        before = layer.transport.num_rounds
        with mode():
            assert torch.equal(fast(x, torch.randn(4, NUM_EXPERTS)), x + 1)
        assert layer.transport.num_rounds == before + 2


def test_calls_keep_their_order() -> None:
    """Rounds that do not depend on each other must be in one order on all ranks."""
    layers, order = alone(3), []
    for layer in layers:
        run = layer.run
        layer.run = functools.partial(lambda run, tag, *a: order.append(tag.number) or run(*a), run, layer.tag)

    def call(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        last, unused, first = layers[2](x, logits), layers[0](x, logits), layers[1](x, logits)
        del unused
        return first - last

    with torch.no_grad():
        compiled(call)(tokens(4), torch.randn(4, NUM_EXPERTS))
    assert order == [2, 0, 1]


def test_counts_and_bounds_pass_through() -> None:
    first, second = alone(2)
    logits = torch.randn(8, NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    routing, x = route(logits, ROUTING), tokens(8)
    x[5:] = float("nan")

    def call(x: torch.Tensor, logits: torch.Tensor, num_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"num_tokens": num_tokens, "max_num_tokens": x.shape[0] + 4}
        return first(x, logits, **options), second.forward_routed(x, routing.topk_ids, routing.topk_weights, **options)

    fast = compiled(call)
    with torch.no_grad():
        for count in (5, 0, 2):
            found = fast(x, logits, torch.tensor([count], dtype=torch.int32))
            for out, layer in zip(found, (first, second), strict=True):
                assert torch.equal(out[:count], layer(x[:count], logits[:count]))
                assert torch.equal(out[count:], torch.zeros(8 - count, HIDDEN))


def test_an_error_comes_from_the_call_and_the_next_one_works() -> None:
    [layer] = alone()

    def call(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return layer(x, logits)

    fast, x, logits = compiled(call, dynamic=True), tokens(6), torch.randn(6, NUM_EXPERTS)
    with torch.no_grad():
        sound = fast(x, logits)
        for bad, words in (
            ((x, logits[:, :4]), "(6, 4)"),
            ((x.double(), logits), "float64"),
            ((x.repeat(5, 1), logits.repeat(5, 1)), "num_tokens (30) exceeds max_tokens_per_rank (24)"),
        ):
            with pytest.raises(ValueError) as caught:
                fast(*bad)
            assert words in str(caught.value)
            assert torch.equal(fast(x, logits), sound)


def test_a_layer_that_is_gone_is_an_error() -> None:
    [layer] = alone()
    number, x = layer._number, tokens(2)
    with torch.no_grad():
        torch.ops.ep_moe.layer(x, torch.randn(2, NUM_EXPERTS), None, None, None, None, number)
        del layer
        with pytest.raises(RuntimeError, match=f"layer {number} of a compiled graph no longer exists"):
            torch.ops.ep_moe.layer(x, torch.randn(2, NUM_EXPERTS), None, None, None, None, number)


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda layer: pickle.loads(pickle.dumps(layer))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_with_its_own_weights(how: str) -> None:
    _, layer = alone(2)
    x, logits = tokens(5), torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    before = layer(x, logits)
    if how == "deepcopy":
        layer.experts.lock = threading.Lock()  # kernels that are kept cannot be copied either
    twin = COPIES[how](layer)
    if how == "copy":
        twin.weights = copy.deepcopy(layer.weights)
    twin.weights.w2.values.mul_(2)
    doubled = twin(x, logits)
    assert torch.equal(layer(x, logits), before)
    assert not torch.equal(doubled, before)
    assert torch.equal(compiled(lambda x, logits: twin(x, logits))(x, logits), doubled)
    assert torch.equal(compiled(lambda x, logits: layer(x, logits))(x, logits), before)
    assert (twin.transport is layer.transport) == (how != "pickle")


@pytest.mark.parametrize("trained", ["x", "logits", "topk_weights", "w2", "shared"])
def test_backward_is_refused(trained: str) -> None:
    """A compiled forward gives the eager bits; backward raises rather than lose a gradient."""
    _, layer = alone(2)
    logits = torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    inputs = {"x": tokens(5), "logits": logits, "topk_weights": route(logits, ROUTING).topk_weights}
    ids = route(logits, ROUTING).topk_ids
    held = {"w2": layer.weights.w2.values, "shared": layer.shared_experts.weight}
    target = (inputs | held)[trained].requires_grad_()

    def call(x: torch.Tensor, logits: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return layer.forward_routed(x, ids, topk_weights) if trained == "topk_weights" else layer(x, logits)

    fast = compiled(call)
    out = fast(**inputs)
    assert torch.equal(out, call(**inputs))
    with pytest.raises(RuntimeError, match="no backward pass"):
        out.sum().backward()
    assert target.grad is None
    with torch.no_grad():
        assert not fast(**inputs).requires_grad


def on_ranks(group: EPGroup, transport: str, counts: list[list[int]], backend: str) -> list[str]:
    """Differences of a compiled model from the eager one; each rank brings its own counts, zero among them."""
    torch._dynamo.reset()
    dtype = torch.float32 if group.device.type == "cpu" else torch.bfloat16
    model = Model(make_layers(group, 2, transport=transport, dtype=dtype))
    fast, wrong = torch.compile(model, backend=backend, fullgraph=True), []
    for count in counts[group.rank]:
        x = tokens(count, seed=group.rank, device=group.device, dtype=dtype)
        with torch.no_grad():
            expected = model(x)
            group.wait_for_all("compile")  # ranks compile for different counts
            found = fast(x)
            group.wait_for_all("compile")
        limit = 0.0 if backend == "aot_eager" else 0.02 * float(expected.abs().max()) if count else 0.0
        if found.shape != expected.shape or not bool(((found - expected).abs() <= limit).all()):
            wrong.append(f"rank {group.rank}: {count} tokens")
    model.first.transport.check()
    return wrong


def test_ranks_with_other_counts() -> None:
    counts = [[5, 0, 1, 7], [5, 24, 0, 7], [0, 2, 1, 7]]
    assert launch(on_ranks, "collective", counts, "aot_eager", num_ranks=3, device="cpu") == [[]] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_gpu(backend: str) -> None:
    assert launch(on_ranks, "auto", [[5, 0, 1, 24, 7]], backend, num_ranks=1, device="cuda") == [[]]


@pytest.mark.multigpu
@pytest.mark.skipif(num_gpu_ranks() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("transport", ["nvlink", "collective"])
def test_on_two_gpus(transport: str, backend: str) -> None:
    counts = [[5, 0, 3, 1, 24], [5, 4, 0, 24, 24]]
    assert launch(on_ranks, transport, counts, backend, num_ranks=2, device="cuda") == [[]] * 2
