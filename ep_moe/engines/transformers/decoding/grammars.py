"""The grammars of a rank's rows: which tokens each may take next. Letters: V vocabulary, W words of 32 bits for V."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ep_moe.engines.transformers.decoding.passes import RowStart
from ep_moe.grammar import Compiler, Vocabulary


class RowGrammars:
    """Follows the grammars of rows, on the host.

    Args:
        tokenizer: of transformers. vocab_size: V. end_ids: tokens that end a sequence.
    Errors: ValueError for a tokenizer that grammars cannot be read with; ImportError without llguidance.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        vocabulary = Vocabulary(tokenizer)
        self._compiler, self._end = Compiler(vocabulary.text, vocabulary.end), vocabulary.end
        self._num_words, self._ends = -(-vocab_size // 32), end_ids
        self._matchers: dict[int, tuple[Any, Sequence[int]]] = {}  # by row, with the tokens that end it
        self._compiles = ThreadPoolExecutor(1, "ep_moe-grammars")
        self._prepared: dict[int, Future[Any]] = {}  # by row that has not begun
        self._kept: dict[int, tuple[Any, Sequence[int]]] = {}
        self._kept_prepared: dict[int, Future[Any]] = {}
        self._taken = collections.Counter[int]()  # tokens of each row since `keep`

    def __bool__(self) -> bool:
        """Whether a row has a grammar."""
        return bool(self._matchers)

    def prepare(self, start: RowStart) -> None:
        """Compile the grammar of a sequence that will begin, in a thread, unless it is compiled."""
        self.end([start.row])
        if start.sampling.grammar:
            kept = self._compiler.kept(start.sampling.grammar)
            if kept is None:
                self._prepared[start.row] = self._compiles.submit(self._compile, start.sampling.grammar)
            else:
                self._prepared[start.row] = Future()
                self._prepared[start.row].set_result(kept)

    def _compile(self, grammar: str) -> Any:
        matcher = self._compiler.matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one may take as long
        return matcher

    def is_ready(self, row: int) -> bool:
        """Whether `begin` waits for no compilation of a row that was prepared."""
        return row not in self._prepared or self._prepared[row].done()

    def keep(self) -> None:
        """Keep this state for `undo`."""
        self._kept, self._kept_prepared = dict(self._matchers), dict(self._prepared)
        self._taken.clear()

    def undo(self) -> None:
        """Go back to the state of the last `keep`."""
        for future in self._kept_prepared.values():
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().reset()  # its row may have begun since
        self._matchers, self._prepared = dict(self._kept), dict(self._kept_prepared)
        for row, (matcher, _) in self._matchers.items():
            if self._taken[row]:
                matcher.rollback(self._taken[row])
        self._taken.clear()

    def begin(self, start: RowStart) -> torch.Tensor | None:
        """The mask of a sequence's next token, [W] int32, a bit for each token; None without a grammar."""
        prepared = self._prepared.pop(start.row, None)
        self.drop([start.row])
        if not start.sampling.grammar:
            return None
        matcher = self._compiler.matcher(start.sampling.grammar) if prepared is None else prepared.result()
        for token in start.made:
            matcher.consume_token(token)
        self._matchers[start.row] = matcher, () if start.sampling.ignore_end else self._ends
        mask, _ = self._next(start.row)
        return torch.zeros(self._num_words, dtype=torch.int32, device="cpu") if mask is None else mask

    def drop(self, rows: Iterable[int]) -> None:
        """Forget rows that have ended, of those that have begun."""
        for row in rows:
            self._matchers.pop(row, None)

    def end(self, rows: Sequence[int]) -> None:
        """Forget rows that have ended, or will not begin."""
        self.drop(rows)
        for row in rows:
            if prepared := self._prepared.pop(row, None):
                prepared.cancel()

    def follow(self, tokens: Mapping[int, int]) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
        """Go on by the rows' new tokens, negative ones for none.

        Returns: the masks of their next tokens; and, of the rows that end, "" for a complete text, else what is wrong.
        """
        masks, ended = {}, {}
        for row in [row for row in self._matchers if row in tokens]:
            token, (matcher, ends) = tokens[row], self._matchers[row]
            if token < 0 or token in ends:
                del self._matchers[row]
                continue
            matcher.consume_token(token)
            self._taken[row] += matcher is self._kept.get(row, (None,))[0]
            mask, why = self._next(row)
            if mask is None:
                ended[row] = why
                del self._matchers[row]
            else:
                masks[row] = mask
        return masks, ended

    def _next(self, row: int) -> tuple[torch.Tensor | None, str]:
        """The mask of a row's next token, None if it has none; then why: "" for a complete text."""
        matcher, ends = self._matchers[row]
        if matcher.is_error():
            return None, str(matcher.get_error())
        if matcher.is_stopped():
            return None, ""
        words = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        if matcher.is_error():
            return None, str(matcher.get_error())
        may_end = _has(words, self._end)
        _set(words, self._end, False)
        mask = torch.zeros(self._num_words, dtype=torch.int32, device="cpu")
        size = min(len(words), self._num_words)
        mask[:size] = words[:size]
        for token in ends:  # one that is also text ends a sequence, and so may come only where the grammar ends
            _set(mask, token, False)
        if not bool(mask.any()):
            return None, "" if may_end else "no token of the model continues it"
        for token in ends if may_end else ():
            _set(mask, token, True)
        return mask, ""


def _has(words: torch.Tensor, token: int) -> bool:
    return bool(int(words[token // 32]) >> token % 32 & 1)


def _set(words: torch.Tensor, token: int, value: bool) -> None:
    bit = 1 << token % 32
    if token % 32 == 31:
        bit -= 1 << 32  # int32
    old = int(words[token // 32])
    words[token // 32] = old | bit if value else old & ~bit
