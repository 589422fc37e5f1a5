"""The state of a rank's sequences on the device: a pass reads it, and writes the state of the next pass.

Letters: B rows, V vocabulary.
"""

import dataclasses

import torch

from ep_moe.engines.transformers.decoding.sampling import sample, uniform

MOST_END_IDS = 16
NONE = -1  # in place of a token of a row that has ended
BROKEN = -2  # in place of a token whose logits are not finite; the row ends


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How rows choose their tokens: temperature, top_p [B'] float32 and seeds [B'] int64. Temperature 0 takes the
    likeliest token."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor


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
        self.greedy = torch.ones(rows, dtype=torch.bool, device=device)  # takes the likeliest token in sampled passes
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
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

    def end_all(self, end_ids: tuple[int, ...]) -> None:
        """End all rows, and set the tokens that end a sequence from now on. Local."""
        for tensor in (self.live, self.positions, self.tokens, self.left, self.step):
            tensor.zero_()
        self.end_ids.fill_(NONE)
        if end_ids:
            self.end_ids[: len(end_ids)] = torch.tensor(end_ids, device="cpu")

    def begin(
        self, first: int, positions: torch.Tensor, left: torch.Tensor, sampling: "Sampling | None" = None
    ) -> None:
        """Set the state after the prompts of rows [first, first + B').

        Args:
            positions, left: [B'] int64: of each prompt's last token, and the new tokens that are wanted.
            sampling: None to take the likeliest tokens.
        Local, no host sync if the tensors are on the device.
        """
        here = slice(first, first + positions.shape[0])
        self.tokens[here] = 0
        self.positions[here] = positions
        self.left[here] = left
        self.live[here] = left > 0
        self.greedy[here] = True
        if sampling is not None:
            self.greedy[here] = sampling.temperature <= 0
            self.temperature[here] = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
            self.top_p[here] = sampling.top_p
            self.seeds[here] = sampling.seeds

    def advance(self, logits: torch.Tensor, *, sampled: bool, first: int = 0) -> None:
        """Choose the next token of each live row in [first, first + B'), and move these rows on by one position.

        Args:
            logits: [B', V]. sampled: sample with the rows' temperature, top_p and seed, unless they are greedy; else
                all rows take the likeliest token.
        A row whose logits have NaN or infinity ends, with BROKEN in place of a token. Local, no host sync.
        """
        here = slice(first, first + logits.shape[0])
        live, positions, tokens, left = self.live[here], self.positions[here], self.tokens[here], self.left[here]
        logits = logits.float()
        positions.add_(live)
        chosen = logits.argmax(-1)
        finite = logits.gather(1, chosen[:, None]).squeeze(1).isfinite()  # the largest; NaN counts as larger than any
        if sampled:
            numbers = uniform(self.seeds[here], positions)
            drawn = sample(logits, self.temperature[here], self.top_p[here], numbers)
            chosen = torch.where(self.greedy[here], chosen, drawn)
        chosen = torch.where(finite, chosen, BROKEN)
        self.made[:, here].index_copy_(0, self.step, torch.where(live, chosen, NONE)[None])
        tokens.copy_(torch.where(live & finite, chosen, tokens))
        left.sub_(live.long())
        ended = (chosen[:, None] == self.end_ids).any(-1)
        live.logical_and_((left > 0) & ~ended & finite)
        self.step.add_(1)
