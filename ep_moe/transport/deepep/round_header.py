"""What every rank tells every other before a round's rows are sent: 8 words, in one all-gather.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts.
"""

import zlib
from typing import Any, NamedTuple

import torch

from ep_moe.transport.checks import bad_ids_message, is_bad_id, too_many_tokens_message
from ep_moe.transport.deepep.payload import PayloadFormat
from ep_moe.transport.layer_tag import LayerTag, other_layer_message

INT32 = torch.iinfo(torch.int32)


class RoundHeader(NamedTuple):
    """A rank's words of a round."""

    num_tokens: int = 0
    refused: int = 0  # 1 if the rank's input is bad
    bad_ids: Any = 0  # how many
    bad_id: Any = 0  # one of them
    fingerprint: int = 0  # of the payload's format
    layer: int = 0  # `LayerTag.words`
    settings: int = 0
    flat: int = 0  # 1 if the rank's batch is FLAT


HEADER_WORDS = len(RoundHeader._fields)


def fingerprint(payload: PayloadFormat, num_topk: int, max_num_tokens: int, cast: bool) -> int:
    """A checksum (CRC-32) of what must be the same on all ranks of a round."""
    return zlib.crc32(repr((payload, num_topk, max_num_tokens, cast)).encode())


def write_header(header: RoundHeader, topk_ids: torch.Tensor, num_physical: int) -> torch.Tensor:
    """The header's words [HEADER_WORDS] int64 on the ids' device, with the ids that no rank owns. No host sync."""
    bad = is_bad_id(topk_ids, num_physical)
    words = torch.tensor(header, dtype=torch.int64, device=topk_ids.device)
    words[RoundHeader._fields.index("bad_ids")] = bad.sum()
    if bad.numel():
        worst = torch.where(bad, topk_ids.long(), INT32.min).max().clamp(INT32.min, INT32.max)
        words[RoundHeader._fields.index("bad_id")] = worst
    return words


def compare_headers(headers: list[RoundHeader], rank: int, round_: int, *, num_physical: int, max_tokens: int) -> None:
    """Raise ValueError on every rank if one has refused the round, is in another layer, or sends another format.

    The message names the rank that differs. Local.
    """
    own = headers[rank]
    for other, header in sorted(enumerate(headers), key=lambda entry: entry[0] != rank):
        if header.num_tokens > max_tokens:
            raise ValueError(too_many_tokens_message(header.num_tokens, max_tokens, other))
        if header.bad_ids:
            raise ValueError(bad_ids_message(header.bad_ids, header.bad_id, num_physical, other))
        if header.refused:
            raise ValueError(f"rank {other} refused its input in round {round_}; its own error says why")
    for other, header in enumerate(headers):
        if (header.layer, header.settings) != (own.layer, own.settings):
            mine, theirs = (LayerTag.from_words(one.layer, one.settings) for one in (own, header))
            raise ValueError(other_layer_message(mine, rank, theirs, other, round_))
    odd = [other for other, header in enumerate(headers) if header.fingerprint != own.fingerprint]
    if odd:
        raise ValueError(
            f"ranks disagree on the payload in round {round_}: rank {rank} does not send as rank "
            f"{' and rank '.join(map(str, odd))}; scheme, num_topk and max_num_tokens must be the same on all ranks"
        )
