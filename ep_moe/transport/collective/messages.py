"""Messages of a fixed size, one from each rank to all, for rounds whose counts no host reads.

A message is [HEAD + B] rows of bytes: the header, in `head_rows` rows, and up to B tokens.

Letters: T tokens on this rank, K top-k, R ranks, B the round's bound on the tokens of a rank.
"""

from typing import Any

import torch

from ep_moe.layout import Place, merge_repeats
from ep_moe.quant import Quantized
from ep_moe.routing import Routing
from ep_moe.transport.collective.send_plan import parts_of_rows
from ep_moe.transport.headers import HEADER_WORDS, Header, find_bad_ids
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


@torch.inference_mode()  # which alone may write tensors that were made in it
def take_kept(kept: torch.Tensor) -> list[Header]:
    """The headers [R] of the first bad round since the last call, empty if there was none. Host sync."""
    *headers, (bad, *_) = kept.tolist()
    if not bad:
        return []
    kept.zero_()
    return [Header(*words) for words in headers]


def write_message(
    row_format: RowFormat,
    x: torch.Tensor | Quantized,
    routing: Routing,
    message: torch.Tensor,
    *,
    fingerprint: int,
    layer: tuple[int, int],
    num_physical: int,
    num_tokens: torch.Tensor | None = None,
) -> None:
    """Write this rank's message: its header, and each of its tokens, also one without an expert.

    Args:
        x: [T, H], or quantized. routing: of these tokens, physical ids, of P experts.
        message: [HEAD + B, row_bytes] uint8, written but for its padding and what is behind the tokens.
        fingerprint: of the row format. layer: `LayerTag.words`.
        num_tokens: [1] int32, how many of the T rows are tokens, by default all; the header is a refusal if it is
            outside [0, T].
    Local, on the current stream, no host sync on a GPU.
    """
    head = head_rows(row_format)
    if message.is_cuda:  # Triton is imported only here: it exists only on Linux and is slow to import
        from ep_moe.transport.collective import launchers

        options: dict[str, Any] = {"num_physical": num_physical, "head": head, "num_tokens": num_tokens}
        launchers.write_message(x, routing, message, fingerprint=fingerprint, layer=layer, **options)
        return
    num_rows = len(routing.topk_ids)
    count = num_rows if num_tokens is None else int(num_tokens)
    written = min(max(count, 0), num_rows)
    bad_ids, bad_id = find_bad_ids(routing.topk_ids[:written], num_physical)
    refused = int(written != count)
    words = Header(count, count, refused, int(bad_ids), fingerprint, 0, int(bad_id), *layer)[:HEADER_WORDS]
    header_of(message)[0] = torch.tensor(words, dtype=torch.int64, device="cpu")
    for place, part in parts_of_rows(row_format, x, routing):
        message[head : head + written, place : place + part.shape[1]] = part[:written]


def read_messages(
    messages: torch.Tensor,
    row_format: RowFormat,
    *,
    rank: int,
    head: int,
    columns: torch.Tensor,
    owner: torch.Tensor,
    own: tuple[int, int],
    kept: torch.Tensor,
    nan_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Place | None]:
    """Find the tokens in the messages of all ranks, or none if the headers do not go together.

    Args:
        messages: [R, HEAD + B, row_bytes] uint8, of the whole group. head: HEAD.
        columns: [T, R + 1] int32, written: a token's row for each rank among as many rows that come back, -1 none, and
            last that of NaN, which follows them, in a bad round.
        owner: [P] int32, the rank of each expert. own: the first of this rank's experts, and the one behind them.
        kept: of `new_kept`; keeps the headers of the first bad round. nan_row: [H], becomes NaN in a bad round.
    Returns: local ids [R * (HEAD + B), K] int32, -1 also in rows that are no tokens, and weights, as of
    `ep_moe.layout.merge_repeats`; and `place` of `ep_moe.layout.pack`, if not None what writes all these tensors.
    Local, on the current stream; no host sync on a GPU.
    """
    if messages.is_cuda:
        from ep_moe.transport.collective import launchers

        return launchers.read_messages(
            messages,
            row_format,
            rank=rank,
            head=head,
            columns=columns,
            owner=owner,
            own=own,
            kept=kept,
            nan_row=nan_row,
        )
    num_ranks, height, _ = messages.shape
    headers = [Header(*header_of(message)[0].tolist()) for message in messages]
    own_header = headers[rank]
    own_words = own_header.fingerprint, own_header.layer, own_header.settings
    bad = any(
        header.refused or header.bad_ids or (header.fingerprint, header.layer, header.settings) != own_words
        for header in headers
    )
    rows = torch.tensor([0 if bad else header.rows for header in headers], device="cpu")[:, None]
    index = torch.arange(height, device="cpu")
    live = (index >= head) & (index - head < rows)
    routing = row_format.read(messages.view(num_ranks * height, -1))[2]
    found, num_tokens = routing.topk_ids, len(columns)
    mine = found.view(num_ranks, height, -1)[rank, head : head + num_tokens]
    experts = torch.where(torch.arange(num_tokens, device="cpu")[:, None] < own_header.rows, mine, -1)
    inside = (experts >= 0) & (experts < len(owner))
    owners = torch.where(inside, owner[torch.where(inside, experts, 0).long()], -1)
    ranks = torch.arange(num_ranks, device="cpu")
    rows_back = ranks * height + head + torch.arange(num_tokens, device="cpu")[:, None]
    columns[:, :-1] = torch.where((owners[:, :, None] == ranks).any(1), rows_back, -1)
    columns[:, -1] = num_ranks * height if bad else -1
    if bad:
        nan_row.fill_(float("nan"))
    if bad and not kept[-1, 0]:
        words = [*(header[:HEADER_WORDS] for header in headers), (1,) * HEADER_WORDS]
        with torch.inference_mode():
            kept.copy_(torch.tensor(words, device="cpu"))
    ids = torch.where(live.view(-1, 1), found, -1)
    return *merge_repeats(ids, routing.topk_weights, first=own[0], last=own[1]), None
