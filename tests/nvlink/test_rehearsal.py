"""Rounds of a rank whose group is not there: they end at once, and what the rank sends itself comes back."""

import time

import pytest
import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.transport import create_transport

PLACEMENT, TOKENS, HIDDEN, LIMIT_SECS = Placement.linear(8, 3), 5, 64, 20.0


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["peer", "collective", "gathered"])
def test_what_a_rank_sends_itself_comes_back(name: str, rank: int) -> None:
    config = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=8, dtype=torch.float32, num_slots=1)
    own = torch.tensor(PLACEMENT.local_experts(rank))
    x = torch.randn(TOKENS, HIDDEN)
    ids = own[torch.arange(TOKENS) % len(own)][:, None].int()
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(TOKENS, 1) + 1)
    how = {"layout": Layout.COMPACT, "scheme": get_scheme("none")}
    begin = time.monotonic()
    with EPGroup.single("cpu") as single, single.rehearsal(rank, PLACEMENT.num_ranks) as group:
        assert (group.rank, group.num_ranks, group.all_gather_object(rank)) == (rank, 3, [rank] * 3)
        transport = create_transport(name, group, PLACEMENT, config)
        for turn in range(3):
            dispatched = transport.dispatch(x + turn, routing, **how)
            y = dispatched.batch.x.float() * 2
            out = transport.combine(y, dispatched, out=torch.full((TOKENS, HIDDEN), float("nan")))
            assert torch.equal(out, 2 * (x + turn) * routing.topk_weights)
        nobody = Routing(topk_ids=torch.full((1, 1), -1, dtype=torch.int32), topk_weights=torch.ones(1, 1))
        dispatched = transport.dispatch(x[:1], nobody, **how)
        assert not transport.combine(dispatched.batch.x.float(), dispatched).any()
        transport.check()
        transport.destroy()
    assert time.monotonic() - begin < LIMIT_SECS  # no timeout was waited for
