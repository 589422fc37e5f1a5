"""What some sequences ask for besides a token: penalties, biases, a least length, a grammar, log-probabilities.

Passes compute it for all their rows if one of them asks; for the others the adjustments change no bit of a logit.
Letters: B rows, V vocabulary, W words of 32 bits for V, E end tokens of a row.
"""

from collections.abc import Mapping, Sequence

import torch

from ep_moe.engines.transformers.decoding.passes import Logprob, RowStart

MOST_LOGPROBS = 20
MOST_PROMPT_LOGITS = 2**27  # of the prompts of one prefill, if the log-probabilities of one of them are asked for
_CHUNK = 128  # prompt positions whose log-probabilities are computed at a time


class Adjustments:
    """The state of each row's adjustments, in tensors on the device, and the log-probabilities of the last passes.

    Args:
        rows: B. steps: number of passes whose log-probabilities are kept. vocab_size: V.
    """

    def __init__(self, rows: int, steps: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)  # in the prompt or since
        self._counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)  # since the prompt
        self._bias = torch.zeros(rows, vocab_size, device=device)
        # repetition, presence and frequency penalty, [3, B]
        self._penalties = torch.tensor([1.0, 0.0, 0.0], device="cpu").to(device)[:, None].repeat(1, rows)
        # the tokens that a row's grammar allows, a bit each
        self._allowed = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._bits = torch.arange(32, dtype=torch.int32, device=device)
        self._may_end = torch.zeros(rows, dtype=torch.int64, device=device)  # once so few new tokens are left
        self._top = min(MOST_LOGPROBS, vocab_size)
        self._values = torch.zeros(steps, rows, self._top + 1, device=device)  # of the token, then of the likeliest
        self._tokens = torch.zeros(steps, rows, self._top + 1, dtype=torch.int64, device=device)  # its rank, then those

    @property
    def state(self) -> list[torch.Tensor]:
        """What passes change."""
        return [self._seen, self._counts, self._allowed]

    def begin(self, starts: Sequence[RowStart]) -> None:
        """Set the state of sequences in consecutive rows before their next token. Local, no host sync."""
        here = slice(starts[0].row, starts[0].row + len(starts))
        for tensor in (self._seen, self._counts, self._bias):
            tensor[here].zero_()
        self._allowed[here].fill_(-1)
        each = [start.sampling for start in starts]
        penalties = [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for s in each]
        self._penalties[:, here].copy_(torch.tensor(penalties, device="cpu").T, non_blocking=True)
        may_end = [start.max_new_tokens + start.num_made - start.sampling.min_tokens for start in starts]
        self._may_end[here].copy_(torch.tensor(may_end, device="cpu"), non_blocking=True)
        device = self._bias.device
        for start in starts:
            if start.sampling.repetition_penalty != 1:
                prompt = torch.tensor(start.prompt, device="cpu").to(device, non_blocking=True)
                self._seen[start.row].index_fill_(0, prompt, True)
            if start.num_made:
                made = torch.tensor(start.made, device="cpu").to(device, non_blocking=True)
                self._counts[start.row].index_add_(0, made, torch.ones_like(made, dtype=torch.int32))
            if start.sampling.logit_bias:
                tokens, values = zip(*start.sampling.logit_bias, strict=True)
                place = torch.tensor(tokens, device="cpu").to(device, non_blocking=True)
                added = torch.tensor(values, device="cpu", dtype=torch.float32).to(device, non_blocking=True)
                self._bias[start.row].index_copy_(0, place, added)

    def allow(self, masks: Mapping[int, torch.Tensor]) -> None:
        """Set the tokens that rows may take next, [W] int32 each on the host, until the next call. Local."""
        for row, mask in masks.items():
            self._allowed[row].copy_(mask)

    def apply(self, logits: torch.Tensor, here: slice, left: torch.Tensor, end_ids: torch.Tensor) -> torch.Tensor:
        """The adjusted logits of the rows `here`, [B', V] float32.

        Args:
            logits: [B', V] float32. left: [B'], new tokens still wanted. end_ids: [B', E], -1 for none.
        """
        repetition, presence, frequency = self._penalties[:, here, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        counts = self._counts[here]
        logits = torch.where(self._seen[here], repeated, logits) - frequency * counts - presence * (counts > 0)
        banned = (left > self._may_end[here])[:, None] & (end_ids >= 0)
        added = torch.zeros_like(end_ids, dtype=torch.float32).masked_fill(banned, float("-inf"))
        allowed = (self._allowed[here, :, None] >> self._bits & 1).flatten(1)[:, : logits.shape[1]]
        logits = (logits + self._bias[here]).masked_fill(allowed == 0, float("-inf"))
        longer = logits.scatter_add(1, end_ids.clamp(min=0), added)
        # a grammar may go on by no other token
        return torch.where(longer.amax(1, keepdim=True) == float("-inf"), logits, longer)

    def record(self, logits: torch.Tensor, here: slice, step: torch.Tensor, chosen: torch.Tensor) -> None:
        """Count the chosen tokens, and keep their log-probabilities for `read`.

        Args:
            logits: [B', V] float32, before adjustments. step: [1]. chosen: [B'], negative for no token.
        """
        new, found = (chosen >= 0)[:, None], chosen.clamp(min=0)[:, None]
        self._counts[here].scatter_add_(1, found, new.int())
        self._seen[here].scatter_(1, found, self._seen[here].gather(1, found) | new)
        values, tokens = _logprobs(logits, found, self._top)
        self._values[:, here].index_copy_(0, step, values[None])
        self._tokens[:, here].index_copy_(0, step, tokens[None])

    def read(self, passes: int, wanted: dict[int, int]) -> dict[int, list[Logprob]]:
        """The log-probabilities of the last passes of rows, with so many of the likeliest tokens each. Host sync."""
        values, tokens = self._values[:passes].tolist(), self._tokens[:passes].tolist()
        return {
            row: [_logprob(values[index][row], tokens[index][row], count) for index in range(passes)]
            for row, count in wanted.items()
        }


def prompt_logprobs(logits: torch.Tensor, prompt: Sequence[int], count: int) -> list[Logprob]:
    """The log-probabilities of a prompt's tokens but the first, with `count` of the likeliest ones each. Host sync.

    Args:
        logits: [P, V] of the prompt's positions, in any dtype.
    """
    tokens = torch.tensor(prompt[1:], device="cpu").to(logits.device)[:, None]
    found: list[Logprob] = []
    for first in range(0, len(prompt) - 1, _CHUNK):
        chunk = tokens[first : first + _CHUNK]
        some = logits[first : first + len(chunk)].float()
        values, places = _logprobs(some, chunk, min(MOST_LOGPROBS, some.shape[1]))
        found += map(_logprob, values.tolist(), places.tolist(), [count] * len(chunk))
    return found


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tokens [B, 1]: their log-probability and those of the `top` likeliest, [B, 1 + top]; their rank and those."""
    values = logits.log_softmax(-1)
    mine = values.gather(1, tokens)
    likeliest = values.topk(top, -1)
    rank = (values > mine).sum(-1, keepdim=True) + 1
    return torch.cat([mine, likeliest.values], 1), torch.cat([rank, likeliest.indices], 1)


def _logprob(values: list[float], tokens: list[int], count: int) -> Logprob:
    top = tuple(zip(tokens[1 : count + 1], values[1 : count + 1], strict=True))
    return Logprob(value=values[0], rank=tokens[0], top=top)
