"""On two GPUs: the results of decode passes in a captured graph while experts move, every 50 steps."""

from typing import Any

import pytest
import torch

from ep_moe.balance import Rebalancer, RebalanceStatus
from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import PositionTable
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.transport import create_transport

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, ROWS = 2048, 768, 32, 4, 32
STEPS, EVERY = 2000, 50


def decode(group: EPGroup, scheme: str) -> tuple[float, int, RebalanceStatus]:
    """The worst error of rows, the number of passes while experts move, and the status."""
    torch.cuda.set_device(group.device)
    config = MoEConfig(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, scheme=scheme)
    placement = Placement.linear(EXPERTS, group.num_ranks)
    maker = RandomExperts(config, torch.bfloat16, torch.device("cpu"), bias=False, seed=4)
    weights = maker.local(placement.local_experts(group.rank), get_scheme(scheme))
    on_gpu: Any = {
        "w13": weights.w13.map(lambda t: t.to(group.device)),
        "w2": weights.w2.map(lambda t: t.to(group.device)),
    }
    sizes = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=ROWS, dtype=torch.bfloat16)
    transport = create_transport("nvlink", group, placement, sizes)
    table = PositionTable(placement, group.rank, device=group.device, counted=True, changing=True)
    layer = ExpertParallelMoE(config, type(weights)(scheme=weights.scheme, **on_gpu), transport, placement=table)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16()
    # most tokens choose experts of rank 0, others with each graph
    loads = [torch.randint(first, first + 16, (ROWS, TOPK), generator=generator) for first in (0, 8, 16)]
    weights_of_rows = torch.rand(ROWS, TOPK, generator=generator)
    expected = [maker.expected_output(x, ids, weights_of_rows, get_scheme(scheme)) for ids in loads]
    ids, x, rows = loads[0].to(group.device), x.to(group.device), weights_of_rows.to(group.device)
    layer.warmup(num_topk=TOPK)
    with torch.inference_mode():
        layer.forward_routed(x, ids, rows)
        torch.cuda.synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.forward_routed(x, ids, rows)
    group.barrier()
    rebalancer, worst, moving = Rebalancer([layer], group, every=EVERY, min_gain=0.01), 0.0, 0
    for step in range(STEPS):
        which = step // 500 % len(loads)
        if step % 500 == 0:
            ids.copy_(loads[which])
        moving += rebalancer.is_active
        graph.replay()
        rebalancer.step()
        torch.cuda.synchronize()
        worst = max(worst, float(worst_row_error(out.float().cpu(), expected[which])))
    transport.check()
    status = rebalancer.status
    rebalancer.destroy()
    transport.destroy()
    return worst, moving, status


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("scheme", "limit"), [("none", ROW_ERROR_LIMITS["bfloat16"]), ("fp8_block", ROW_ERROR_LIMITS["fp8"])]
)
def test_a_captured_pass_while_experts_move(scheme: str, limit: float) -> None:
    for worst, moving, status in launch(decode, scheme, num_ranks=2):
        assert worst < limit
        assert moving >= 2
        assert status.rebalances >= 2
        assert status.failures == 0
