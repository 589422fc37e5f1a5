"""A layer on nvlink that is made and warmed up under an engine's default device and dtype is the layer made without."""

import contextlib

import torch

from ep_moe import ExpertParallelMoE, MoEConfig, Placement, RoutingConfig, TransportConfig
from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.layer import warmup
from ep_moe.quant import get_scheme
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.testing.transports import engine_defaults
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.common import on_ranks

SIZES = [1, 4]


def layers_on_rank(group: EPGroup, scheme: str, layout: Layout) -> list[torch.Tensor]:
    """This rank's results of the layer made without and with an engine's defaults."""
    placement = Placement.linear(num_experts=4, num_ranks=group.num_ranks)
    routing = RoutingConfig(method=4, num_topk=2)
    config = MoEConfig(hidden=64, intermediate=32, num_experts=4, routing=routing, scheme=scheme, layout=layout)
    experts = RandomExperts(config, torch.float32, group.device, bias=False, seed=3)
    first, last = placement.starts[group.rank : group.rank + 2]
    weights = experts.local(range(first, last), get_scheme(scheme))
    random = torch.Generator().manual_seed(group.rank)
    x, logits = torch.randn(4, 64, generator=random), torch.randn(4, 4, generator=random)
    results = []
    for defaults in (contextlib.nullcontext(), engine_defaults()):
        with defaults:
            sizes = TransportConfig(hidden=64, max_tokens_per_rank=2 * SIZES[-1], dtype=torch.float32, max_topk=2)
            transport = NvlinkTransport(group, placement, sizes)
            layer = ExpertParallelMoE(config, weights, transport, experts="triton")
            warmup.compute_alone(layer, 2, SIZES)
            warmup.run_rounds(layer, 2, SIZES, padded=True, overlapped=layer.forward_micro_batches)
        results.append(layer(x, logits))
        transport.check()
        transport.destroy()
    return results


def test_defaults_of_engines_do_not_matter() -> None:
    for without, under in on_ranks(layers_on_rank, "fp8_block", Layout.FLAT):
        assert bool(without.isfinite().all())
        assert torch.equal(without, under)
