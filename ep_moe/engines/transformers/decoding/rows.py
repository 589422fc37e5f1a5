"""Rows of sequences that start and end at any time, for a server. What to do next comes as plans, equal on all ranks.

A plan is a prefill of new rows or a few decode passes. It says what every rank does, so that ranks need not agree on
anything else: which of them sit out a prefill, and which capture a pass that the others only take part in.
Letters: B' rows of one prefill, P prompt tokens, C capacity, M max_tokens_per_rank, R ranks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ep_moe.engines.transformers.decoding.decoder import Decoder
from ep_moe.engines.transformers.decoding.finite import check_finite, first_not_finite
from ep_moe.engines.transformers.decoding.options import GenerationOptions
from ep_moe.engines.transformers.decoding.passes import Shape, pass_shape
from ep_moe.engines.transformers.decoding.sequences import Sampling
from ep_moe.engines.transformers.hooks import Session

Model = Any  # a transformers model; its mixins are more than a type checker can follow


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowStart:
    """A sequence that starts in a row of a rank.

    Args:
        row: its index, where no sequence is. prompt: token ids, one or more.
        max_new_tokens: 1 or more. temperature: 0 takes the likeliest token. top_p: in (0, 1]. seed: of the sampling.
    """

    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsPlan:
    """What every rank does next; each field has an entry for each rank.

    Args:
        ended: rows that end before anything else, because nobody wants their tokens.
        starts: sequences to prefill, in consecutive rows; their prompts, padded to the longest, have at most M tokens.
        passes: decode passes after that, 0 in a plan with starts.
        shapes: of these passes.
    """

    ended: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[RowStart, ...], ...]
    passes: int = 0
    shapes: tuple[Shape, ...] = ()


class RowDecoder:
    """This rank's rows, in a cache for `num_rows` sequences of `num_positions` tokens each.

    Args:
        model: of `from_pretrained` or `shard_experts`; `why_not_fixed(model)` must be "".
        num_rows, num_positions: the most at any time; the same on all ranks.
        end_ids: tokens that end a sequence; the end token is the last one of its row.
        graphs: replay decode passes as CUDA graphs, captured at their first use.
    It takes the place of the model's decoder, whose memory is freed: a `RowDecoder` before it ends.
    Errors: ValueError for too many end_ids; RuntimeError for a model that computes NaN; those of a lack of memory, at
    once. Collective.
    """

    def __init__(
        self, model: Model, *, num_rows: int, num_positions: int, end_ids: tuple[int, ...], graphs: bool
    ) -> None:
        GenerationOptions(max_new_tokens=1, end_ids=end_ids)  # checks them
        session: Session = model.ep_moe
        self._model, self._session, self._graphs = model, session, graphs
        if session.decoder is not None:  # the session ends one
            session.decoder.destroy()
        self._decoder = session.decoder = Decoder(model, graphs=graphs)
        self._captured: list[set[Shape]] = [set() for _ in range(session.group.num_ranks)]
        self._decoder.prepare(num_rows, num_positions, sampled=True)
        self._decoder.make_transport(model, num_rows)
        self._decoder.sequences.end_all(end_ids)
        first = RowStart(row=0, prompt=(0,), max_new_tokens=2)
        everywhere = session.group.num_ranks
        with first_not_finite(model) as name:  # allocates and compiles
            tokens = self.run(RowsPlan(ended=((),) * everywhere, starts=((first,),) * everywhere))
        check_finite(torch.tensor(tokens, device="cpu"), name)
        shapes = (pass_shape(1, 1, False),) * everywhere
        self.run(RowsPlan(ended=((),) * everywhere, starts=((),) * everywhere, passes=1, shapes=shapes))

    @torch.inference_mode()
    def run(self, plan: RowsPlan) -> list[list[int]]:
        """Carry out this rank's part of a plan.

        Returns: tokens [passes][row] of the rows up to the bucket's size, NONE where a row has none, BROKEN where its
        logits are not finite, which ends it; of a plan with starts one list of the first token of each start.
        Collective, host sync.
        """
        rank, sequences = self._session.group.rank, self._decoder.sequences
        if plan.ended[rank]:
            sequences.live[torch.tensor(plan.ended[rank], device=sequences.live.device)] = False
        if any(plan.starts):
            return [self._start(plan.starts[rank])]
        return self._decode(plan.passes, plan.shapes) if plan.passes else []

    def _start(self, starts: Sequence[RowStart]) -> list[int]:
        decoder, transport = self._decoder, self._session.transport
        if not starts:
            decoder.prefill_nothing(self._model)
            transport.check()
            return []
        first, device = starts[0].row, self._session.group.device
        lengths = torch.tensor([len(start.prompt) for start in starts], device="cpu")
        longest = int(lengths.max())
        padded = [(0,) * (longest - len(start.prompt)) + start.prompt for start in starts]
        mask = None
        if bool((lengths < longest).any()):
            mask = (torch.arange(longest, device="cpu") >= longest - lengths[:, None]).long().to(device)
        sampled = any(start.temperature > 0 for start in starts)
        decoder.clear(first, len(starts))
        capacity = pass_shape(len(starts), longest + 1, sampled).capacity
        logits = decoder.prefill(self._model, torch.tensor(padded, device=device), mask, first, capacity)
        sampling = Sampling(
            temperature=torch.tensor([start.temperature for start in starts], dtype=torch.float32, device=device),
            top_p=torch.tensor([start.top_p for start in starts], dtype=torch.float32, device=device),
            seeds=torch.tensor([start.seed for start in starts], dtype=torch.int64, device=device),
        )
        wanted = torch.tensor([start.max_new_tokens for start in starts], device=device)
        decoder.sequences.begin(first, (lengths - 1).to(device), wanted, sampling)
        decoder.sequences.advance(logits, sampled=sampled, first=first)
        transport.check()
        return decoder.read(1, first + len(starts))[0, first:].tolist()

    def _decode(self, passes: int, shapes: Sequence[Shape]) -> list[list[int]]:
        decoder, shape = self._decoder, shapes[self._session.group.rank]
        if self._graphs and any(wanted not in self._captured[rank] for rank, wanted in enumerate(shapes)):
            decoder.capture_pass(self._model, shape)
            for rank, wanted in enumerate(shapes):
                self._captured[rank].add(wanted)
        for _ in range(passes):
            decoder.run(self._model, shape)
        decoder.check()
        return decoder.read(passes, shape.rows).tolist()
