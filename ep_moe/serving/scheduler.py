"""Which sequences run where and when: a queue of generations becomes plans, and the ranks' tokens become progress.

Plain data and no waiting: the leader asks for plans, all ranks carry them out, the leader returns their tokens in the
same order. A plan may be made before the tokens of the last one are there: a sequence that ends meanwhile gets none.
Ranks may come and go (`Scheduler.regroup`): a sequence of a lost rank starts again elsewhere behind its tokens so far.
Generations start in the order of their submission, on the rank with the fewest sequences. A prefill is one pass of at
most M tokens of each rank. Longer prompts are prefilled in chunks, in turns, and new prompts start between two chunks.
Prefills alternate with decode passes, so that sequences that run wait for one chunk at most; if none ran before a
prefill, another one may follow.
Letters: P prompt tokens, N new tokens, M max_tokens_per_rank, R ranks.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from ep_moe.balance import ModelSizes
from ep_moe.engines.transformers.decoding.adjust import MOST_LOGPROBS, MOST_PROMPT_LOGITS
from ep_moe.engines.transformers.decoding.finite import not_finite
from ep_moe.engines.transformers.decoding.fixed_cache import BLOCK
from ep_moe.engines.transformers.decoding.passes import (
    Logprob,
    RowsMade,
    RowsPlan,
    RowStart,
    Sampling,
    Shape,
    bucket_of,
    pass_shape,
)
from ep_moe.engines.transformers.decoding.sequences import BROKEN, MOST_END_IDS, NONE
from ep_moe.fields import shown
from ep_moe.placement import Placement
from ep_moe.serving.prefixes import PrefixBlocks

STOP, LENGTH = "stop", "length"  # why a sequence has ended: its end token or its grammar's end, or max_new_tokens
MOST_SEED = 2**63


class BadRequestError(ValueError):
    """A generation that cannot be served; the message names the value and the limit.

    Args:
        param: the parameter at fault, as OpenAI's API calls it, if it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """The queue is at its limit."""


class NotFiniteError(RuntimeError):
    """A generation that ended because the model's logits were not finite."""


class GrammarError(RuntimeError):
    """A generation that ended because its grammar cannot be followed further."""


