"""The state of a rank's sequences on the device: a pass reads it, and writes the state of the next pass.

Letters: B rows, V vocabulary.
"""

import torch

from ep_moe.engines.transformers.decoding.sampling import sample, uniform

MOST_END_IDS = 16
NONE = -1  # in place of a token of a row that has ended


class Sequences:
    """The state of each row's sequence, in tensors on the device.

    Args:
        rows: B. steps: number of passes whose tokens are kept until the host reads them.
        device: of the tensors.
    """

    def __init__(self, rows: int, steps: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # the last token of each sequence
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)  # of `tokens`
        self.left = torch.zeros(rows, dtype=torch.int64, device=device)  # new tokens that are still wanted
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)  # the row wants another token
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.ones(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.end_ids = torch.full((MOST_END_IDS,), NONE, dtype=torch.int64, device=device)
        self.made = torch.full((steps, rows), NONE, dtype=torch.int64, device=device)  # by pass; NONE for other rows
        self.step = torch.zeros(1, dtype=torch.int64, device=device)  # the row of `made` that the next pass writes
        self._ordinals = torch.arange(1, rows + 1, device=device)

    @property
    def rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    def num_tokens(self, rows: int) -> torch.Tensor:
        """[1] int32: the number of rows up to the last live one among the first `rows`. Local, no host sync."""
        return torch.where(self.live[:rows], self._ordinals[:rows], 0).amax(0, keepdim=True).int()

    def advance(self, logits: torch.Tensor, *, sampled: bool) -> None:
        """Choose the next token of each live row among the first B' rows, and move these rows on by one position.

        Args:
            logits: [B', V]. sampled: sample with the rows' temperature, top_p and seed; else take the likeliest token.
        Local, no host sync.
        """
        here = slice(logits.shape[0])
        live, positions, tokens, left = self.live[here], self.positions[here], self.tokens[here], self.left[here]
        logits = logits.float()
        positions.add_(live)
        if sampled:
            numbers = uniform(self.seeds[here], positions)
            chosen = sample(logits, self.temperature[here], self.top_p[here], numbers)
        else:
            chosen = logits.argmax(-1)
        self.made[:, here].index_copy_(0, self.step, torch.where(live, chosen, NONE)[None])
        tokens.copy_(torch.where(live, chosen, tokens))
        left.sub_(live.long())
        ended = (chosen[:, None] == self.end_ids).any(-1)
        live.logical_and_((left > 0) & ~ended)
        self.step.add_(1)
