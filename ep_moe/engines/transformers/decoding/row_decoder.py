"""Carries out a rank's part of plans: sequences that start, go on in chunks and passes, and end at any time."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ep_moe.balance.reports import status_entries
from ep_moe.engines.transformers.decoding.adjust import MOST_PROMPT_LOGITS, prompt_logprobs
from ep_moe.engines.transformers.decoding.decoder import Chunk, Decoder
from ep_moe.engines.transformers.decoding.finite import check_finite, first_not_finite
from ep_moe.engines.transformers.decoding.fixed_cache import BLOCK, windows_of
from ep_moe.engines.transformers.decoding.grammars import RowGrammars
from ep_moe.engines.transformers.decoding.options import GenerationOptions
from ep_moe.engines.transformers.decoding.passes import (
    Logprob,
    RowsMade,
    RowsPlan,
    RowStart,
    Sampling,
    Shape,
    all_shapes,
    pass_shape,
)
from ep_moe.engines.transformers.decoding.sequences import NONE
from ep_moe.engines.transformers.hooks import Model, Session
from ep_moe.engines.transformers.regrouping import Rehearsal
from ep_moe.layer.warmup import row_counts
from ep_moe.logs import log_step

_log = logging.getLogger(__name__)
_FIRST = RowStart(row=0, prompt=(0,), max_new_tokens=2, sampling=Sampling(logprobs=0))  # of a decoder's first passes


class _Before(NamedTuple):
    """A plan, and this rank's state on the host before it."""

    plan: RowsPlan
    rank: int
    prompts: dict[int, Chunk]
    wanted: dict[int, int]
    held: dict[int, tuple[Chunk, torch.Tensor]]


