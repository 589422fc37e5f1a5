"""The destination ranks of tokens, counted on the device and read by the host once, and the buffer of rows for them.

Letters: T tokens on this rank, N rows, K top-k, H hidden, R ranks, P physical experts.
"""

from collections.abc import Iterator, Sequence

import torch

from ep_moe.quant import Quantized, as_bytes
from ep_moe.routing import Routing
from ep_moe.transport.headers import HEADER_WORDS, Header, find_bad_ids
from ep_moe.transport.payload import WORD_BYTES, RowFormat, SendPlan


def owners(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """[P] int32, physical expert -> rank (or node), of which each owns so many consecutive experts. Local."""
    numbers = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    return numbers.repeat_interleave(torch.tensor(counts, device="cpu")).to(device)


def plan_send(
    topk_ids: torch.Tensor,
    owner: torch.Tensor,
    *,
    fingerprint: int,
    layer: tuple[int, int],
    header: torch.Tensor,
) -> SendPlan:
    """Find the ranks that need each token, and write the header. Ids that no rank owns are counted, never sent.

    Args:
        topk_ids: [T, K] int32 or int64, physical. owner: [P] int32, the rank of each expert.
        fingerprint: of the row format. layer: `LayerTag.words`. header: [R, HEADER_WORDS] int64, written here.
    Local, on the current stream, no host sync.
    """
    if topk_ids.is_cuda:  # Triton is imported only here: it exists only on Linux and is slow to import
        from ep_moe.transport.collective import launchers

        return launchers.plan_send(topk_ids, owner, fingerprint=fingerprint, layer=layer, header=header)
    (num_rows, num_topk), num_ranks, num_physical = topk_ids.shape, header.shape[0], owner.shape[0]
    valid = (topk_ids >= 0) & (topk_ids < num_physical)
    pairs = torch.zeros(num_rows, num_ranks, dtype=torch.int32, device="cpu")
    for column in range(num_topk):
        ids = topk_ids[:, column]
        fresh = valid[:, column] & (topk_ids[:, :column] != ids.unsqueeze(1)).all(1)
        token = torch.nonzero(fresh).squeeze(1)
        pairs[token, owner[ids[token].long()].long()] += 1
    goes = pairs > 0
    counts = goes.sum(0)
    bad_ids, bad_id = find_bad_ids(topk_ids, num_physical)
    words = Header(
        rows=counts,
        num_tokens=num_rows,
        bad_ids=bad_ids,
        fingerprint=fingerprint,
        pairs=pairs.sum(0),
        bad_id=bad_id,
        layer=layer[0],
        settings=layer[1],
    )
    for place, word in enumerate(words[:HEADER_WORDS]):
        header[:, place] = word
    return SendPlan(
        place=torch.where(goes, goes.cumsum(0) - 1, -1).int(),
        block_start=(counts.cumsum(0) - counts).int().unsqueeze(0),
        block_tokens=max(num_rows, 1),
    )


def write_rows(
    row_format: RowFormat, x: torch.Tensor | Quantized, routing: Routing, plan: SendPlan, buffer: torch.Tensor
) -> torch.Tensor:
    """Copy every token to its rows of the send buffer.

    Args:
        x: [T, H], or quantized. routing: of these tokens. plan: their destinations.
        buffer: [N, row_bytes] uint8, written but for its padding; N is at least the sum of the header's row counts.
    Returns: [T, R] int32, each token's row for each rank, -1 none. Local, on the current stream; no host sync on a GPU.
    """
    if plan.place.is_cuda:
        from ep_moe.transport.collective import launchers

        return launchers.write_rows(x, routing, plan, buffer=buffer)
    token_to_row = plan.token_to_row()
    token, rank = torch.nonzero(token_to_row >= 0, as_tuple=True)
    row = token_to_row[token, rank].long()
    for place, part in parts_of_rows(row_format, x, routing):
        buffer[row, place : place + part.shape[1]] = part[token]
    return token_to_row


def parts_of_rows(
    row_format: RowFormat, x: torch.Tensor | Quantized, routing: Routing
) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of all tokens' rows: the byte of a row at which one begins, and [T, its bytes] uint8. Local."""
    ids_at = row_format.ids_at
    parts = {0: x.values, row_format.scales_at: as_bytes(x.scale)} if isinstance(x, Quantized) else {0: x}
    parts |= {ids_at: routing.topk_ids.int(), ids_at + WORD_BYTES * row_format.num_topk: routing.topk_weights}
    for place, part in parts.items():
        # cloned: a single column may count as contiguous although torch cannot view it as bytes
        yield place, part.clone(memory_format=torch.contiguous_format).view(torch.uint8)
