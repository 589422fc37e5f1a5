"""Rounds of `gathered` as a CUDA graph repeats them, on CPUs: what no host knows, and the errors of `check`."""

import dataclasses
import functools
from unittest import mock

import pytest
import torch

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import check_transport, transport_cases, transports
from ep_moe.testing.cases import TransportCase
from ep_moe.testing.rounds import check_round, compute_experts
from ep_moe.transport import GatheredTransport, NodesGatheredTransport
from ep_moe.transport.layer_tag import LayerTag

# without those in which ranks disagree, which eager rounds find before anything is sent
SUITED = {name: check for name, check in transports.CHECKS.items() if name not in ("refusals", "bounds", "layers")}
SHARES = {1: (0, 6), 2: (1, 4), 3: (1, 6), 4: (2, 8)}


class AsCaptured(GatheredTransport):
    """Takes the calls of rounds as captured."""

    checking = False

    def _in_graph(self) -> bool:
        return not self.checking

    def check(self) -> None:
        self.checking = True
        try:
            super().check()
        finally:
            self.checking = False


def captured(group: EPGroup, placement: Placement, config: TransportConfig, per_node: int) -> AsCaptured:
    """The transport, on nodes of so many ranks; of `gathered` with 0."""
    config = dataclasses.replace(config, ranks_per_node=per_node)
    return (CapturedNodes if per_node else AsCaptured)(group, placement, config)


class CapturedNodes(AsCaptured, NodesGatheredTransport):
    """That of several nodes."""


def check_on_rank(group: EPGroup, per_node: int) -> dict[str, str]:
    with mock.patch.object(transports, "CHECKS", SUITED):
        return check_transport(functools.partial(captured, per_node=per_node), group, share=SHARES[group.num_ranks])


@pytest.mark.parametrize(("num_ranks", "per_node"), [(1, 0), (2, 0), (3, 0), (4, 2)])
def test_carries(num_ranks: int, per_node: int) -> None:
    first, step = SHARES[num_ranks]
    expected = dict.fromkeys([*(case.name for case in transport_cases(num_ranks)), *SUITED][first::step], "")
    if num_ranks == 1:
        assert check_on_rank(EPGroup.single("cpu"), per_node) == expected
        return
    config = GroupConfig(timeout_secs=60)
    found = launch(check_on_rank, per_node, num_ranks=num_ranks, config=config, device="cpu")
    assert found == [expected] * num_ranks


def test_an_out_of_another_shape_leaves_the_round_open() -> None:
    case, count = TransportCase(name="out", tokens=(3,), num_topk=2), torch.tensor([[2]], dtype=torch.int32)
    with torch.inference_mode():  # later calls are not in it
        transport = AsCaptured(EPGroup.single("cpu"), case.make_placement(), case.config)
    inputs = case.inputs(0)
    for tokens, written in ((2, [True, True, False]), (-1, [True] * 3)):
        dispatched = transport.dispatch(
            inputs.x, inputs.routing, layout=case.layout, scheme=get_scheme("none"), num_tokens=count.fill_(tokens)
        )
        count.fill_(1)  # as a caller may whose counter serves the next round
        y = compute_experts(dispatched.batch, 0)
        transport.combine_send(y, dispatched)
        for out in (torch.empty(1, case.hidden, dtype=case.dtype), torch.empty(3, case.hidden)):
            with pytest.raises(ValueError, match="out is"):
                transport.combine_recv(dispatched, out=out)
        result = transport.combine_recv(dispatched, out=torch.full((3, case.hidden), 7.0, dtype=case.dtype))
        assert [bool((row != 7).any()) for row in result] == written
    assert result.isnan().all()
    with pytest.raises(ValueError, match=r"num_tokens \(-1\)"):
        transport.check()


def bad_rounds(group: EPGroup, per_node: int) -> list[str]:
    """What `check` says on this rank after rounds in which one rank is at fault."""
    case = TransportCase(name="bad", tokens=(3,) * group.num_ranks, scheme="fp8_token", num_topk=2, shared=True)
    transport, said = captured(group, case.make_placement(), case.config, per_node), []
    inputs, odd = case.inputs(group.rank), group.rank == 1
    ids, at_fault = inputs.routing.topk_ids, torch.tensor([4 if odd else 2], dtype=torch.int32)
    of_layer = LayerTag(number=2 if odd else 1)
    for changed in (
        {"ids": ids.clone().index_fill_(0, torch.tensor([0]), case.num_experts + 5) if odd else ids},
        {"num_tokens": at_fault},
        {"layer": of_layer},
        {"scheme": get_scheme("int8_token" if odd else "fp8_token")},  # rows of the same size
    ):
        routing = Routing(topk_ids=changed.pop("ids", ids), topk_weights=inputs.routing.topk_weights)
        options = {"layout": case.layout, "scheme": get_scheme(case.scheme)} | changed
        dispatched = transport.dispatch(inputs.x, routing, **options)
        y = compute_experts(dispatched.batch, transport.placement.starts[group.rank])
        result = transport.combine(y, dispatched, shared=inputs.shared)
        assert result.isnan().all(), f"rank {group.rank} got numbers"
        with pytest.raises(ValueError) as raised:
            check_round(transport, case, group.device)  # right, and checks: it does not hide the bad one
        said.append(str(raised.value))
        check_round(transport, case, group.device)
    transport.destroy()
    return said


@pytest.mark.parametrize(("num_ranks", "per_node"), [(2, 0), (4, 2)])
def test_a_bad_round_gives_nan_and_check_names_the_rank(num_ranks: int, per_node: int) -> None:
    said = launch(bad_rounds, per_node, num_ranks=num_ranks, config=GroupConfig(timeout_secs=60), device="cpu")
    for ids, num_tokens, layer, scheme in said:
        assert "topk_ids has 2 ids outside [-1, num_experts (8)) on rank 1, such as 13" in ids
        assert "rank 1" in num_tokens
        assert "ranks are out of step" in layer
        assert "rank 1" in layer
        assert "ranks disagree on the payload" in scheme
    assert "num_tokens (4) is not in [0, rows of x] on rank 1" in said[1][1]