class RowDecoder:
    """A decoder for plans: this rank's rows, in a cache for `num_rows` sequences of `num_positions` tokens each.

    Args:
        model: of `from_pretrained` or `shard_experts`; `why_not_fixed(model)` must be "".
        num_rows, num_positions: the most at any time; the same on all ranks.
        end_ids: tokens that end a sequence; the end token is the last one of its row.
        graphs: replay decode passes as CUDA graphs, captured by `warmup` or at their first use; a function that tells
            is asked whenever there is another transport.
        grammars: for sequences with a grammar.
        prefix_rows: rows whose memory keeps blocks of prefixes; without effect if a layer has a window smaller than
            num_positions, rounded up to a power of two, which forgets them.
        rehearsals: groups in which this rank may be next: what it compiles, loads and allocates for them is done first.
            Memory that it lacks for one of them is logged.

    Attributes:
        prefix_blocks: blocks of `BLOCK` tokens that the prefix cache holds, 0 for none.
    It takes the place of the model's decoder, whose memory is freed: a `RowDecoder` before it ends. On a rank that has
    yet to join others it is ready after `regroup`.
    Errors: ValueError for too many end_ids; RuntimeError for a model that computes NaN; those of a lack of memory, at
    once. Collective, but for a rank that has yet to join others.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_rows: int,
        num_positions: int,
        end_ids: tuple[int, ...],
        graphs: bool | Callable[[], bool],
        grammars: RowGrammars | None = None,
        prefix_rows: int = 0,
        rehearsals: Sequence[Rehearsal] = (),
    ) -> None:
        GenerationOptions(max_new_tokens=1, end_ids=end_ids)  # checks them
        session: Session = model.ep_moe
        self._model, self._session = model, session
        self._num_rows, self._num_positions = num_rows, num_positions
        if session.decoder is not None:
            session.decoder.destroy()
        self._uses_graphs = graphs if callable(graphs) else lambda: graphs
        self._decoder = session.decoder = Decoder(model, graphs=False)
        self._captured: set[tuple[int, Shape]] = set()  # (rank, shape), equal on all ranks
        self._before: _Before | None = None  # of a plan that has not ended
        self._prompts: dict[int, Chunk] = {}  # row -> the last chunk of a prompt that is not complete
        self._waited: list[float] = []  # seconds until the rows were ready
        self._wanted: dict[int, int] = {}  # row -> likeliest tokens with each log-probability
        # row -> the last chunk of a prompt and its logits [1, V], while the grammar of its first token is compiled
        self._held: dict[int, tuple[Chunk, torch.Tensor]] = {}
        capacity = pass_shape(num_rows, num_positions, sampled=True).capacity
        windows = [window for window in windows_of(model.config) if window is not None and window < capacity]
        self._window = min(windows, default=None)  # of layers that forget keys and values
        if windows:
            prefix_rows = 0
        self.prefix_blocks = prefix_rows * capacity // BLOCK
        self._decoder.prepare(num_rows, num_positions, sampled=True, more_rows=prefix_rows)
        self._decoder.sequences.grammars = grammars
        self._end_ids, self._has_begun = end_ids, False
        for number, rehearsal in enumerate(rehearsals, 1):
            try:
                with session.rehearsing(rehearsal):
                    self._begin()
            except torch.OutOfMemoryError as error:  # there may be enough for the group itself, without this one
                _log.warning("rank %d could not rehearse %s: %s", session.group.seat, rehearsal, error)
            log_step("other groups rehearsed", number, len(rehearsals))
        if not session.group.standby:
            self._begin()
            self._has_begun = True

    def _begin(self) -> None:
        """Make the transport, and allocate and compile by a first prefill and pass. Collective, host sync."""
        model, session = self._model, self._session
        self._captured.clear()
        self._decoder.graphs = self._uses_graphs()
        self._decoder.make_transport(model, self._num_rows)
        self._decoder.sequences.end_all(self._end_ids)
        everywhere = session.group.num_ranks
        none = ((),) * everywhere
        with first_not_finite(model) as name:
            made = self.run(RowsPlan(ended=none, starts=((_FIRST,),) * everywhere, chunks=(((0, 1),),) * everywhere))
        check_finite(torch.tensor(made.tokens, device="cpu"), name)
        vocab_size, device = model.get_input_embeddings().weight.shape[0], session.group.device
        most = min(session.transport.config.max_tokens_per_rank * vocab_size, MOST_PROMPT_LOGITS)
        torch.empty(most, dtype=model.dtype, device=device)  # the allocator keeps it for the logits of prompts
        shapes = (pass_shape(1, self._num_positions, False),) * everywhere  # as of the others' `regroup`
        self.run(RowsPlan(ended=none, starts=none, passes=1, shapes=shapes))
        session.reset_expert_load()  # of these passes

    def warmup(self) -> None:
        """Run what plans may ask for, before clients wait: prefills of 1, 2, 4, ... up to M tokens, as one prompt,
        padded and behind a chunk or a prefix, and without prompts of some ranks; and captures of all decode passes, if
        there are graphs. Without effect on a CPU without graphs, where nothing is compiled. Collective, host sync."""
        decoder, group = self._decoder, self._session.group
        if group.device.type == "cuda":
            most = min(self._session.transport.config.max_tokens_per_rank, self._num_positions - 1)
            half = most // 2
            whole = [((0, size, size),) for size in row_counts(most)]
            padded = [((0, half, half), (1, half - 1, half - 1))] if half > 1 and self._num_rows > 1 else []
            chunked = [((0, most, half),), ((0, 0, most - half),)] if half else []
            steps = whole + padded + chunked
            for number, step in enumerate(steps, 1):
                new = tuple(RowStart(row=row, prompt=(0,) * size, max_new_tokens=1) for row, size, _ in step if size)
                chunks = tuple((row, tokens) for row, _, tokens in step)
                everywhere = group.num_ranks
                self.run(RowsPlan(ended=((),) * everywhere, starts=(new,) * everywhere, chunks=(chunks,) * everywhere))
                log_step("prefills warmed up", number, len(steps))
            self._warm_up_alone()
        if decoder.graphs:
            shapes = all_shapes(self._num_rows, self._num_positions)
            decoder.capture_passes(self._model, shapes)
            self._captured = set(itertools.product(range(group.num_ranks), shapes))
        self._session.reset_expert_load()
        self._waited = self._decoder.waited_secs()

    def _warm_up_alone(self) -> None:
        """Prefill prompts of every other rank alone; behind blocks of the prefix cache, if there is one."""
        ranks = range(self._session.group.num_ranks)
        size = BLOCK if self.prefix_blocks and self._num_positions > BLOCK + 1 else 0
        start = RowStart(row=0, prompt=(0,) * (size + 1), max_new_tokens=1, prefix=(0,) if size else ())
        for turn in range(2):
            now = [rank % 2 == turn for rank in ranks]
            if any(now):
                self.run(
                    RowsPlan(
                        saves=tuple(((0, 0, 0),) if each else () for each in now) if size else (),
                        ended=((),) * len(ranks),
                        starts=tuple((start,) if each else () for each in now),
                        chunks=tuple(((0, 1),) if each else () for each in now),
                    )
                )

    def regroup(self) -> tuple[int, ...]:
        """Go on in another group, after `Session.regroup`: all ranks call it, those that are new to the group too.

        Rows keep their sequences, keys and values. A plan that a lost rank has interrupted on this rank is undone, but
        for the rows that it ended: the same plan, or another one, gives the tokens that it would have given. Graphs are
        captured anew at their next use.

        Returns: rows that have ended because the interrupted plan has overwritten keys and values of a sliding window
            that they still need: their sequences have to start again, with the tokens so far in their prompts.
        Errors: PeerLostError; it may be called again after the next `Session.regroup`. Collective, host sync.
        """
        if self._has_begun:
            return self._go_on()
        self._begin()
        self._has_begun = True
        return ()

    @torch.inference_mode()
    def _go_on(self) -> tuple[int, ...]:
        decoder, session, forgotten = self._decoder, self._session, self._undo()
        self._captured.clear()
        decoder.graphs = self._uses_graphs()
        decoder.make_transport(self._model, self._num_rows)
        self._prefill(())  # the first plans of a new rank: the others have no tokens in them
        # of all positions: the pass stores something at the next position of the first row, which may be any
        shape, live = pass_shape(1, self._num_positions, False), decoder.sequences.live.clone()
        if decoder.graphs:
            decoder.capture_passes(self._model, (shape,))
            self._captured = {(rank, shape) for rank in range(session.group.num_ranks)}
        decoder.sequences.live.zero_()
        try:
            decoder.decode(self._model, 1, shape)
        finally:
            decoder.sequences.live.copy_(live)
        self._waited = decoder.waited_secs()
        return forgotten

    def _undo(self) -> tuple[int, ...]:
        """Undo an interrupted plan, and end the rows that lack keys and values for it, which are returned."""
        before, self._before = self._before, None
        if before is None:
            return ()
        self._prompts, self._wanted, self._held = before.prompts, before.wanted, before.held
        plan, rank, sequences = before.plan, before.rank, self._decoder.sequences
        self._decoder.undo()
        self._session.restore_expert_load()
        forgotten, window = list[int](), self._window
        if window is not None and any(plan.chunks):
            for row, size in plan.chunks[rank]:
                first = self._prompts[row].end if row in self._prompts else 0
                if first and size > 1 and first + size > window:
                    forgotten.append(row)
        elif window is not None and plan.passes > 1:
            wraps = sequences.live & (sequences.positions + plan.passes > window)
            forgotten += wraps[: plan.shapes[rank].rows].nonzero().flatten().tolist()
        self._end((*plan.ended[rank], *forgotten))
        for row in forgotten:
            self._prompts.pop(row, None)
        return tuple(forgotten)

    def _end(self, rows: Sequence[int]) -> None:
        """End rows, which are live or not."""
        sequences = self._decoder.sequences
        if not rows:
            return
        sequences.live[torch.tensor(rows, device=sequences.live.device)] = False
        for row in rows:
            self._wanted.pop(row, None)
            self._held.pop(row, None)
        if sequences.grammars is not None:
            sequences.grammars.end(rows)

    def run(self, plan: RowsPlan) -> RowsMade:
        """Carry out this rank's part of a plan. After an error only `regroup` goes on. Collective, host sync."""
        session = self._session
        self._before = _Before(plan, session.group.rank, dict(self._prompts), dict(self._wanted), dict(self._held))
        self._decoder.sequences.keep()
        session.keep_expert_load()
        made = self._run(plan)
        self._before = None
        if not plan.load:
            return made
        made = dataclasses.replace(made, load=session.expert_load.tolist(), waited=self._waits())
        if session.rebalancer is None:
            return made
        # rank 0's answer stays on its machine, and nothing else tells the front end of a new placement
        placements = session.placements if session.group.rank == 0 else ()
        return dataclasses.replace(made, rebalancing=status_entries(session.rebalancer.status), placements=placements)

    def _waits(self) -> list[float]:
        """As `RowsMade.waited`, without those of the start: ranks differ in time to compile."""
        found = self._decoder.waited_secs()
        return [now - before for now, before in zip(found, self._waited or [0.0] * len(found), strict=True)]

    @torch.inference_mode()
    def _run(self, plan: RowsPlan) -> RowsMade:
        rank, decoder, model = self._session.group.rank, self._decoder, self._model
        grammars = decoder.sequences.grammars
        if plan.saves:
            decoder.save_prefixes(plan.saves[rank])
        self._end(plan.ended[rank])
        for start in plan.starts[rank]:
            first = len(start.prefix) * BLOCK
            self._prompts[start.row] = Chunk(start, first, first)
            self._wanted.pop(start.row, None)
            self._held.pop(start.row, None)
            if grammars is not None:
                grammars.prepare(start)
        decoder.load_prefixes(plan.starts[rank])
        if any(plan.chunks):
            return self._prefill(plan.chunks[rank])
        wanted = set(enumerate(plan.shapes))
        if decoder.graphs and not wanted <= self._captured:
            decoder.capture_passes(model, (plan.shapes[rank],))
            self._captured |= wanted
        shape = plan.shapes[rank]
        if grammars:
            grammars.drop(range(shape.rows, self._num_rows))  # none of them is live
        if not grammars and not self._held:
            return self._decode(plan.passes, shape)
        parts = [self._decode(1, shape) for _ in range(plan.passes)]  # a grammar follows a token before the next pass
        return RowsMade(
            tokens=[step for part in parts for step in part.tokens],
            logprobs={
                row: [each for part in parts for each in part.logprobs.get(row, ())]
                for row in {row for part in parts for row in part.logprobs}
            },
            ended={row: why for part in parts for row, why in part.ended.items()},
        )

    def _decode(self, passes: int, shape: Shape) -> RowsMade:
        tokens = self._decoder.decode(self._model, passes, shape).tolist()
        ended = self._follow(dict(enumerate(tokens[-1])))
        for row in [row for row in self._wanted if row >= shape.rows or tokens[0][row] == NONE]:
            del self._wanted[row]  # it had ended before
        logprobs = self._logprobs(passes, self._wanted)
        for row in [row for row in self._held if row < shape.rows and self._is_ready(row)]:
            chunk, logits = self._held.pop(row)
            self._decoder.choose_first([chunk], logits)
            made = self._decoder.read(1, self._num_rows)[0].tolist()
            tokens[-1][row] = made[row]
            found, why = self._first_tokens([chunk.start], made)
            logprobs |= found
            ended |= why
        return RowsMade(tokens=tokens, logprobs=logprobs, ended=ended)

    def _is_ready(self, row: int) -> bool:
        grammars = self._decoder.sequences.grammars
        return grammars is None or grammars.is_ready(row)

    def _first_tokens(
        self, starts: Sequence[RowStart], made: Sequence[int]
    ) -> tuple[dict[int, list[Logprob]], dict[int, str]]:
        """Log-probabilities of the tokens of sequences that have begun, and which end, and why; by row."""
        new = {start.row: start.sampling.logprobs for start in starts if start.sampling.logprobs is not None}
        self._wanted |= new
        return self._logprobs(1, new), self._follow({start.row: made[start.row] for start in starts})

    def _follow(self, tokens: dict[int, int]) -> dict[int, str]:
        """Go on in the grammars of rows by their new tokens; returns the rows that these end, and why."""
        sequences = self._decoder.sequences
        if not sequences.grammars:
            return {}
        assert sequences.adjustments is not None
        masks, ended = sequences.grammars.follow(tokens)
        sequences.adjustments.allow(masks)
        if ended:
            sequences.live[torch.tensor(list(ended), device=sequences.live.device)] = False
        return ended

    def _prefill(self, sizes: Sequence[tuple[int, int]]) -> RowsMade:
        chunks = [self._next_chunk(row, size) for row, size in sizes]
        later = {chunk.start.row for chunk in chunks if chunk.is_last and not self._is_ready(chunk.start.row)}
        logits = self._decoder.prefill(self._model, chunks, later)
        self._session.end_pass()
        self._session.transport.check()
        made = self._decoder.read(1, self._num_rows)[0].tolist()
        prompts, begun = {}, {}  # by place
        for place, (start, first, end) in enumerate(chunks):
            assert logits is not None
            if start.sampling.prompt_logprobs is not None:
                mine = logits[place, logits.shape[1] - (end - first) :]
                prompts[place] = prompt_logprobs(mine, start.prompt[first : end + 1], start.sampling.prompt_logprobs)
            if chunks[place].is_last:
                del self._prompts[start.row]
                if start.row in later:
                    self._held[start.row] = chunks[place], logits[place : place + 1, -1].clone()
                else:
                    begun[place] = start
        logprobs, ended = self._first_tokens(list(begun.values()), made)
        return RowsMade(
            tokens=[[made[begun[place].row] if place in begun else NONE for place in range(len(chunks))]],
            logprobs={place: logprobs[start.row] for place, start in begun.items() if start.row in logprobs},
            prompts=prompts,
            ended={place: ended[start.row] for place, start in begun.items() if start.row in ended},
        )

    def _next_chunk(self, row: int, size: int) -> Chunk:
        start, _, end = self._prompts[row]
        self._prompts[row] = chunk = Chunk(start, end, end + size)
        return chunk

    def _logprobs(self, passes: int, wanted: dict[int, int]) -> dict[int, list[Logprob]]:
        """Those of the last passes, of rows that asked for so many of the likeliest tokens beside each."""
        adjustments = self._decoder.sequences.adjustments
        assert adjustments is not None
        return adjustments.read(passes, wanted) if wanted else {}
