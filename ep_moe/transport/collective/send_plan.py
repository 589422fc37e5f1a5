"""The destination ranks of tokens: counted on the device, sent to every rank in a header, read by the host once.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts, B blocks of tokens.
"""

import dataclasses

import torch

from ep_moe.transport.headers import HEADER_WORDS, Header, find_bad_ids


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SendPlan:
    """The rows of the send buffer, ordered by (rank, token).

    Token t is sent to rank r as row `block_start[t // block_tokens, r] + place[t, r]`, unless place[t, r] is -1.
    """

    place: torch.Tensor  # [T, R] int32, -1 none
    block_start: torch.Tensor  # [B, R] int32
    block_tokens: int

    def token_to_row(self) -> torch.Tensor:
        """[T, R] int32: each token's row of the send buffer for each rank, -1 none. Local, no host sync."""
        block = torch.arange(self.place.shape[0], device=self.place.device) // self.block_tokens
        return torch.where(self.place >= 0, self.place + self.block_start[block], -1)


def plan_send(
    topk_ids: torch.Tensor, owner: torch.Tensor, *, fingerprint: int, layer: tuple[int, int], header: torch.Tensor
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
    (num_tokens, num_topk), num_ranks, num_physical = topk_ids.shape, header.shape[0], owner.shape[0]
    valid = (topk_ids >= 0) & (topk_ids < num_physical)
    pairs = torch.zeros(num_tokens, num_ranks, dtype=torch.int32, device="cpu")
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
        num_tokens=num_tokens,
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
        block_tokens=max(num_tokens, 1),
    )
