"""The first messages of a round: every rank tells every other what it sends, or why it refuses, before any payload.

Letters: R ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ep_moe.group import EPGroup
from ep_moe.transport.checks import bad_ids_message, too_many_tokens_message
from ep_moe.transport.collective.row_format import RowFormat
from ep_moe.transport.collective.send_plan import HEADER_WORDS, Header
from ep_moe.transport.layer_tag import LayerTag, other_layer_message


def refusal(num_tokens: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Headers [2, R, HEADER_WORDS] of a rank that refuses its input; `num_tokens` is what it was given. Local."""
    words = Header(*[0] * HEADER_WORDS)._replace(num_tokens=num_tokens, refused=1)
    return torch.tensor(words, dtype=torch.int64, device=device).repeat(2, num_ranks, 1)


def swap_headers(group: EPGroup, headers: torch.Tensor, round_: int) -> list[list[Header]]:
    """Send headers[0], one to each rank, receive into headers[1]; return both as lists, by rank.

    Args:
        headers: [2, R, HEADER_WORDS] int64.
    Errors: PeerLostError. Collective, one host sync.
    """
    ones = (1,) * group.num_ranks
    work = all_to_all(group, headers[1], headers[0], ones, ones)
    if work is not None:
        group.wait(work, phase="dispatch", round=round_)
    return [[Header(*words) for words in by_rank] for by_rank in headers.tolist()]


def compare_headers(
    received: list[Header],
    *,
    rank: int,
    max_tokens_per_rank: int,
    num_physical: int,
    layer: LayerTag,
    row_format: RowFormat,
    fingerprint: int,
    round_: int,
) -> None:
    """Raise ValueError on every rank alike if a rank refuses the round, is in another layer or sends another format.

    A rank's own bad input comes first, then another's with its rank. Local.
    """
    for source, header in sorted(enumerate(received), key=lambda entry: entry[0] != rank):
        if header.num_tokens > max_tokens_per_rank:
            raise ValueError(too_many_tokens_message(header.num_tokens, max_tokens_per_rank, source))
        if header.bad_ids:
            raise ValueError(bad_ids_message(header.bad_ids, header.bad_id, num_physical, source))
        if header.refused:
            raise ValueError(f"rank {source} refused its input in round {round_}; its own error says why")
    for source, header in enumerate(received):
        if (header.layer, header.settings) != layer.words:
            theirs = LayerTag.from_words(header.layer, header.settings)
            raise ValueError(other_layer_message(layer, rank, theirs, source, round_))
    odd = [source for source, header in enumerate(received) if header.fingerprint != fingerprint]
    if odd:
        raise ValueError(
            f"ranks disagree on the payload in round {round_}: rank {rank} sends {row_format}, not as rank "
            f"{' and rank '.join(map(str, odd))}; scheme, num_topk and max_num_tokens must be the same on all ranks"
        )


def all_to_all(
    group: EPGroup,
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    recv_counts: Sequence[int],
    send_counts: Sequence[int],
) -> dist.Work | None:
    """Begin `all_to_all_single` over the group; None, and a copy, for one rank without a process group.

    Errors: PeerLostError. Collective, no wait.
    """
    group.check()
    if group.process_group is None:
        incoming.copy_(outgoing)
        return None
    try:
        return dist.all_to_all_single(
            incoming, outgoing, list(recv_counts), list(send_counts), group=group.process_group, async_op=True
        )
    except RuntimeError as error:  # if the connection is already broken, the call fails and not the wait
        cause = group.explain(error)
        if cause is error:
            raise
        raise cause from error
