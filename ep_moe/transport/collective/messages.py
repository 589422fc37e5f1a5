"""Messages of a fixed size, one from each rank to all, for rounds whose counts no host reads.

A message is [HEAD + B] rows of bytes: the header, in `head_rows` rows, and up to B tokens with an expert anywhere.

Letters: T tokens on this rank, K top-k, R ranks, B the round's bound on the tokens of a rank.
"""

import torch

from ep_moe.transport.headers import HEADER_WORDS, Header
from ep_moe.transport.payload import RowFormat

_HEADER_BYTES = 8 * HEADER_WORDS


def head_rows(row_format: RowFormat) -> int:
    """How many rows of a message its header takes."""
    return -(-_HEADER_BYTES // row_format.row_bytes)


def header_of(message: torch.Tensor) -> torch.Tensor:
    """[1, HEADER_WORDS] int64, the header in a message [HEAD + B, row_bytes] uint8: a view."""
    return message.view(-1)[:_HEADER_BYTES].view(torch.int64).unsqueeze(0)


def new_kept(num_ranks: int, device: torch.device) -> torch.Tensor:
    """[R + 1, HEADER_WORDS] int64, as `read_messages` writes it, of no round."""
    return torch.zeros(num_ranks + 1, HEADER_WORDS, dtype=torch.int64, device=device)


def take_kept(kept: torch.Tensor) -> list[Header]:
    """The headers [R] of the first bad round since the last call, empty if there was none. Host sync."""
    *headers, (bad, *_) = kept.tolist()
    if not bad:
        return []
    kept.zero_()
    return [Header(*words) for words in headers]


def read_messages(
    messages: torch.Tensor,
    row_format: RowFormat,
    *,
    rank: int,
    head: int,
    token_to_row: torch.Tensor,
    owner: torch.Tensor,
    kept: torch.Tensor,
    nan_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens in the messages of all ranks, or none if the headers do not go together.

    Args:
        messages: [R, HEAD + B, row_bytes] uint8, of the whole group. head: HEAD.
        token_to_row: [T, 1] int32, each token's row in this rank's message behind the header, -1 none.
        owner: [P] int32, the rank of each expert. kept: of `new_kept`; keeps the headers of the first bad round.
        nan_row: [H], becomes NaN in a bad round.
    Returns: physical ids [R * (HEAD + B), K] int32, -1 also in rows that are no tokens; and [T, R + 1] int32, a token's
    row for each rank among as many rows that come back, -1 none, and last that of NaN, which follows them, in a bad
    round. Local, on the current stream; no host sync on a GPU.
    """
    if messages.is_cuda:
        from ep_moe.transport.collective import launchers

        return launchers.read_messages(
            messages,
            row_format,
            rank=rank,
            head=head,
            token_to_row=token_to_row,
            owner=owner,
            kept=kept,
            nan_row=nan_row,
        )
    num_ranks, height, _ = messages.shape
    headers = [Header(*header_of(message)[0].tolist()) for message in messages]
    own = headers[rank]
    bad = any(
        header.refused
        or header.bad_ids
        or (header.fingerprint, header.layer, header.settings) != (own.fingerprint, own.layer, own.settings)
        for header in headers
    )
    rows = torch.tensor([0 if bad else header.rows for header in headers], device="cpu")[:, None]
    index = torch.arange(height, device="cpu")
    live = (index >= head) & (index - head < rows)
    found = row_format.read(messages.view(num_ranks * height, -1))[2].topk_ids
    mine = found.view(num_ranks, height, -1)[rank, head:]
    experts = torch.where(token_to_row >= 0, mine[token_to_row.squeeze(1).clamp(min=0).long()], -1)
    inside = (experts >= 0) & (experts < len(owner))
    owners = torch.where(inside, owner[torch.where(inside, experts, 0).long()], -1)
    ranks = torch.arange(num_ranks, device="cpu")
    columns = torch.where((owners[:, :, None] == ranks).any(1), ranks * height + head + token_to_row, -1)
    columns = torch.cat([columns, torch.full_like(columns[:, :1], num_ranks * height if bad else -1)], 1)
    if bad:
        nan_row.fill_(float("nan"))
    if bad and not kept[-1, 0]:
        kept.copy_(torch.tensor([[*header[:HEADER_WORDS]] for header in headers] + [[1] * HEADER_WORDS], device="cpu"))
    return torch.where(live.view(-1, 1), found, -1), columns.int()
