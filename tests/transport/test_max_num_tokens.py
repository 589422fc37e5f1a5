"""Rounds with `max_num_tokens`: CUDA graphs and eager calls of different bounds take turns on one transport."""

import pytest
import torch

from ep_moe.config import GroupConfig, Layout, MoEConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

HIDDEN, INNER, EXPERTS, TOPK, TOKENS, MOST = 512, 256, 16, 4, 10, 600
BOUNDS = (TOKENS, None, 300)


def take_turns(group: EPGroup, transport_name: str) -> list[str]:
    """What differs from a layer without bounds, by layout and bound; on a CPU without graphs."""
    device, placement = group.device, Placement.linear(EXPERTS, group.num_ranks)
    generator = torch.Generator(device).manual_seed(group.rank)
    num_local = placement.num_local_experts(group.rank)
    w13 = torch.randn(num_local, 2 * INNER, HIDDEN, generator=generator, device=device).bfloat16() / 16
    weights = ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w13[:, :INNER].mT.contiguous()))
    sizes = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=MOST)
    transport = create_transport(transport_name, group, placement, sizes)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, device=device).bfloat16()
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=generator, device=device).topk(TOPK)
    wrong = []
    for layout in Layout:
        config = MoEConfig(hidden=HIDDEN, intermediate=INNER, num_experts=EXPERTS, layout=layout)
        layer = ExpertParallelMoE(config, weights, transport)
        expected = layer.forward_routed(x, ids, scores)
        graphs = []
        for bound in BOUNDS:
            found = layer.forward_routed(x, ids, scores, max_num_tokens=bound)
            if not torch.equal(found, expected) or bool(found.isnan().any()):
                wrong.append(f"{layout.value}, {bound}")
            if device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = layer.forward_routed(x, ids, scores, max_num_tokens=bound)
                graphs.append((bound, graph, found))
        for turn in range(2 * len(graphs)):
            for bound, graph, found in graphs:
                found.fill_(float("nan"))
                graph.replay()
                eager = layer.forward_routed(x, ids, scores, max_num_tokens=BOUNDS[turn % len(BOUNDS)])
                if not torch.equal(found, expected) or not torch.equal(eager, expected):
                    wrong.append(f"{layout.value}, {bound}, turn {turn}")
        transport.check()
        del graphs
    transport.destroy()
    return wrong


@pytest.mark.multigpu
@pytest.mark.skipif(num_gpu_ranks() < 2, reason="needs 2 GPUs")
@pytest.mark.timeout(600)
def test_bounds_take_turns_in_graphs() -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(take_turns, "nvlink", num_ranks=2, config=config, device="cuda") == [[], []]


def test_bounds_give_the_same_bits() -> None:
    assert launch(take_turns, "collective", num_ranks=2, device="cpu") == [[], []]
