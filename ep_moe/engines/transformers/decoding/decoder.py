"""Generation by passes of fixed shapes: eager prefills, then decode passes, each captured once as a CUDA graph.

A prefill computes a chunk of the prompts of some rows, at most M tokens; each token attends to those before it in the
cache. So a prompt may be as long as the positions allow.

A pass computes one token for each row of a bucket (1, 2, 4, ... rows) with a cache of a bucketed capacity. Tokens,
positions and the rows that want another token stay on the device, so that the host only launches; it reads the tokens
of several passes at once. Ranks replay different buckets in the same step: each pass is one round of every MoE layer,
and a rank whose sequences have ended takes part with zero tokens.
Letters: B rows of this rank, P prompt tokens, N new tokens, C capacity, M max_tokens_per_rank, R ranks, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from ep_moe.engines.common.model import warm_up
from ep_moe.engines.transformers.architectures import num_topk_of
from ep_moe.engines.transformers.decoding.attention import any_shape, grouped_attention
from ep_moe.engines.transformers.decoding.finite import check_finite, first_not_finite
from ep_moe.engines.transformers.decoding.fixed_cache import BLOCK, FixedCache, windows_of
from ep_moe.engines.transformers.decoding.options import GenerationOptions, check_prompts
from ep_moe.engines.transformers.decoding.passes import (
    LEAST_CAPACITY,
    RowStart,
    Sampling,
    Shape,
    bucket_of,
    capture,
    new_pool,
    pass_shape,
)
from ep_moe.engines.transformers.decoding.sequences import NONE, Sequences
from ep_moe.engines.transformers.hooks import DecodeExperts, Model, Session
from ep_moe.layer import ExpertParallelMoE
from ep_moe.logs import log_step
from ep_moe.transport import (
    CollectiveTransport,
    GatheredTransport,
    HierarchicalTransport,
    LocalTransport,
    NodesGatheredTransport,
    Transport,
)

PASSES_PER_READ = 16  # after these the host reads tokens, checks the transport and asks whether all ranks have ended
_WARM_UPS = 2  # passes before a capture: kernels compile, libraries allocate their workspaces


@functools.cache
def _cache_name(model_type: Any) -> str:
    """The parameter of a model's forward that takes the cache; transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(model_type.forward).parameters else "past_key_values"


class _Request(NamedTuple):
    """What one rank needs for a generation, sent to all ranks."""

    rows: int
    cold: bool  # its pass has yet to be captured
    prefills: int = 0  # forward passes for the chunks of its prompts
    new_tokens: int = 0
    ends: bool = False  # end tokens may end it earlier


class Chunk(NamedTuple):
    """Tokens [first, end) of a sequence's prompt; those before are in the cache."""

    start: RowStart
    first: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.end == len(self.start.prompt)


def decode_transport(session: Session) -> Any:
    """The class of the transport of decode passes: the model's; on GPUs one without host syncs in place of `local`, as
    the kernels of `peer` serve a single rank too, of `collective` and of `hierarchical`. Local.
    """
    if session.group.device.type == "cuda":
        if isinstance(session.transport, LocalTransport):
            from ep_moe.transport.one_sided import NvlinkTransport  # needs Triton, which a machine with GPUs has

            return NvlinkTransport
        if session.group.backend == "nccl" and isinstance(session.transport, CollectiveTransport):
            of_nodes = isinstance(session.transport, HierarchicalTransport)
            return NodesGatheredTransport if of_nodes else GatheredTransport
    return type(session.transport)


