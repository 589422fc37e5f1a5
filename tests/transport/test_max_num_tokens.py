"""Rounds with `max_num_tokens`: CUDA graphs and eager calls of different bounds take turns on one transport."""

import dataclasses

import pytest
import torch
from helpers.layers import random_layer

from ep_moe.config import GroupConfig, Layout
from ep_moe.group import EPGroup
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE

HIDDEN, EXPERTS, TOPK, TOKENS, MOST = 512, 16, 4, 10, 600
BOUNDS = (TOKENS, None, 300)


def take_turns(group: EPGroup, transport_name: str) -> list[str]:
    """What differs from a layer without bounds, by layout and bound; the transports' `check_bounds` has no graphs."""
    device, generator = group.device, torch.Generator(group.device).manual_seed(group.rank)
    layer = random_layer(group, transport_name, max_tokens_per_rank=MOST)
    weights, transport = layer.weights, layer.transport
    x = torch.randn(TOKENS, HIDDEN, generator=generator, device=device).bfloat16()
    scores, ids = torch.rand(TOKENS, EXPERTS, generator=generator, device=device).topk(TOPK)
    wrong = []
    for layout in Layout:
        layer = ExpertParallelMoE(dataclasses.replace(layer.config, layout=layout), weights, transport)
        expected = layer.forward_routed(x, ids, scores)
        graphs = []
        for bound in BOUNDS:
            found = layer.forward_routed(x, ids, scores, max_num_tokens=bound)
            if not torch.equal(found, expected) or bool(found.isnan().any()):
                wrong.append(f"{layout.value}, {bound}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks for events
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
@pytest.mark.parametrize("transport", ["nvlink", "gathered"])
def test_bounds_take_turns_in_graphs(transport: str) -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(take_turns, transport, num_ranks=2, config=config, device="cuda") == [[], []]