class PrefillError(RuntimeError):
    """A generation with which two ranks failed by the same error when it began."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A sequence that a client asks for; fields as in `RowStart`. max_new_tokens None: as many as fit.

    Args:
        made: its tokens so far, if it has lost its row. num_known: log-probabilities of its prompt that have been told.
        failed: the error of the rank that has failed in its prefill, if it has lost its row so.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int | None = None
    sampling: Sampling = Sampling()
    made: tuple[int, ...] = ()
    num_known: int = 0
    failed: str = ""

    def start(self, row: int, prefix: tuple[int, ...]) -> RowStart:
        """Its start in a row of a rank."""
        assert self.max_new_tokens is not None
        sampling = self.sampling
        if self.made and sampling.prompt_logprobs is not None:  # which have all been told
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return RowStart(
            row=row,
            prompt=self.prompt + self.made,
            max_new_tokens=self.max_new_tokens - len(self.made),
            sampling=sampling,
            prefix=prefix,
            num_made=len(self.made),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """New tokens of a sequence, the end token included.

    Args:
        logprobs: of these tokens, if asked for. prompt_logprobs: of the prompt's tokens but the first, if asked for: as
            they are computed, before the first new token or with it.
        cached: tokens of the prompt that came from the prefix cache.
        finish: "" while it goes on; else STOP or LENGTH.
        error: what ended it instead, with `finish` "": NotFiniteError, GrammarError, PrefillError, or what ended all.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    cached: int = 0
    finish: str = ""
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a server can do at once.

    Args:
        num_ranks: R. num_rows: sequences of one rank. num_positions: P + N of a sequence.
        max_prefill_tokens: M, of all prompts in one prefill of a rank. max_waiting: generations without a row.
        passes_per_plan: the most decode passes per scheduling step.
        vocab_size: of the model's input embedding. end_ids: tokens that end a sequence.
        placements: which rank has which expert, by MoE layer; sizes: of the model. Of what is reported about load.
        no_grammars: why sequences cannot have a grammar, "" if they can.
        prefix_blocks: of the prefix cache of each rank, 0 for none.
    """

    num_ranks: int
    num_rows: int
    num_positions: int
    max_prefill_tokens: int
    max_waiting: int
    passes_per_plan: int
    vocab_size: int
    end_ids: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    sizes: ModelSizes | None = None
    no_grammars: str = ""
    prefix_blocks: int = 0

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt."""
        return self.num_positions - 1

    @property
    def logprob_tokens(self) -> int:
        """The most tokens in a prefill of a rank, if the log-probabilities of a prompt in it are asked for."""
        return min(self.max_prefill_tokens, max(MOST_PROMPT_LOGITS // self.vocab_size, 1))


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Sequence:
    ticket: int
    rank: int
    start: RowStart
    generation: Generation
    num_filled: int = 0  # tokens of the prompt in the cache once the plans in progress are carried out
    made: list[int] = dataclasses.field(default_factory=list)
    num_coming: int = 0  # new tokens of the plans in progress, unless it ends before
    num_prompt_logprobs: int = 0  # that its prefill has made so far

    @property
    def left(self) -> int:
        """New tokens that are wanted and not planned."""
        return self.start.max_new_tokens - len(self.made) - self.num_coming

    @property
    def decodes(self) -> bool:
        """Whether it takes part in the next decode passes. A rank compiles its grammar before the first token, however
        many are planned."""
        return not self.to_fill and (self.left > 0 or (bool(self.start.sampling.grammar) and not self.made))

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation that are in the cache or are next, once the plans in progress are carried
        out."""
        return self.num_filled + len(self.made) + self.num_coming

    @property
    def to_fill(self) -> int:
        """Tokens of the prompt that are left for later prefills."""
        return len(self.start.prompt) - self.num_filled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A plan in progress. parts: who gets tokens, in which column, and how many at most."""

    plan: RowsPlan
    parts: list[tuple[_Sequence, int, int]]


class _Prefill:
    """The chunks of one rank in a prefill: a rectangle of rows and of as many columns as the largest has tokens."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._whole = False  # whether logits of all tokens are wanted
        self.chunks: list[tuple[_Sequence, int]] = []

    def room(self, sampling: Sampling) -> int:
        """The most tokens of one more row: any number for the first, then one that keeps the rectangle within M."""
        whole = self._whole or sampling.prompt_logprobs is not None
        most = self._limits.logprob_tokens if whole else self._limits.max_prefill_tokens
        room = most // (len(self.chunks) + 1)
        return room if max((size for _, size in self.chunks), default=0) <= room else 0

    def takes(self, sampling: Sampling, num_tokens: int) -> bool:
        """Whether so many tokens of a prompt, or its first chunk of them if there is no other row, fit."""
        return not self.chunks or num_tokens <= self.room(sampling)

    def add(self, sequence: _Sequence) -> None:
        """Take what is left of a sequence's prompt, or the next chunk of it."""
        size = min(sequence.to_fill, self.room(sequence.start.sampling))
        self._whole |= sequence.start.sampling.prompt_logprobs is not None
        sequence.num_filled += size
        self.chunks.append((sequence, size))


class Scheduler:
    """The queue and the rows of all ranks. Not safe for several threads."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tickets = itertools.count()
        self._waiting: collections.OrderedDict[int, tuple[Generation, float]] = collections.OrderedDict()
        self.waits: list[float] = []  # seconds in the queue of sequences that got a row since this was cleared
        self._rows: list[list[_Sequence | None]] = [[None] * limits.num_rows for _ in range(limits.num_ranks)]
        self._prefixes = [PrefixBlocks(limits.prefix_blocks) for _ in self._rows]
        # place in the prefix cache -> (row, block of it), for the next plan
        self._saves: list[dict[int, tuple[int, int]]] = [{} for _ in self._rows]
        self._ended: list[set[int]] = [set() for _ in range(limits.num_ranks)]  # rows the ranks have not yet ended
        self._filling: list[list[_Sequence]] = [[] for _ in self._rows]  # prompts in chunks, the next one first
        self._new_first = [True] * limits.num_ranks  # whether new prompts precede those in the next prefill
        self._planned: collections.deque[_Planned] = collections.deque()
        self._delays = False  # whether sequences that ran have waited since their last plan, for a prefill
        self._seats = tuple(range(limits.num_ranks))  # the ranks that take part; an entry of each plan for each

    @property
    def num_waiting(self) -> int:
        """Generations without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return sum(1 for _ in self._running())

    @property
    def may_start(self) -> bool:
        """Whether a generation that is submitted now may start with the next plan."""
        return not (self._delays and any(self._decoding())) and any(None in self._rows[rank] for rank in self._seats)

    @property
    def decodes(self) -> bool:
        """Whether sequences want tokens that are not planned."""
        return any(self._decoding())

    def usage(self, rank: int) -> tuple[int, int]:
        """Rows of a rank that have a sequence, and the positions that these have filled."""
        live = [row for row in list(self._rows[rank]) if row is not None]
        return len(live), sum(sequence.length - sequence.num_coming for sequence in live)

    def prefix_tokens(self, rank: int) -> int:
        """Tokens in the prefix cache of a rank."""
        return self._prefixes[rank].num_tokens

    def _running(self) -> Iterator[_Sequence]:
        return (sequence for rows in self._rows for sequence in rows if sequence is not None)

    def _decoding(self) -> Iterator[_Sequence]:
        """Sequences of the next decode passes."""
        return (sequence for sequence in self._running() if sequence.decodes)

    def submit(self, generation: Generation) -> int:
        """Queue a generation; returns its ticket.

        Errors: BadRequestError, QueueFullError name the value and the limit.
        """
        limits, most = self._limits, self.most_new_tokens(generation.prompt)
        wanted = most if generation.max_new_tokens is None else generation.max_new_tokens
        if wanted > most:
            raise BadRequestError(
                f"a prompt of {len(generation.prompt)} tokens and max_tokens ({wanted}) exceed the "
                f"{limits.num_positions} positions of a sequence; the most for this prompt is {most}",
                "max_tokens",
            )
        if wanted < 1:
            raise BadRequestError(f"max_tokens ({wanted}) must be at least 1", "max_tokens")
        self._check_sampling(generation.sampling, wanted)
        if len(self._waiting) >= limits.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} generations wait already, the limit is {limits.max_waiting}")
        ticket = next(self._tickets)
        self._waiting[ticket] = dataclasses.replace(generation, max_new_tokens=wanted), time.monotonic()
        return ticket

    def _check_sampling(self, sampling: Sampling, wanted: int) -> None:
        """Raise BadRequestError for what the ranks' tensors cannot take; the rest is checked where it is read."""
        limits = self._limits
        if not -MOST_SEED <= sampling.seed < MOST_SEED:
            raise BadRequestError(f"seed ({sampling.seed}) is not a number of 64 bits", "seed")
        if not 0 <= sampling.min_tokens <= wanted:
            raise BadRequestError(
                f"min_tokens ({shown(sampling.min_tokens)}) must be in [0, {wanted}], up to max_tokens", "min_tokens"
            )
        if len(sampling.stop_ids) > MOST_END_IDS:
            count = len(sampling.stop_ids)
            raise BadRequestError(f"stop_token_ids has {count} tokens, the limit is {MOST_END_IDS}", "stop_token_ids")
        for name, tokens in (("stop_token_ids", sampling.stop_ids), ("logit_bias", dict(sampling.logit_bias))):
            for token in tokens:
                if not 0 <= token < limits.vocab_size:
                    raise BadRequestError(f"{name} has token {token}, tokens are in [0, {limits.vocab_size})", name)
        for name, asked in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
                raise BadRequestError(f"{name} ({asked}) must be in [0, {MOST_LOGPROBS}]", name)

    def most_new_tokens(self, prompt: Sequence[int]) -> int:
        """The most new tokens after a prompt, 1 or more. Errors: BadRequestError for a prompt that is not served."""
        limits, length = self._limits, len(prompt)
        if not length:
            raise BadRequestError("the prompt has no tokens", "prompt")
        if length > limits.longest_prompt:
            raise BadRequestError(f"the prompt has {length} tokens, the limit is {limits.longest_prompt}", "prompt")
        unknown = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
        if unknown is not None:
            raise BadRequestError(
                f"the prompt has token {shown(unknown)}, tokens are in [0, {limits.vocab_size})", "prompt"
            )
        return limits.num_positions - length

    def cancel(self, ticket: int) -> bool:
        """End a generation before its last token; False if it has ended already."""
        if self._waiting.pop(ticket, None) is not None:
            return True
        for sequence in self._running():
            if sequence.ticket == ticket:
                self._end(sequence)
                self._ended[sequence.rank].add(sequence.start.row)
                return True
        return False

    def _end(self, sequence: _Sequence) -> None:
        """Free a sequence's row."""
        self._keep(sequence)
        self._leave_row(sequence)

    def _leave_row(self, sequence: _Sequence) -> None:
        self._rows[sequence.rank][sequence.start.row] = None
        if sequence in self._filling[sequence.rank]:
            self._filling[sequence.rank].remove(sequence)

    def _keep(self, sequence: _Sequence) -> None:
        """Have the prefix cache take a sequence whose logits were finite. Its last token has not been computed yet."""
        if sequence.made and self._limits.prefix_blocks:
            rank, row = sequence.rank, sequence.start.row
            new = self._prefixes[rank].add((*sequence.start.prompt, *sequence.made[:-1]))
            self._saves[rank] |= {place: (row, index) for index, place in new}

    def next_plan(self) -> RowsPlan | None:
        """What the ranks do next; None if nothing is left to plan. For each plan comes a `take`, in order."""
        decoding = list(self._decoding())
        starts: list[list[RowStart]] = [[] for _ in self._rows]
        chunks = [] if decoding and self._delays else self._choose(starts)
        prefills = any(each.chunks for each in chunks)
        self._delays = prefills and bool(decoding)
        if not prefills and not decoding:
            return None
        saves: tuple[tuple[tuple[int, int, int], ...], ...] = ()
        if any(self._saves):
            saves = tuple(tuple((*block, place) for place, block in self._saves[rank].items()) for rank in self._seats)
            self._saves = [{} for _ in self._rows]
        ended = tuple(tuple(sorted(self._ended[rank])) for rank in self._seats)
        self._ended = [set() for _ in self._ended]
        new = tuple(tuple(starts[rank]) for rank in self._seats)
        if prefills:
            sizes = tuple(tuple((seq.start.row, size) for seq, size in chunks[rank].chunks) for rank in self._seats)
            return self._plan(
                RowsPlan(saves=saves, ended=ended, starts=new, chunks=sizes),
                [
                    (seq, place, 0 if seq.to_fill else 1)
                    for each in chunks
                    for place, (seq, _) in enumerate(each.chunks)
                ],
            )
        passes = min(self._limits.passes_per_plan, max(1, *(sequence.left for sequence in decoding)))
        shapes = tuple(self._shape(self._rows[rank], passes) for rank in self._seats)
        return self._plan(
            RowsPlan(saves=saves, ended=ended, starts=new, passes=passes, shapes=shapes),
            [(sequence, sequence.start.row, min(passes, sequence.left)) for sequence in decoding],
        )

    def _plan(self, plan: RowsPlan, parts: list[tuple[_Sequence, int, int]]) -> RowsPlan:
        self._planned.append(_Planned(plan=plan, parts=parts))
        for sequence, _, count in parts:
            sequence.num_coming += count
        return plan

    def _shape(self, rows: Sequence[_Sequence | None], passes: int) -> Shape:
        """Of decode passes for the rows whose prompts are complete. Others among them take part: a pass stores
        something at their next position."""
        decoding = [each for each in rows if each is not None and each.decodes]
        num_rows = max((sequence.start.row + 1 for sequence in decoding), default=0)
        taking_part = [sequence for sequence in rows[: bucket_of(num_rows)] if sequence is not None]
        positions = max((each.length + min(passes, each.left) for each in taking_part), default=0)
        return pass_shape(
            num_rows,
            positions,
            any(sequence.start.sampling.temperature > 0 for sequence in decoding),
            any(sequence.start.sampling.adjusted for sequence in decoding),
        )

    def _choose(self, starts: list[list[RowStart]]) -> list[_Prefill]:
        """The chunks of the next prefill, of each rank; generations that get rows are added to `starts`."""
        prefills = [_Prefill(self._limits) for _ in self._rows]
        for rank, prefill in enumerate(prefills):
            if not self._new_first[rank]:
                self._continue(rank, prefill)
        self._admit(prefills, starts)
        for rank, prefill in enumerate(prefills):
            self._new_first[rank] = not starts[rank]
            self._continue(rank, prefill)
        return prefills

    def _continue(self, rank: int, prefill: _Prefill) -> None:
        """Add chunks of prompts that have rows; those that are not complete wait for their next turn."""
        filling = self._filling[rank]
        taken = [sequence for sequence, _ in prefill.chunks]
        for sequence in [each for each in filling if each not in taken]:
            if prefill.takes(sequence.start.sampling, sequence.to_fill):
                prefill.add(sequence)
                filling.remove(sequence)
                if sequence.to_fill:
                    filling.append(sequence)

    def _admit(self, prefills: Sequence[_Prefill], starts: list[list[RowStart]]) -> None:
        """Give rows to generations from the head of the queue, as many as one prefill of each rank takes."""
        while self._waiting:
            ticket, (generation, since) = next(iter(self._waiting.items()))
            found = self._place(generation, prefills)
            if found is None:
                break
            rank, prefix = found
            start = generation.start(self._rows[rank].index(None), prefix)
            sequence = _Sequence(
                ticket=ticket, rank=rank, start=start, generation=generation, num_filled=len(prefix) * BLOCK
            )
            self._rows[rank][start.row] = sequence
            prefills[rank].add(sequence)
            if sequence.to_fill:
                self._filling[rank].append(sequence)
            starts[rank].append(start)
            del self._waiting[ticket]
            if not generation.made:
                self.waits.append(time.monotonic() - since)

    def _place(self, generation: Generation, prefills: Sequence[_Prefill]) -> tuple[int, tuple[int, ...]] | None:
        """The rank for a generation, and the blocks of its prompt there; None if no rank can take it now."""
        free = [rank for rank in self._seats if None in self._rows[rank]]
        prefixes = {rank: self._prefix(rank, generation) for rank in free}
        num_running = {rank: sum(row is not None for row in self._rows[rank]) for rank in free}
        for rank in sorted(free, key=lambda rank: (num_running[rank], -len(prefixes[rank]))):
            left = len(generation.prompt) + len(generation.made) - len(prefixes[rank]) * BLOCK
            if prefills[rank].takes(generation.sampling, left):
                return rank, prefixes[rank]
        return None

    def _prefix(self, rank: int, generation: Generation) -> tuple[int, ...]:
        """The blocks of a prompt that a rank has. Its last token is computed in any case, and so are all whose
        log-probabilities are asked for."""
        if generation.sampling.prompt_logprobs is not None and not generation.made:
            return ()
        return tuple(self._prefixes[rank].find((generation.prompt + generation.made)[:-1]))

    def take(self, made: Sequence[RowsMade]) -> list[tuple[int, Progress]]:
        """What the oldest plan in progress has made, by rank; returns (ticket, progress) pairs."""
        return self._take(self._planned.popleft(), dict(zip(self._seats, made, strict=True)))

    def _take(
        self, planned: _Planned, made: Mapping[int, RowsMade], spoilt: "list[_Sequence] | None" = None
    ) -> list[tuple[int, Progress]]:
        """What some ranks have made of a plan.

        Args:
            spoilt: for sequences that may have numbers of a rank that has failed in this plan; it had no others.
        """
        found = []
        for sequence, column, count in planned.parts:
            rank, row = sequence.rank, sequence.start.row
            if rank not in made:
                continue
            sequence.num_coming -= count
            if self._rows[rank][row] is not sequence:
                continue  # it has ended meanwhile
            new = tuple(step[column] for step in made[rank].tokens if step[column] != NONE)
            # a failed rank sends NaN, of which a chunk that is not the prompt's last has stored keys and values
            if spoilt is not None and (BROKEN in new or (planned.plan.chunks and not count)):
                self._leave_row(sequence)
                self._ended[rank].add(row)
                spoilt.append(sequence)
                continue
            if BROKEN in new:
                sequence.made.clear()  # nothing of it is kept
                self._end(sequence)
                found.append((sequence.ticket, Progress(error=NotFiniteError(not_finite()))))
                continue
            first = bool(new) and not sequence.made
            sequence.made += new
            why = made[rank].ended.get(column)
            ends = why == "" or (bool(new) and new[-1] in self._ends(sequence))
            is_whole = len(sequence.made) == sequence.start.max_new_tokens
            finish = STOP if ends else LENGTH if is_whole else ""
            if why and not finish:
                self._end(sequence)
                found.append((sequence.ticket, Progress(error=GrammarError(f"the grammar cannot be followed: {why}"))))
                continue
            if finish:
                self._end(sequence)
            elif first:
                self._keep(sequence)
            logprobs = tuple(made[rank].logprobs.get(column, ())[: len(new)])
            prompt = tuple(made[rank].prompts.get(column, ()))
            told = max(sequence.generation.num_known - sequence.num_prompt_logprobs, 0)
            sequence.num_prompt_logprobs += len(prompt)
            prompt = prompt[told:]
            if new or prompt:
                cached = 0 if sequence.generation.made else len(sequence.start.prefix) * BLOCK
                progress = Progress(tokens=new, logprobs=logprobs, prompt_logprobs=prompt, cached=cached, finish=finish)
                found.append((sequence.ticket, progress))
        return found

    def regroup(
        self,
        seats: Sequence[int],
        answers: Mapping[int, Sequence[RowsMade]],
        forgotten: Mapping[int, Collection[int]] = {},
        errors: Mapping[int, str] = {},
    ) -> tuple[list[tuple[int, Progress]], int]:
        """Go on with other ranks.

        A rank that stays keeps its sequences. Those of other ranks wait at the head of the queue and go on elsewhere,
        with their tokens so far as a part of their prompt.

        Args:
            seats: the ranks from now on, as numbered by the limits, ascending.
            answers: of those among them that stay: what the oldest plans in progress have made there. The other plans
                in progress have had no effect but to the prefix cache, and are made anew. Of a plan that not all have
                carried out, numbers that are not finite are taken for those of a rank that has failed in it.
            forgotten: rows of the same ranks that have lost their keys and values.
            errors: of ranks that have failed. A sequence that was in a prefill of two with the same one ends by it: it
                may be its cause, and would take the next rank along.
        Returns: as `take`, from these answers; and how many sequences have lost their row.
        """
        found, plans, lost = [], list(self._planned), list[_Sequence]()
        self._planned.clear()
        for index, planned in enumerate(plans):
            made = {rank: each[index] for rank, each in answers.items() if index < len(each)}
            found += self._take(planned, made, None if len(made) == len(self._seats) else lost)
        for index, planned in enumerate(plans):
            for place, rank in enumerate(self._seats):
                if index >= len(answers.get(rank, plans)):
                    lost += self._undo(planned, place, rank)
        for rank, rows in forgotten.items():
            gone = [each for row in rows if (each := self._rows[rank][row]) is not None]
            for sequence in gone:
                self._leave_row(sequence)
            lost += gone
        for rank in {*range(len(self._rows))} - answers.keys():
            lost += [sequence for sequence in self._rows[rank] if sequence is not None]
            self._rows[rank] = [None] * self._limits.num_rows
            self._forget(rank)
            self._ended[rank], self._filling[rank] = set(), []
        self._seats, self._delays = tuple(seats), True  # all have waited
        prefilled = {sequence for planned in plans if planned.plan.chunks for sequence, *_ in planned.parts}
        again = {}
        for sequence in lost:
            error = errors.get(sequence.rank, "") if sequence in prefilled else ""
            if error and error == sequence.generation.failed:
                found.append((sequence.ticket, Progress(error=PrefillError(f"two ranks failed with it: {error}"))))
            else:
                again[sequence.ticket] = self._unfinished(sequence, error), time.monotonic()
        self._waiting = collections.OrderedDict({**dict(sorted(again.items())), **self._waiting})
        return found, len(again)

    def _undo(self, planned: _Planned, place: int, rank: int) -> list[_Sequence]:
        """Take back a plan that a rank has not carried out; returns the sequences that it would have begun."""
        plan, rows, filling = planned.plan, self._rows[rank], self._filling[rank]
        for sequence, column, count in planned.parts:
            if sequence.rank == rank:
                sequence.num_coming -= count
                sequence.num_filled -= plan.chunks[place][column][1] if plan.chunks else 0
                if sequence.to_fill and rows[sequence.start.row] is sequence and sequence not in filling:
                    filling.append(sequence)
        self._ended[rank] |= {*plan.ended[place]}
        if plan.saves and plan.saves[place]:  # it is not known whether the rank has copied these blocks
            self._forget(rank)
        begun = [each for start in plan.starts[place] if (each := rows[start.row]) is not None and each.start is start]
        for sequence in begun:
            rows[sequence.start.row] = None
            filling.remove(sequence)
        return begun

    def _forget(self, rank: int) -> None:
        """Empty the prefix cache of a rank."""
        self._prefixes[rank], self._saves[rank] = PrefixBlocks(self._limits.prefix_blocks), {}

    @staticmethod
    def _unfinished(sequence: _Sequence, failed: str) -> Generation:
        """What is left of a sequence that has lost its row."""
        before, known = sequence.generation, sequence.num_prompt_logprobs
        made = before.made + tuple(sequence.made)
        return dataclasses.replace(before, made=made, num_known=max(before.num_known, known), failed=failed)

    def _ends(self, sequence: _Sequence) -> tuple[int, ...]:
        sampling = sequence.start.sampling
        return sampling.stop_ids if sampling.ignore_end else self._limits.end_ids + sampling.stop_ids
