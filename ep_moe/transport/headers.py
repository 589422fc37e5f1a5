"""The first message of a round that the host reads: what a rank sends, or why it refuses, before any payload.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin_all_gather, begin_all_to_all
from ep_moe.transport.checks import bad_ids_message, is_bad_id, too_many_tokens_message
from ep_moe.transport.layer_tag import LayerTag, other_layer_message

INT32 = torch.iinfo(torch.int32)


class Header(NamedTuple):
    """The message of a rank to another: int64 words in this order, on GPUs by `kernels.rows.wire`."""

    rows: Any = 0  # for the receiver
    num_tokens: int = 0  # of the sender
    refused: int = 0  # 1 if the sender's input is bad, else 0
    bad_ids: Any = 0  # how many
    fingerprint: int = 0  # of the row format
    pairs: Any = 0  # (token, expert) pairs for the receiver; not counted by `gathered`
    bad_id: Any = 0  # one of the bad ids
    layer: int = 0  # `LayerTag.words`
    settings: int = 0
    flat: int = 0  # 1 if the sender's batch is FLAT; sent where its source ranks have to know, see HEADER_WORDS


HEADER_WORDS = len(Header._fields) - 1  # without `flat`


def refusal(num_tokens: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Headers [2, R, HEADER_WORDS] of a rank that refuses its input; `num_tokens` is what it was given. Local."""
    words = Header(num_tokens=num_tokens, refused=1)[:HEADER_WORDS]
    return torch.tensor(words, dtype=torch.int64, device=device).repeat(2, num_ranks, 1)


def swap_headers(group: EPGroup, headers: torch.Tensor, round_: int) -> list[list[Header]]:
    """Send headers[0], one to each rank, receive into headers[1]; return both as lists, by rank.

    Args:
        headers: [2, R, HEADER_WORDS] int64.
    Errors: PeerLostError. Collective, one host sync.
    """
    ones = (1,) * group.num_ranks
    work = begin_all_to_all(group, headers[1], headers[0], ones, ones)
    if work is not None:
        group.wait(work, phase="dispatch", round=round_)
    return [[Header(*words) for words in by_rank] for by_rank in headers.tolist()]


def gather_headers(group: EPGroup, mine: torch.Tensor, round_: int) -> list[Header]:
    """The headers of all ranks, of which each sends the same one to all.

    Args:
        mine: [all words of `Header`] int64.
    Errors: PeerLostError. Collective, one host sync.
    """
    everyone = mine.new_empty(group.num_ranks, mine.shape[0])
    work = begin_all_gather(group, everyone.view(-1), mine)
    if work is not None:
        group.wait(work, phase="dispatch", round=round_)
    return [Header(*words) for words in everyone.tolist()]


def find_bad_ids(topk_ids: torch.Tensor, num_physical: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many ids no rank owns, and the largest of these, clamped to int32; 0 if there are none.

    Args:
        topk_ids: [T, K] int32 or int64.
    Local, no host sync.
    """
    bad = is_bad_id(topk_ids, num_physical)
    count = bad.sum()
    if not bad.numel():
        return count, count
    worst = torch.where(bad, topk_ids.long(), torch.iinfo(torch.int64).min).max()
    return count, torch.where(count > 0, worst.clamp(INT32.min, INT32.max), 0)


def compare_headers(
    headers: Sequence[Header],
    *,
    rank: int,
    round_: int,
    max_tokens_per_rank: int,
    num_physical: int,
    row_format: object,
) -> None:
    """Raise ValueError on every rank alike if a rank refuses the round, is in another layer or sends another format.

    A rank's own bad input comes first, then another's with its rank.

    Args:
        headers: [R], those that this rank has received, its own among them.
        row_format: of this rank's rows, for the message.
    Local.
    """
    own = headers[rank]
    for source, header in sorted(enumerate(headers), key=lambda entry: entry[0] != rank):
        if header.num_tokens > max_tokens_per_rank:
            raise ValueError(too_many_tokens_message(header.num_tokens, max_tokens_per_rank, source))
        if header.bad_ids:
            raise ValueError(bad_ids_message(header.bad_ids, header.bad_id, num_physical, source))
        if header.refused:
            raise ValueError(f"rank {source} refused its input in round {round_}; its own error says why")
    for source, header in enumerate(headers):
        if (header.layer, header.settings) != (own.layer, own.settings):
            mine, theirs = (LayerTag.from_words(one.layer, one.settings) for one in (own, header))
            raise ValueError(other_layer_message(mine, rank, theirs, source, round_))
    odd = [source for source, header in enumerate(headers) if header.fingerprint != own.fingerprint]
    if odd:
        raise ValueError(
            f"ranks disagree on the payload in round {round_}: rank {rank} sends {row_format}, not as rank "
            f"{' and rank '.join(map(str, odd))}; scheme, num_topk and max_num_tokens must be the same on all ranks"
        )
