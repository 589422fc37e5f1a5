"""Generation by passes of fixed shapes: an eager prefill, then decode passes, each captured once as a CUDA graph.

A pass computes one token for each row of a bucket (1, 2, 4, ... rows) with a cache of a bucketed capacity. Tokens,
positions and the rows that want another token stay on the device, so that the host only launches; it reads the tokens
of several passes at once. Ranks replay different buckets in the same step: each pass is one round of every MoE layer,
and a rank whose sequences have ended takes part with zero tokens.
Letters: B rows of this rank, P prompt tokens, N new tokens, C capacity, M max_tokens_per_rank, R ranks, V vocabulary.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ep_moe.engines.common.model import warm_up
from ep_moe.engines.transformers.architectures import num_topk_of
from ep_moe.engines.transformers.decoding.adjust import MOST_PROMPT_LOGITS, prompt_logprobs
from ep_moe.engines.transformers.decoding.attention import grouped_attention
from ep_moe.engines.transformers.decoding.finite import check_finite, first_not_finite
from ep_moe.engines.transformers.decoding.fixed_cache import FixedCache, windows_of
from ep_moe.engines.transformers.decoding.options import GenerationOptions, check_prompts
from ep_moe.engines.transformers.decoding.passes import (
    Logprob,
    RowsMade,
    RowsPlan,
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
from ep_moe.transport import LocalTransport, Transport

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
    prefills: int = 0  # forward passes for its prompts
    new_tokens: int = 0
    ends: bool = False  # end tokens may end it earlier


def decode_transport(session: Session) -> Any:
    """The class of the transport of decode passes: the model's, in place of `local` on a GPU one without host syncs.

    The kernels of `nvlink` serve a single rank too. Local.
    """
    if isinstance(session.transport, LocalTransport) and session.group.device.type == "cuda":
        from ep_moe.transport.one_sided import NvlinkTransport  # needs Triton, which a machine with GPUs has

        return NvlinkTransport
    return type(session.transport)


class Decoder:
    """Generates with one model, on all ranks in step: `start` sequences in rows, then `decode` passes of all rows.

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

    def destroy(self) -> None:
        """Free graphs, cache and transport. Local, calling it twice is fine."""
        self.drop_graphs()
        self._cache.forget()
        self._layers = ()
        if self._transport is not None:
            self._transport.destroy()

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
        num_rows, share = 0, 1
        try:
            session.transport.check()
            check_prompts(prompts, mask, options, model)
            num_rows, num_columns = prompts.shape
            share = max(session.transport.config.max_tokens_per_rank // max(num_columns, 1), 1)  # rows of a prefill
            shape = self.prepare(num_rows, num_columns + options.max_new_tokens, options.temperature > 0)
            request = _Request(
                rows=num_rows,
                cold=self._is_cold(shape),
                prefills=-(-num_rows // share),
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
        starts = _starts_of(prompts, mask, options)
        self.sequences.end_all(options.end_ids)
        self._cache.clear()
        with first_not_finite(model) as name:
            for index in range(max(other.prefills for other in requests)):
                self.start(model, starts[index * share : (index + 1) * share])
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
            self.capture_pass(model, shape)

    def _is_cold(self, shape: Shape) -> bool:
        return self.graphs and shape not in self._replays

    def prepare(self, num_rows: int, num_positions: int, sampled: bool) -> Shape:
        """Allocate sequences and cache; returns the shape of the decode passes. Local."""
        shape = pass_shape(num_rows, num_positions, sampled)
        if self._sequences is None or self._sequences.rows < shape.rows:
            self._sequences = Sequences(shape.rows, PASSES_PER_READ, self._session.group.device)
            self.drop_graphs()
        if self._cache.reserve(shape.rows, shape.capacity):
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
                placement=layer.placement,
                experts=session.experts,
                layer_index=index,
            )
            for index, layer in enumerate(session.layers)
        )
        num_topk = num_topk_of(model.config)
        if num_topk is not None:
            warm_up(self._layers, num_topk, padded=True)
        return True

    def start(self, model: Model, starts: Sequence[RowStart]) -> torch.Tensor | None:
        """Prefill sequences in consecutive rows and choose their first tokens, which `read(1, rows)` returns; without
        starts, take part in the prefill of other ranks.

        Returns: [B, P, V] logits of the prompts, padded on the left, if one asks for the log-probabilities of its
            prompt.
        Collective, no host sync on a transport that has none.
        """
        session, device = self._session, self._session.group.device
        if not starts:
            with session.sitting_out():
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
            return None
        first, count = starts[0].row, len(starts)
        sizes = [len(start.prompt) for start in starts]
        longest = max(sizes)
        padded = [(0,) * (longest - len(start.prompt)) + start.prompt for start in starts]
        positions, mask, lengths = torch.arange(longest, device=device)[None], None, None
        if min(sizes) < longest:
            lengths = torch.tensor(sizes, device="cpu").to(device, non_blocking=True)
            positions = positions - (longest - lengths[:, None])
            positions, mask = positions.clamp(min=0), (positions >= 0).long()
        sampled = any(start.sampling.temperature > 0 for start in starts)
        whole = any(start.sampling.prompt_logprobs is not None for start in starts)
        capacity = pass_shape(count, longest + 1, sampled).capacity
        self._cache.clear(first, count)  # of an earlier sequence
        self._cache.begin_prefill(first, count, capacity, lengths)
        keep: dict[str, Any] = {} if whole or not model._supports_logits_to_keep() else {"logits_to_keep": 1}
        output = model(
            input_ids=torch.tensor(padded, device="cpu").to(device, non_blocking=True),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{_cache_name(model.__class__): self._cache},
            **keep,
        )
        self.sequences.begin(starts, output.logits.shape[-1])
        self.sequences.step.zero_()
        adjusted = any(start.sampling.adjusted for start in starts)
        self.sequences.advance(output.logits[:, -1], sampled=sampled, adjusted=adjusted, first=first)
        return output.logits if whole else None

    def decode(self, model: Model, passes: int, shape: Shape) -> torch.Tensor:
        """Run passes, replayed if they are captured; returns their tokens as `read` does. Collective, host sync."""
        for _ in range(passes):
            self._run(model, shape)
        self._check()
        return self.read(passes, shape.rows)

    def _step(self, model: Model, shape: Shape) -> None:
        """One pass: every live row of the bucket gets its next token. A function of fixed shapes without host sync."""
        sequences, cache = self.sequences, self._cache
        here = slice(shape.rows)
        cache.begin_decode(shape.rows, shape.capacity, sequences.positions[here])
        experts = self._live_experts(sequences.live[here, None], sequences.num_tokens(shape.rows))
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
        counted: dict[int, torch.Tensor] = {}  # by K, made once for all layers to save launches

        def compute(index: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            num_topk = ids.shape[1]
            if num_topk not in counted:
                counted[num_topk] = live.long().expand(-1, num_topk).reshape(-1)
            self._session.load.add_times(index, ids, counted[num_topk])
            ids = torch.where(live, ids, NONE)
            return self._layers[index].forward_routed(x, ids, weights.float(), num_tokens=num_tokens)

        return compute

    def _run(self, model: Model, shape: Shape) -> None:
        replay = self._replays.get(shape) if self.graphs else None
        if replay is None:
            self._step(model, shape)
        else:
            replay()

    def capture_pass(self, model: Model, shape: Shape) -> None:
        """Capture this rank's pass if necessary. Ranks that have theirs take part in the warm-up passes. Collective."""
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
        for _ in range(_WARM_UPS):
            self._run(model, shape)
        self._check()
        if shape not in self._replays:
            self._pool = self._pool or new_pool()
            self._replays[shape] = capture(lambda: self._step(model, shape), self._pool)
        sequences.live.copy_(live)
        sequences.step.zero_()
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


class RowDecoder:
    """A decoder for plans: this rank's rows, in a cache for `num_rows` sequences of `num_positions` tokens each.

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
        self._model, self._session, self._num_rows = model, session, num_rows
        if session.decoder is not None:
            session.decoder.destroy()
        self._decoder = session.decoder = Decoder(model, graphs=graphs)
        self._captured: set[tuple[int, Shape]] = set()  # (rank, shape), equal on all ranks
        self._wanted: dict[int, int] = {}  # row -> likeliest tokens with each log-probability
        self._decoder.prepare(num_rows, num_positions, sampled=True)
        self._decoder.make_transport(model, num_rows)
        self._decoder.sequences.end_all(end_ids)
        everywhere = session.group.num_ranks
        first = RowStart(row=0, prompt=(0,), max_new_tokens=2, sampling=Sampling(logprobs=0))
        with first_not_finite(model) as name:  # allocates and compiles
            made = self.run(RowsPlan(ended=((),) * everywhere, starts=((first,),) * everywhere))
        check_finite(torch.tensor(made.tokens, device="cpu"), name)
        vocab_size, device = model.get_input_embeddings().weight.shape[0], session.group.device
        most = min(session.transport.config.max_tokens_per_rank * vocab_size, MOST_PROMPT_LOGITS)
        torch.empty(most, dtype=model.dtype, device=device)  # the allocator keeps it for the logits of prompts
        shapes = (pass_shape(1, 1, False),) * everywhere
        self.run(RowsPlan(ended=((),) * everywhere, starts=((),) * everywhere, passes=1, shapes=shapes))

    def run(self, plan: RowsPlan) -> RowsMade:
        """Carry out this rank's part of a plan. Collective, host sync."""
        made = self._run(plan)
        return dataclasses.replace(made, load=self._session.expert_load.tolist()) if plan.load else made

    @torch.inference_mode()
    def _run(self, plan: RowsPlan) -> RowsMade:
        rank, decoder, model = self._session.group.rank, self._decoder, self._model
        live = decoder.sequences.live
        if plan.ended[rank]:
            live[torch.tensor(plan.ended[rank], device=live.device)] = False
        if any(plan.starts):
            return self._start(plan.starts[rank])
        if not plan.passes:
            return RowsMade(tokens=[])
        wanted = set(enumerate(plan.shapes))
        if decoder.graphs and not wanted <= self._captured:
            decoder.capture_pass(model, plan.shapes[rank])
            self._captured |= wanted
        shape = plan.shapes[rank]
        tokens = decoder.decode(model, plan.passes, shape).tolist()
        return RowsMade(tokens=tokens, logprobs=self._logprobs(plan.passes) if shape.adjusted else {})

    def _start(self, starts: Sequence[RowStart]) -> RowsMade:
        logits = self._decoder.start(self._model, starts)
        self._session.transport.check()
        made = self._decoder.read(1, self._num_rows)[0].tolist()
        for start in starts:
            self._wanted.pop(start.row, None)
            if start.sampling.logprobs is not None:
                self._wanted[start.row] = start.sampling.logprobs
        prompts = {}
        for index, start in enumerate(starts):
            if start.sampling.prompt_logprobs is not None:
                assert logits is not None
                mine = logits[index, logits.shape[1] - len(start.prompt) :]
                prompts[index] = prompt_logprobs(mine, start.prompt, start.sampling.prompt_logprobs)
        found = self._logprobs(1) if any(start.row in self._wanted for start in starts) else {}
        first = {index: found[start.row] for index, start in enumerate(starts) if start.row in found}
        return RowsMade(tokens=[[made[start.row] for start in starts]], logprobs=first, prompts=prompts)

    def _logprobs(self, passes: int) -> dict[int, list[Logprob]]:
        """Those of the last passes, of each row that asked for them."""
        adjustments = self._decoder.sequences.adjustments
        assert adjustments is not None
        return adjustments.read(passes, self._wanted)
