"""The state of a rank's sequences on the device: a pass reads it, and writes the state of the next pass.

A sampled token depends on seed, position and logits alone: the same sequence gets the same tokens in any batch, on any
rank. Letters: B rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ep_moe.balance.carrier import copy_all
from ep_moe.engines.transformers.decoding.adjust import Adjustments
from ep_moe.engines.transformers.decoding.grammars import RowGrammars
from ep_moe.engines.transformers.decoding.passes import RowStart

MOST_END_IDS = 16  # of a model, and as many of a sequence
NONE = -1  # in place of a token of a row that has ended
BROKEN = -2  # in place of a token whose logits are not finite; the row ends
_INCREMENT, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64, as int64


def _shift(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def uniform(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) from a seed and a counter each, [B] int64, by splitmix64 (Steele, Lea and Flood, 2014).

    Returns: [B] float32, of 24 random bits. Local, no host sync.
    """

    def mix(numbers: torch.Tensor) -> torch.Tensor:
        numbers = (numbers ^ _shift(numbers, 30)) * _FIRST
        numbers = (numbers ^ _shift(numbers, 27)) * _SECOND
        return numbers ^ _shift(numbers, 31)

    return _shift(mix(mix(seeds * _INCREMENT) + counters * _INCREMENT), 40).float() * 2.0**-24


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    min_p: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Sample a token for each row among those that `min_p`, `top_k` and `top_p` leave, as of `Sampling`.

    Args:
        logits: [B, V] float32. temperature: [B], above 0. top_p: [B], in (0, 1]. top_k: [B] int64, in [1, V].
        min_p: [B], in [0, 1]. numbers: [B], in [0, 1).
    Returns: [B] int64, the likeliest token for a temperature near 0. Local, no host sync.
    """
    # from the largest logit down, no quotient is above 0; a GPU may take a temperature below the least normal one as 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    ordered, tokens = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    up_to = ordered.cumsum(-1)
    likely = (ordered >= min_p[:, None] * ordered[:, :1]).sum(-1, keepdim=True)
    left = torch.minimum(likely, top_k[:, None]).clamp(min=1)  # at least 1, even for NaN
    reached = top_p[:, None] * torch.where(left < logits.shape[1], up_to.gather(1, left - 1), 1.0)
    taken = torch.minimum((up_to - ordered < reached).sum(-1, keepdim=True).clamp(min=1), left)
    goal = numbers[:, None] * up_to.gather(1, taken - 1)
    place = (up_to <= goal).sum(-1, keepdim=True)
    return tokens.gather(1, torch.minimum(place, taken - 1)).squeeze(1)


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
        self.top_k = torch.ones(rows, dtype=torch.int64, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.end_ids = torch.full((rows, 2 * MOST_END_IDS), NONE, dtype=torch.int64, device=device)
        self.made = torch.full((steps, rows), NONE, dtype=torch.int64, device=device)  # by pass; NONE for other rows
        self.step = torch.zeros(1, dtype=torch.int64, device=device)  # the row of `made` that the next pass writes
        self.adjustments: Adjustments | None = None  # made by the first sequence that asks for any
        self.grammars: RowGrammars | None = None  # of rows that may have one
        self._model_ends: tuple[int, ...] = ()
        self._kept: list[torch.Tensor] = []
        self._ordinals = torch.arange(1, rows + 1, device=device)

    @property
    def rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def _state(self) -> list[torch.Tensor]:
        """What passes change."""
        own = [self.tokens, self.positions, self.left, self.live]
        return own if self.adjustments is None else own + self.adjustments.state

    def keep(self) -> None:
        """Keep this state for `undo`. Local, no host sync."""
        state = self._state
        self._kept += map(torch.empty_like, state[len(self._kept) :])
        copy_all(zip(self._kept, state, strict=True))
        if self.grammars is not None:
            self.grammars.keep()

    def undo(self) -> None:
        """Go back to the state of the last `keep`, but for sequences that have begun since, whose rows have none now.
        Local, no host sync."""
        copy_all(zip(self._state, self._kept, strict=False))  # adjustments are newer, if no sequence had any then
        self.step.zero_()
        if self.grammars is not None:
            self.grammars.undo()

    def num_tokens(self, rows: int) -> torch.Tensor:
        """[1] int32: the number of rows up to the last live one among the first `rows`. Local, no host sync."""
        return torch.where(self.live[:rows], self._ordinals[:rows], 0).amax(0, keepdim=True).int()

    def end_all(self, end_ids: tuple[int, ...]) -> None:
        """End all rows, and set the tokens that end a sequence from now on. Local."""
        for tensor in (self.live, self.positions, self.tokens, self.left, self.step):
            tensor.zero_()
        self._model_ends = end_ids

    def begin(self, starts: Sequence[RowStart], vocab_size: int) -> None:
        """Set the state after the prompts of sequences in consecutive rows. Local, no host sync.

        Args:
            vocab_size: V of the model's logits.
        """
        here = slice(starts[0].row, starts[0].row + len(starts))

        def fill(tensor: torch.Tensor, values: list[Any]) -> None:
            tensor[here].copy_(torch.tensor(values, dtype=tensor.dtype, device="cpu"), non_blocking=True)

        each = [start.sampling for start in starts]
        self.tokens[here] = 0
        fill(self.positions, [len(start.prompt) - 1 for start in starts])
        fill(self.left, [start.max_new_tokens for start in starts])
        fill(self.live, [start.max_new_tokens > 0 for start in starts])
        fill(self.greedy, [sampling.temperature <= 0 for sampling in each])
        fill(self.temperature, [sampling.temperature if sampling.temperature > 0 else 1.0 for sampling in each])
        fill(self.top_p, [sampling.top_p for sampling in each])
        fill(self.top_k, [min(sampling.top_k, vocab_size) or vocab_size for sampling in each])
        fill(self.min_p, [sampling.min_p for sampling in each])
        fill(self.seeds, [sampling.seed for sampling in each])
        ends = [(() if sampling.ignore_end else self._model_ends) + sampling.stop_ids for sampling in each]
        fill(self.end_ids, [ids + (NONE,) * (self.end_ids.shape[1] - len(ids)) for ids in ends])
        if self.adjustments is None and any(sampling.adjusted for sampling in each):
            steps, rows = self.made.shape
            self.adjustments = Adjustments(rows, steps, vocab_size, self.tokens.device)
        if self.adjustments is not None:
            self.adjustments.begin(starts)
            if self.grammars is not None:
                masks = {start.row: self.grammars.begin(start) for start in starts}
                self.adjustments.allow({row: mask for row, mask in masks.items() if mask is not None})

    def advance(self, logits: torch.Tensor, *, sampled: bool, adjusted: bool = False, first: int = 0) -> None:
        """Choose the next token of each live row in [first, first + B'), and move these rows on by one position.

        Args:
            logits: [B', V]. sampled: sample with the rows' temperature, top_p, top_k, min_p and seed, unless they are
                greedy; else all rows take the likeliest token. adjusted: apply and record `adjustments`.
        A row whose logits have NaN or infinity ends, with BROKEN in place of a token. Local, no host sync.
        """
        here = slice(first, first + logits.shape[0])
        live, positions, tokens, left = self.live[here], self.positions[here], self.tokens[here], self.left[here]
        end_ids = self.end_ids[here]
        logits = raw = logits.float()
        positions.add_(live)
        chosen = logits.argmax(-1)
        finite = logits.gather(1, chosen[:, None]).squeeze(1).isfinite()  # the largest; NaN counts as larger than any
        if adjusted:
            assert self.adjustments is not None
            logits = self.adjustments.apply(raw, here, left, end_ids)
            chosen = logits.argmax(-1)
        if sampled:
            numbers = uniform(self.seeds[here], positions)
            drawn = sample(
                logits, self.temperature[here], self.top_p[here], self.top_k[here], self.min_p[here], numbers
            )
            chosen = torch.where(self.greedy[here], chosen, drawn)
        chosen = torch.where(finite, chosen, BROKEN)
        made = torch.where(live, chosen, NONE)
        if adjusted:
            assert self.adjustments is not None
            self.adjustments.record(raw, here, self.step, made)
        self.made[:, here].index_copy_(0, self.step, made[None])
        tokens.copy_(torch.where(live & finite, chosen, tokens))
        left.sub_(live.long())
        ended = (chosen[:, None] == end_ids).any(-1)
        live.logical_and_((left > 0) & ~ended & finite)
        self.step.add_(1)
