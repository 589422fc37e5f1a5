"""Tokens of one sequence become text as they arrive, up to a stop string."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

from ep_moe.engines.transformers.decoding.passes import Logprob
from ep_moe.serving.core import Leader, OnProgress
from ep_moe.serving.scheduler import STOP, Generation, Progress

_UNFINISHED = "\ufffd"  # what tokenizers make of bytes that are not a whole character (yet)
_MOST_HELD = 8  # tokens; no character has more bytes than 4

Tokenizer = Any  # of transformers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """New text of a sequence.

    Args:
        num_tokens: of the sequence so far. finish: "" while it goes on; else STOP or LENGTH.
        logprobs: (token, its log-probability) of the tokens since the last piece; prompt_logprobs: of the prompt's
            tokens but the first, in the first piece; both empty if not asked for.
        cached: tokens of the prompt that came from the prefix cache.
    """

    text: str
    num_tokens: int
    finish: str = ""
    logprobs: tuple[tuple[int, Logprob], ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    cached: int = 0


class TextStream:
    """Decodes the tokens of one sequence, and ends it at a stop string, which is not part of the text.

    Text is held back while it may be the beginning of a stop string, or of a character of several tokens.

    Args:
        prompt: the tokens that the sequence continues. They are not shown, but its text depends on them: a first space,
            or the rest of a character that they begin, which is shown whole. Empty for the answer of a chat.
        hidden: special tokens are part of the text, but for these; None leaves out all special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        hidden: Collection[int] | None = None,
    ) -> None:
        self._tokenizer, self._stops, self._hidden = tokenizer, tuple(stops), hidden
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is complete
        self._context = 0  # tokens before them that the decoding of the next ones depends on
        self._held = ""
        for token in self._end_of(prompt):
            self._tokens.append(token)
            self._decode()
        self._num_before = len(self._tokens)

    def _end_of(self, prompt: Sequence[int]) -> Sequence[int]:
        """The last tokens of a prompt, from the beginning of a character on: the next tokens complete it."""
        for first in range(max(len(prompt) - _MOST_HELD, 0), max(len(prompt) - 2 * _MOST_HELD, 0), -1):
            if any(_UNFINISHED not in self._text(prompt[first : first + size]) for size in (1, 2, 3, 4)):
                return prompt[first:]
        return prompt[-2 * _MOST_HELD :]

    @property
    def _num_new(self) -> int:
        return len(self._tokens) - self._num_before

    def push(self, tokens: Sequence[int], finish: str) -> Piece:
        """The text that is complete with these tokens. Nothing may be pushed after a piece with a `finish`."""
        text = ""
        for token in tokens:
            self._tokens.append(token)
            self._held += self._decode()
            place = self._stop_place()
            if place is not None:
                return Piece(text=text + self._held[:place], num_tokens=self._num_new, finish=STOP)
            text += self._release()
        if finish:
            self._held += self._decode(flush=True)
            place = self._stop_place()
            text, finish = text + self._held[:place], finish if place is None else STOP
        return Piece(text=text, num_tokens=self._num_new, finish=finish)

    def _text(self, tokens: Sequence[int]) -> str:
        # as it is: a clean-up of spaces would change text that has been shown
        if self._hidden:
            tokens = [token for token in tokens if token not in self._hidden]
        special = self._hidden is None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=special, clean_up_tokenization_spaces=False))

    def _decode(self, *, flush: bool = False) -> str:
        """The text of the tokens after the last shown one, "" while it ends within a character."""
        tokens = self._tokens
        before, now = self._text(tokens[self._context : self._shown]), self._text(tokens[self._context :])
        if now.endswith(_UNFINISHED) and not flush and len(tokens) - self._shown < _MOST_HELD:
            return ""
        if len(now) > len(before):  # a special token, without text, is no context
            self._context = self._shown
        self._shown = len(tokens)
        return now[len(before) :]

    def _stop_place(self) -> int | None:
        """Where in the held text the first stop string begins."""
        places = [self._held.find(stop) for stop in self._stops]
        return min((place for place in places if place >= 0), default=None)

    def _release(self) -> str:
        """Held text that cannot be the beginning of a stop string."""
        held = self._held
        keep = max(
            (
                size
                for stop in self._stops
                for size in range(min(len(stop) - 1, len(held)), 0, -1)
                if held.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


async def stream_texts(
    leader: Leader,
    generations: Sequence[Generation],
    texts: Sequence[TextStream],
    submitted: Callable[[], None] = lambda: None,
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Generate several sequences, and yield (index, piece) as text is complete; each one's last piece has a `finish`.

    If the iterator is closed or its task is cancelled, the rows of all sequences are freed.

    Args:
        texts: new ones, one for each generation. submitted: called when all are in the queue.
    Errors: those of `Leader.submit`, with the first piece; later NotFiniteError; ServerEndedError for a lost rank.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()

    def watcher(index: int) -> OnProgress:
        def on_progress(progress: Progress) -> None:  # in the thread of `Leader.run`
            loop.call_soon_threadsafe(found.put_nowait, (index, progress))

        return on_progress

    tickets: dict[int, int] = {}
    waiting: list[list[tuple[int, Logprob]]] = [[] for _ in generations]  # since the last piece
    prompts: list[tuple[Logprob, ...]] = [()] * len(generations)
    counts = [0] * len(generations)
    try:
        for index, generation in enumerate(generations):
            tickets[index] = leader.submit(generation, watcher(index))
        submitted()
        while tickets:
            index, progress = await found.get()
            if progress.error is not None:
                raise type(progress.error)(str(progress.error)) from progress.error
            if index not in tickets:
                continue  # tokens behind its stop string
            piece = texts[index].push(progress.tokens, progress.finish)
            if piece.finish:
                leader.cancel(tickets.pop(index))
            waiting[index] += zip(progress.tokens, progress.logprobs, strict=False)  # none, or one for each token
            prompts[index] += progress.prompt_logprobs
            if piece.text or piece.finish:
                new = tuple(waiting[index][: piece.num_tokens - counts[index]])
                piece = dataclasses.replace(piece, logprobs=new, prompt_logprobs=prompts[index], cached=progress.cached)
                counts[index], prompts[index] = piece.num_tokens, ()
                del waiting[index][: len(new)]
                yield index, piece
    finally:  # awaits nothing: a cancelled task may be cancelled again in any wait
        for ticket in tickets.values():
            leader.cancel(ticket)
