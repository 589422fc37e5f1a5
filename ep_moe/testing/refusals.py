"""Checks that every transport must pass of rounds that are refused: bad input, ranks in different layers.

Letters: T tokens on a rank, K top-k, H hidden.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.config import ActivationConfig, ActivationKind, Layout, MoEConfig
from ep_moe.group import EPGroup
from ep_moe.placement import create_placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing.cases import TransportCase
from ep_moe.testing.rounds import TransportFactory, check_round, compute_experts
from ep_moe.transport import Transport
from ep_moe.transport.checks import DispatchArguments
from ep_moe.transport.layer_tag import MOST_LAYERS, LayerTag


def check_refusals(make: TransportFactory, group: EPGroup) -> None:
    """Bad input on one rank raises ValueError on every rank, which names that rank, and the next round works.

    On ranks where only `check` raises, the round's result is NaN. Collective.
    """
    case = TransportCase(name="refusals", tokens=(5,) * group.num_ranks)
    transport = make(group, case.make_placement(), case.config)
    for culprit in sorted({0, group.num_ranks - 1}):
        types = _wrong_types(case, culprit, group) if culprit == 0 else []  # which the host alone looks at
        for number, (message, bad) in enumerate([*types, *_bad_inputs(case, culprit, group)], start=1):
            arguments = bad if group.rank == culprit else arguments_of(case, group)
            error = refused_round(transport, case, arguments, group)
            assert message in error, f"rank {group.rank}: {error!r}, expected {message!r}"
            if number >= len(types):
                check_round(transport, case, group.device)
        if group.rank == culprit:
            try:
                transport.refuse(ValueError("of my own"))
            except ValueError as raised:
                assert str(raised) == "of my own", str(raised)
            transport.check()  # does not raise it again
        else:
            error = refused_round(transport, case, arguments_of(case, group), group)
            words = f"rank {culprit} refused its input"
            assert words in error, f"rank {group.rank}: {error!r}, expected {words!r}"
        check_round(transport, case, group.device)
    transport.destroy()


def arguments_of(case: TransportCase, group: EPGroup) -> DispatchArguments:
    """The dispatch of a case on this rank, in COMPACT and without quantization."""
    inputs = case.inputs(group.rank).to(group.device)
    return DispatchArguments(inputs.x, inputs.routing, Layout.COMPACT, get_scheme("none"))


def refused_round(transport: Transport, case: TransportCase, arguments: DispatchArguments, group: EPGroup) -> str:
    """Run a round that some rank refuses; returns the message raised by the dispatch, or by `check` after NaN results.

    Errors: AssertionError if nothing was raised, or twice.
    """
    message, wrong, options = "", "", arguments._asdict()
    x, routing = options.pop("x"), options.pop("routing")
    try:
        dispatched = transport.dispatch(x, routing, **options)
    except ValueError as error:
        message = str(error)
    else:
        y = compute_experts(dispatched.batch, case.make_placement().starts[group.rank])
        result = transport.combine(y, dispatched, out=torch.ones_like(x))
        if not bool(result.isnan().all()):
            wrong = f"rank {group.rank} got numbers from a refused round"
        try:
            transport.check()
        except ValueError as error:
            message = str(error)
    transport.check()  # an error is raised only once
    assert not wrong, wrong
    assert message, f"rank {group.rank} accepted a round that a rank had to refuse"
    return message


def _bad_inputs(case: TransportCase, culprit: int, group: EPGroup) -> list[tuple[str, DispatchArguments]]:
    """Bad inputs of the culprit, each with the words that must be in this rank's error."""
    inputs = case.inputs(culprit).to(group.device)
    x, ids, weights = inputs.x, inputs.routing.topk_ids, inputs.routing.topk_weights
    assert isinstance(x, torch.Tensor)
    twice = Routing(topk_ids=torch.cat([ids, ids]), topk_weights=torch.cat([weights, weights]))
    mine = group.rank == culprit
    refused = f"on rank {culprit}" if mine else f"rank {culprit} refused its input"
    too_many = "num_tokens (9)" if mine else f"rank {culprit}"
    bad_routing = Routing(topk_ids=_with_bad_ids(ids), topk_weights=weights)
    nine = torch.tensor([9], dtype=torch.int32, device=group.device)
    good = DispatchArguments(x, inputs.routing, Layout.COMPACT, get_scheme("none"))
    bad = [
        (
            f"num_tokens (10) exceeds max_tokens_per_rank (5) on rank {culprit}",
            good._replace(x=torch.cat([x, x]), routing=twice),
        ),
        (
            f"topk_ids has 2 ids outside [-1, num_experts (8)) on rank {culprit}, such as 8",
            good._replace(routing=bad_routing),
        ),
        (refused, good._replace(x=x.double())),
        (too_many, good._replace(num_tokens=nine)),
    ]
    if group.num_ranks > 1:
        fewer = Routing(topk_ids=ids[:, :1].contiguous(), topk_weights=weights[:, :1].contiguous())
        bad.append(("ranks disagree on the payload", good._replace(routing=fewer)))
        bad.append(("ranks disagree on the payload", good._replace(scheme=get_scheme("fp8_token"))))
    return bad