class Decoder:
    """Generates with one model, on all ranks in step: `prefill` sequences in rows, then `decode` passes of all rows.

    Its transport is sized for the largest bucket of any rank: the memory of a batch, and so of a graph, grows with M.

    Args:
        model: of `from_pretrained` or `shard_experts`; no reference to it is kept.
        graphs: capture the passes; else the same operations run eagerly. May be set between generations, to the same
            on all ranks.
    Errors: ValueError for a model whose cache has no fixed shape. Local.
    """

    def __init__(self, model: Model, *, graphs: bool) -> None:
        session: Session = model.ep_moe
        self._session, self.graphs = session, graphs
        self._cache = FixedCache(windows_of(model.config))
        self._sequences: Sequences | None = None
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._pool: Any = None
        self._transport: Transport | None = None
        self._layers: tuple[ExpertParallelMoE, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the captured passes."""
        return tuple(self._replays)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on this rank besides the model's own transport: `peer_bytes` of its transport that peers map, 0 if they
        map none, and `cache_bytes` of keys and values. Local, no host sync."""
        return {"peer_bytes": getattr(self._transport, "peer_bytes", 0), "cache_bytes": self._cache.num_bytes}

    def waited_secs(self) -> list[float]:
        """As `RowsMade.waited`, of prefills and decode passes. Local, host sync on a GPU."""
        session = self._session
        both: tuple[Any, ...] = session.transport, self._transport
        transports = [each for each in both if hasattr(each, "statistics")]
        if not transports:
            return [session.group.waited_secs]
        waited = torch.stack([each.statistics().waited_ns for each in transports]).sum(0)
        return [ns / 1e9 for ns in waited.tolist()]

    @property
    def sequences(self) -> Sequences:
        """The state of the rows. Errors: RuntimeError before `prepare`."""
        if self._sequences is None:
            raise RuntimeError("a decoder has no rows before its first generation")
        return self._sequences

    def drop_graphs(self) -> None:
        """Free the captured passes, which read the parameters that the model had at capture. Local."""
        self._replays.clear()
        self._pool = None

    def leave(self) -> None:
        """Free graphs and transport, which the next generation makes anew; keys and values stay. Local, calling it
        twice is fine."""
        self.drop_graphs()
        self._layers = ()
        if self._transport is not None:
            self._transport.destroy()
        self._transport = None

    def destroy(self) -> None:
        """Free graphs, cache and transport. Local, calling it twice is fine."""
        self._cache.forget()
        self.leave()

    @torch.inference_mode()
    def generate(
        self,
        model: Model,
        prompts: torch.Tensor,
        mask: torch.Tensor | None,
        options: GenerationOptions,
        on_step: Callable[[int], None],
    ) -> torch.Tensor:
        """See `ep_moe.engines.transformers.generate`. Collective; a host sync every `PASSES_PER_READ` tokens."""
        session, error, request = self._session, None, None
        num_rows, chunks = 0, list[list[Chunk]]()
        try:
            session.transport.check()
            check_prompts(prompts, mask, options, model, whole=False)
            num_rows, num_columns = prompts.shape
            chunks = _chunks_of(_starts_of(prompts, mask, options), session.transport.config.max_tokens_per_rank)
            shape = self.prepare(num_rows, num_columns + options.max_new_tokens, options.temperature > 0)
            request = _Request(
                rows=num_rows,
                cold=self._is_cold(shape),
                prefills=len(chunks),
                new_tokens=options.max_new_tokens if num_rows else 0,
                ends=bool(options.end_ids),
            )
        except ValueError as refusal:
            error = refusal
        requests = self._exchange(request)
        if error is not None:
            raise error
        num_steps = max(other.new_tokens for other in requests)
        if not num_steps:
            return torch.full((num_rows, options.max_new_tokens), NONE, device="cpu")
        self.sequences.end_all(options.end_ids)
        self._cache.clear()
        with first_not_finite(model) as name:
            for index in range(max(other.prefills for other in requests)):
                self.prefill(model, chunks[index] if index < len(chunks) else ())
                session.end_pass()
        session.transport.check()
        made = [self.read(1, num_rows)]
        check_finite(made[0], name)
        on_step(1)
        done, may_end = 1, any(other.ends for other in requests)
        if num_steps > 1:
            self._make_ready(model, shape, requests)
        while done < num_steps and not (may_end and self._all_have_ended()):
            passes = min(PASSES_PER_READ, num_steps - done)
            made.append(self.decode(model, passes, shape)[:, :num_rows])
            check_finite(made[-1])
            done += passes
            on_step(passes)
        found = torch.cat(made)[: options.max_new_tokens].T
        return torch.nn.functional.pad(found, (0, options.max_new_tokens - found.shape[1]), value=NONE)

    @torch.inference_mode()
    def warmup(self, model: Model, num_rows: int, num_positions: int, *, sampled: bool = False) -> None:
        """Compile and capture the decode passes of a generation beforehand.

        Args:
            num_rows: B of this rank, may be 0. num_positions: P + N. sampled: for a temperature above 0.
        Collective, host sync.
        """
        shape = self.prepare(num_rows, num_positions, sampled)
        self._make_ready(model, shape, self._exchange(_Request(rows=num_rows, cold=self._is_cold(shape))))

    def _make_ready(self, model: Model, shape: Shape, requests: list[_Request]) -> None:
        """Make the transport and capture the pass, if any rank lacks them. Collective."""
        rebuilt = self.make_transport(model, max(other.rows for other in requests))
        if self.graphs and (rebuilt or any(other.cold for other in requests)):
            self.capture_passes(model, (shape,))

    def _is_cold(self, shape: Shape) -> bool:
        return self.graphs and shape not in self._replays

    def prepare(self, num_rows: int, num_positions: int, sampled: bool, *, more_rows: int = 0) -> Shape:
        """Allocate sequences and cache, with `more_rows` behind those of the passes; returns their shape. Local."""
        shape = pass_shape(num_rows, num_positions, sampled)
        if self._sequences is None or self._sequences.rows < shape.rows:
            self._sequences = Sequences(shape.rows, PASSES_PER_READ, self._session.group.device)
            self.drop_graphs()
        if self._cache.reserve(shape.rows + more_rows, shape.capacity):
            self.drop_graphs()
        return shape

    def _exchange(self, request: _Request | None) -> list[_Request]:
        """The requests of all ranks; None refuses, and is a ValueError on the other ranks. Collective, host sync."""
        found = self._session.group.all_gather_object(None if request is None else tuple(request))
        if request is not None and None in found:
            raise ValueError(f"rank {found.index(None)} refused its prompts; its own error names the reason")
        return [_Request(*other) for other in found if other is not None]

    def make_transport(self, model: Model, rows: int) -> bool:
        """Make a transport for this many rows, and layers on it, unless there is one; True if it is new. Collective."""
        session, wanted = self._session, bucket_of(rows)
        if self._transport is not None and self._transport.config.max_tokens_per_rank >= wanted:
            return False
        self.drop_graphs()
        if self._transport is not None:
            self._transport.destroy()
        config = dataclasses.replace(session.transport.config, max_tokens_per_rank=wanted, num_slots=1)
        transport = decode_transport(session)(session.group, session.transport.placement, config)
        self._transport = transport
        self._layers = tuple(
            ExpertParallelMoE(
                layer.config,
                layer.weights,  # shared with the model's own layer
                transport,
                placement=layer.positions,  # and their counts
                experts=session.experts,
                layer_index=index,
            )
            for index, layer in enumerate(session.layers)
        )
        num_topk = num_topk_of(model.config)
        if num_topk is not None:
            warm_up(self._layers, num_topk, padded=True)
        return True

    def prefill(self, model: Model, chunks: Sequence[Chunk], later: Collection[int] = ()) -> torch.Tensor | None:
        """Compute chunks of prompts in different rows; a prompt's last one also chooses the first token, which
        `read(1, rows)` returns. Without chunks, take part in the prefill of other ranks.

        Args:
            later: rows whose first tokens `choose_first` chooses, before a later read.
        Returns: [B, N, V] logits of the chunks, padded on the left, if one asks for the log-probabilities of its
            prompt, else [B, 1, V] of their last tokens, or more; None without chunks.
        Collective, no host sync on a transport that has none.
        """
        session, device = self._session, self._session.group.device
        if not chunks:
            with session.sitting_out(), any_shape():
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
            return None
        firsts, ends = [chunk.first for chunk in chunks], [chunk.end for chunk in chunks]
        sizes = [chunk.end - chunk.first for chunk in chunks]
        longest, text = max(sizes), model.config.get_text_config()
        padded = [
            (0,) * (longest - size) + chunk.start.prompt[chunk.first : chunk.end]
            for chunk, size in zip(chunks, sizes, strict=True)
        ]
        rows = [chunk.start.row for chunk in chunks]
        self._cache.clear([chunk.start.row for chunk in chunks if not chunk.first])  # of an earlier sequence
        self._cache.begin_prefill(rows, firsts, ends, bucket_of(max(ends) + 1, LEAST_CAPACITY), device)
        positions, mask = torch.arange(longest, device=device)[None], None
        if max(firsts) or min(sizes) < longest:
            behind = torch.tensor(ends, device="cpu").to(device, non_blocking=True)[:, None]
            positions = behind - longest + positions
            mask = (positions >= 0).long()
        if max(firsts):
            mask = self._cache.masks(text, model.dtype)
        whole = any(chunk.start.sampling.prompt_logprobs is not None for chunk in chunks)
        keep: dict[str, Any] = {} if whole or not model._supports_logits_to_keep() else {"logits_to_keep": 1}
        with self._without_padding(sizes), any_shape():
            output = model(
                input_ids=torch.tensor(padded, device="cpu").to(device, non_blocking=True),
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                use_cache=True,
                **{_cache_name(model.__class__): self._cache},
                **keep,
            )
        self.choose_first(chunks, output.logits[:, -1], later)
        logits: torch.Tensor = output.logits
        return logits

    def _without_padding(self, sizes: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """In the block, what stands left of rows of these sizes goes to no expert. Local."""
        longest, device, layers = max(sizes), self._session.group.device, self._session.layers
        if min(sizes) == longest:
            return contextlib.nullcontext()
        padding = longest - torch.tensor(sizes, device="cpu").to(device, non_blocking=True)[:, None]
        live = (torch.arange(longest, device=device) >= padding).reshape(-1, 1)

        def compute(index: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return layers[index].forward_routed(x, torch.where(live, ids, NONE), weights.float())

        return self._session.decoding(compute)

    def undo(self) -> None:
        """Go back to the sequences' state at the last `keep`. Local, no host sync."""
        self.sequences.undo()
        self._cache.clear_behind(self.sequences.positions)

    def load_prefixes(self, starts: Sequence[RowStart]) -> None:
        """Copy the blocks of the prefix cache that prompts begin with into their rows. Local, no host sync."""
        starts = [start for start in starts if start.prefix]
        self._cache.clear([start.row for start in starts])
        pairs = [(index, place, start.row) for start in starts for index, place in enumerate(start.prefix)]
        self._copy([self._store + place for _, place, _ in pairs], [self._block(row, index) for index, _, row in pairs])

    def save_prefixes(self, saves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks of rows to the prefix cache, as of `RowsPlan.saves`. Local, no host sync."""
        self._copy([self._block(row, index) for row, index, _ in saves], [self._store + place for _, _, place in saves])

    def _block(self, row: int, index: int) -> int:
        return row * (self._cache.capacity // BLOCK) + index

    @property
    def _store(self) -> int:
        """The first block of the rows behind those of the passes."""
        return self._block(self.sequences.rows, 0)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self._cache.copy_blocks(sources, targets, self._session.group.device)

    @torch.inference_mode()
    def choose_first(self, chunks: Sequence[Chunk], logits: torch.Tensor, later: Collection[int] = ()) -> None:
        """Begin the sequences whose prompts are complete, with their first tokens, and keep the other rows apart.

        Args:
            logits: [B, V] of the chunks' last tokens. later: rows that do not begin yet.
        Local, no host sync.
        """
        sequences = self.sequences
        groups = itertools.groupby(
            enumerate(chunks),
            lambda each: (each[1].is_last and each[1].start.row not in later, each[1].start.row - each[0]),
        )
        for (begins, _), group in groups:  # neighbours in consecutive rows
            places, some = zip(*group, strict=True)
            if not begins:
                for chunk in some:  # decode passes store there, and the next chunk overwrites it
                    sequences.positions[chunk.start.row] = chunk.end
                continue
            starts = [chunk.start for chunk in some]
            sequences.begin(starts, logits.shape[-1])
            sequences.step.zero_()
            sequences.advance(
                logits[places[0] : places[-1] + 1],
                sampled=any(start.sampling.temperature > 0 for start in starts),
                adjusted=any(start.sampling.adjusted for start in starts),
                first=starts[0].row,
            )

    def decode(self, model: Model, passes: int, shape: Shape) -> torch.Tensor:
        """Run passes, replayed if they are captured; returns their tokens as `read` does. Collective, host sync."""
        for _ in range(passes):
            self._run(model, shape)
            self._session.end_pass()
        self._check()
        return self.read(passes, shape.rows)

    def _step(self, model: Model, shape: Shape) -> None:
        """One pass: every live row of the bucket gets its next token. A function of fixed shapes without host sync."""
        sequences, cache = self.sequences, self._cache
        here = slice(shape.rows)
        cache.begin_decode(shape.rows, shape.capacity, sequences.positions[here])
        live = sequences.live[here, None]
        experts = self._live_experts(live, sequences.num_tokens(shape.rows))
        text = model.config.get_text_config()
        with self._session.decoding(experts), grouped_attention(text):
            output = model(
                input_ids=sequences.tokens[here, None],
                attention_mask=cache.masks(text, model.dtype),
                position_ids=sequences.positions[here, None],
                use_cache=True,
                **{_cache_name(model.__class__): cache},
            )
        sequences.advance(output.logits[:, -1], sampled=shape.sampled, adjusted=shape.adjusted)

    def _live_experts(self, live: torch.Tensor, num_tokens: torch.Tensor) -> DecodeExperts:
        """Computes experts for the live rows of one pass; other rows go to no expert, and their results are zero.

        Args: live: [B, 1] bool. num_tokens: [1] int32, the number of rows up to the last live one.
        """

        def compute(index: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            ids = torch.where(live, ids, NONE)
            return self._layers[index].forward_routed(x, ids, weights.float(), num_tokens=num_tokens)

        return compute

    def _run(self, model: Model, shape: Shape) -> None:
        replay = self._replays.get(shape) if self.graphs else None
        if replay is None:
            self._step(model, shape)
        else:
            replay()

    @torch.inference_mode()
    def capture_passes(self, model: Model, shapes: Sequence[Shape]) -> None:
        """Capture this rank's passes, as many on all ranks, as far as necessary: ranks that have theirs take part in
        the warm-up passes. These are eager on every rank, as `gathered` asks for. Collective, host sync."""
        sequences, group = self.sequences, self._session.group
        assert self._transport is not None
        for transport in (self._transport, self._session.transport):
            if transport.open_slots:
                raise RuntimeError(
                    f"slot {transport.open_slots[0]} has an open round: a decode pass is captured when all rounds have "
                    f"ended"
                )
        live = sequences.live.clone()
        sequences.live.zero_()  # rows that are not live keep their tokens and positions, and send nothing
        for number, shape in enumerate(shapes, 1):
            for _ in range(_WARM_UPS):
                self._step(model, shape)
            self._check()
            if shape not in self._replays:
                self._pool = self._pool or new_pool()
                self._replays[shape] = capture(functools.partial(self._step, model, shape), self._pool)
            sequences.step.zero_()
            if len(shapes) > 1:
                log_step("decode passes captured", number, len(shapes))
        sequences.live.copy_(live)
        group.wait_for_all("capture")  # captures take different times, and the next pass has a timeout

    def _check(self) -> None:
        """Raise errors of the passes before their tokens are read. Host sync."""
        assert self._transport is not None
        self._transport.check()

    def read(self, passes: int, rows: int) -> torch.Tensor:
        """The tokens of the last passes, or of the last prefills, [passes, B] on the host, NONE where a row had ended.
        Host sync."""
        self.sequences.step.zero_()
        return self.sequences.made[:passes, :rows].to("cpu", copy=True)

    def _all_have_ended(self) -> bool:
        """Whether no row of any rank is live. Collective, host sync."""
        return not int(self._session.group.all_reduce_sum(self.sequences.live.sum(0, keepdim=True)))


def _starts_of(prompts: torch.Tensor, mask: torch.Tensor | None, options: GenerationOptions) -> list[RowStart]:
    """The sequences of checked prompts [B, P], in rows from 0. Host sync."""
    num_rows, num_columns = prompts.shape
    lengths = [num_columns] * num_rows if mask is None else mask.bool().sum(1).tolist()
    return [
        RowStart(
            row=row,
            prompt=tuple(tokens[num_columns - length :]),
            max_new_tokens=options.max_new_tokens,
            sampling=Sampling(temperature=options.temperature, top_p=options.top_p, seed=seed),
        )
        for row, (tokens, length, seed) in enumerate(
            zip(prompts.tolist(), lengths, options.seeds_of(num_rows), strict=True)
        )
    ]


def _chunks_of(starts: Sequence[RowStart], most: int) -> list[list[Chunk]]:
    """The prefills of sequences: each of as many rows, or else of as large a part of one, as `most` tokens hold."""
    share = max(most // max((len(start.prompt) for start in starts), default=1), 1)
    return [
        [
            Chunk(start, first, min(first + most, len(start.prompt)))
            for start in starts[row : row + share]
            if first < len(start.prompt)
        ]
        for row in range(0, len(starts), share)
        for first in range(0, max(len(start.prompt) for start in starts[row : row + share]), most)
    ]
