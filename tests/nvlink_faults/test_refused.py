"""Rounds that a rank refuses, on its host or its device: NaN for all, `check` raises, and the next round is right."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_moe.group import EPGroup
from ep_moe.routing import Routing
from nvlink_faults.common import (
    DEVICE,
    EXPERTS_PER_RANK,
    KIND,
    MAX_TOKENS,
    NO_RANK_LOST,
    NUM_TOKENS,
    blindfolded,
    check_round,
    finish,
    inputs,
    make_transport,
    on_ranks,
)

CULPRIT = 1


def bring(transport: Any, change: Callable[[dict[str, Any]], None], slot: int = 0) -> Any:
    """A dispatch whose input the culprit has changed."""
    x, routing = inputs(transport.rank, 0, transport.num_ranks)
    given = {"x": x, "ids": routing.topk_ids, "weights": routing.topk_weights, "num_tokens": None}
    if transport.rank == CULPRIT:
        change(given)
    given = {name: None if value is None else value.to(DEVICE) for name, value in given.items()}
    routing = Routing(topk_ids=given["ids"], topk_weights=given["weights"])
    return transport.dispatch(given["x"], routing, **KIND, num_tokens=given["num_tokens"], slot=slot)


def doubled(given: dict[str, Any]) -> None:
    given["x"] = given["x"].double()


def too_many(given: dict[str, Any]) -> None:
    for name in ("x", "ids", "weights"):
        given[name] = torch.cat([given[name]] * 3)


def bad_ids(given: dict[str, Any]) -> None:
    given["ids"][0, 0], given["ids"][1, 1] = 100, -2


def more_than_rows(given: dict[str, Any]) -> None:
    given["num_tokens"] = torch.tensor([NUM_TOKENS + 1], dtype=torch.int32)


def fewer_ids(given: dict[str, Any]) -> None:
    given["ids"], given["weights"] = given["ids"][:, :1].contiguous(), given["weights"][:, :1].contiguous()


# mistake, whether the culprit's call raises, the error of `check` on the others, and on the culprit
MISTAKES = {
    "dtype": (doubled, True, "rank 1 refused its input in round {round}; its own error says why", ""),
    "too-many": (too_many, True, f"num_tokens (6) exceeds max_tokens_per_rank ({MAX_TOKENS}) on rank 1", ""),
    "ids": (bad_ids, False, "topk_ids has 2 ids outside [-1, num_experts ({experts})) on rank 1", None),
    "num_tokens": (more_than_rows, False, "num_tokens (3) is not in [0, rows of x] on rank 1 in round {round}", None),
    "format": (
        fewer_ids,
        False,
        "ranks disagree on the payload in round {round}: rank 1 not as rank {rank}; scheme, num_topk and ",
        "ranks disagree on the payload in round {round}: {others} not as rank 1; scheme, num_topk and ",
    ),
}


def said_by(transport: Any) -> str:
    """The error of `check`, which is raised only once."""
    try:
        transport.check()
    except ValueError as error:
        transport.check()
        return str(error)
    return ""


def log_of_faults() -> list[str]:
    """What the transport logs from now on."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: logged.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ep_moe.transport.one_sided.faults").addHandler(handler)
    return logged


def refuse_rounds(group: EPGroup) -> dict[str, tuple[str, str]]:
    """For each mistake the expected error and the raised one; two more for rounds without `check`."""
    logged = log_of_faults()
    transport, outcomes, round_ = make_transport(group), {}, 0
    names = " and ".join(f"rank {rank}" for rank in range(group.num_ranks) if rank != CULPRIT)
    words = {"experts": EXPERTS_PER_RANK * group.num_ranks, "rank": group.rank, "others": names}
    for name, (change, raises, theirs, own) in MISTAKES.items():
        wanted = theirs if group.rank != CULPRIT or own is None else own
        if raises and group.rank == CULPRIT:
            with pytest.raises(ValueError, match=r"float64|exceeds"):
                bring(transport, change)
        else:
            dispatched = bring(transport, change)
            assert dispatched.batch.expert_num_tokens.tolist() == [0] * EXPERTS_PER_RANK, name
            out, _ = finish(transport, dispatched) if name != "format" or group.rank != CULPRIT else (None, None)
            if out is None:
                transport.abandon()
            else:
                assert bool(out.isnan().all()), name
        outcomes[name] = (wanted.format(round=round_, **words), said_by(transport))
        round_ += 1
        if name in ("too-many", "format"):
            check_round(transport, round_)
            round_ += 1
    for change in (bad_ids, fewer_ids):  # the next dispatch does not raise, and the first is kept
        bring(transport, change)
        transport.abandon()
    check_round(transport, round_)
    text = MISTAKES["ids"][2].format(**words)
    outcomes["unread"] = (text, said_by(transport))
    outcomes["logged"] = ("2", str(sum(text in line for line in logged)))
    transport.destroy()
    return outcomes


def refuse_in_two_slots(group: EPGroup) -> tuple[str, list[str]]:
    """Rounds of both slots fail before the host looks: the error of `check`, and all that is logged."""
    logged = log_of_faults()
    transport = make_transport(group, num_slots=2)
    for round_ in range(3):  # of slot 0
        check_round(transport, round_)
    with blindfolded(transport):
        for slot, change in ((1, more_than_rows), (0, bad_ids)):
            bring(transport, change, slot)
            transport.abandon(slot=slot)
    said = said_by(transport)
    check_round(transport, 5)
    transport.destroy()
    return said, logged


def test_refused_rounds_of_two_slots() -> None:
    """Each is told, with the transport's number of the round, not the slot's."""
    texts = ("num_tokens (3) is not in [0, rows of x] on rank 1 in round 3", "topk_ids has 2 ids outside [-1,")
    for said, logged in on_ranks(refuse_in_two_slots, config=NO_RANK_LOST):
        assert said == texts[0]
        assert [text in line for text, line in zip(texts, logged, strict=True)] == [True, True], logged


def test_refused_rounds() -> None:
    for rank, outcomes in enumerate(on_ranks(refuse_rounds, config=NO_RANK_LOST)):
        for name, (wanted, said) in outcomes.items():
            assert said.startswith(wanted), (rank, name, said, wanted)
            assert bool(said) == bool(wanted), (rank, name, said)
