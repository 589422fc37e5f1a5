"""Experts whose output has all bits set, like the Lamport-style sentinel (a NaN): it must arrive as a result too.

Letters: T tokens on a rank, K top-k.
"""

import torch

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.quant import get_scheme
from ep_moe.testing import TransportCase, check_round
from ep_moe.testing.rounds import TransportFactory

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_all_ones(make: TransportFactory, group: EPGroup) -> int:
    """Every token with an expert gets NaN, no wait times out, and the next round is right; returns the NaN rows seen.

    In each model dtype, with weights applied by the combine (COMPACT) and before it (FLAT).
    Errors: AssertionError where that is not so. Collective.
    """
    nan_rows = 0
    for dtype in DTYPES:
        tokens = (3,) * group.num_ranks
        case = TransportCase(
            name=f"all-ones-{dtype}", tokens=tokens, hidden=48, num_topk=3, routing="holes", dtype=dtype
        )
        transport = make(group, case.make_placement(), case.config)
        inputs = case.inputs(group.rank).to(group.device)
        for layout in (Layout.COMPACT, Layout.FLAT):
            dispatched = transport.dispatch(inputs.x, inputs.routing, layout=layout, scheme=get_scheme("none"))
            y = torch.zeros(dispatched.batch.output_shape, dtype=dtype, device=group.device)
            y.view(torch.uint8).fill_(0xFF)
            out = transport.combine(y, dispatched, out=torch.ones_like(inputs.x))
            transport.check()
            taken = (inputs.routing.topk_ids >= 0).any(1, keepdim=True)
            assert bool(torch.where(taken, out.isnan(), out == 0).all()), f"{dtype}, {layout.value}: {out}"
            nan_rows += int(out.isnan().all(1).sum())
            check_round(transport, case, group.device)
        transport.destroy()
    return nan_rows