def _wrong_types(case: TransportCase, culprit: int, group: EPGroup) -> list[tuple[str, DispatchArguments]]:
    """Arguments of a wrong type, which must be refused like a tensor of a wrong shape; else as `_bad_inputs`."""
    good: Any = arguments_of(case, group)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("x is a NoneType (None), not a tensor", {"x": None}),
        ("x is a list (", {"x": good.x.tolist()}),
        ("x is a ndarray (", {"x": good.x.float().cpu().numpy()}),
        ("torch.sparse_coo, not dense", {"x": good.x.to_sparse()}),
        ("x is ()", {"x": good.x[0, 0]}),
        ("routing (None) is no Routing", {"routing": None}),
        (") is no Routing", {"routing": (good.routing.topk_ids, good.routing.topk_weights)}),
        ("num_tokens is a int (3), not a tensor", {"num_tokens": 3}),
        ("max_num_tokens (4) is not in [rows of x (5), max_tokens_per_rank (5)]", {"max_num_tokens": 4}),
        ("max_num_tokens (6) is not in [rows of x (5), max_tokens_per_rank (5)]", {"max_num_tokens": 6}),
        ("max_num_tokens ('5') is not in", {"max_num_tokens": "5"}),
        ("layer (0) is no LayerTag", {"layer": 0}),
        ("layout ('compact') is not one of", {"layout": "compact"}),
        ("scheme ('none') is not a QuantScheme", {"scheme": "none"}),
    ]
    if group.rank != culprit:
        changes = [(f"rank {culprit} refused its input", change) for _, change in changes]
    return [(words, good._replace(**change)) for words, change in changes]


def _with_bad_ids(ids: torch.Tensor) -> torch.Tensor:
    bad_ids = ids.clone()
    bad_ids[0, 0], bad_ids[1, 1] = 8, -2
    return bad_ids


def check_layers(make: TransportFactory, group: EPGroup) -> None:
    """If ranks are in different layers, or their layers' settings differ, every rank's error names the ranks.

    The next round works. Collective; no effect with one rank.
    """
    case = TransportCase(name="layers", tokens=(5,) * group.num_ranks)
    transport = make(group, case.make_placement(), case.config)
    arguments, last = arguments_of(case, group), group.num_ranks - 1
    config = MoEConfig(hidden=case.hidden, intermediate=32, num_experts=case.num_experts)
    wide = dataclasses.replace(config, intermediate=48)
    other = dataclasses.replace(config, activation=ActivationConfig(kind=ActivationKind.GELU))
    moved = create_placement("round_robin", case.num_experts + 1, group.num_ranks)  # also differs if each has one
    usual = LayerTag.of(3, config, transport.placement)
    odd = [
        (LayerTag.of(MOST_LAYERS - 1, config, transport.placement), f"in layer {MOST_LAYERS - 1}"),
        (LayerTag.of(3, wide, transport.placement), "intermediate (48 and 32)"),
        (LayerTag.of(3, other, transport.placement), "different settings: activation (found"),
        (LayerTag.of(3, config, moved), "different settings: placement (found"),
    ]
    for tag, words in odd if group.num_ranks > 1 else ():
        mine = group.rank == last
        message = refused_round(transport, case, arguments._replace(layer=tag if mine else usual), group)
        found = words if mine else words.replace("(48 and 32)", "(32 and 48)")
        assert found in message, f"rank {group.rank}: {message!r}, expected {found!r}"
        assert f"rank {last}" in message, f"rank {group.rank}: {message!r}, expected rank {last}"
        assert f"rank {group.rank}" in message, f"rank {group.rank}: {message!r}, expected rank {group.rank}"
        check_round(transport, case, group.device)
    transport.destroy()
