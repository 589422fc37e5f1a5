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
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.engines.common.layers import warm_up
from ep_moe.engines.transformers.architectures import num_topk_of
from ep_moe.engines.transformers.decoding.attention import grouped_attention
from ep_moe.engines.transformers.decoding.finite import check_finite, first_not_finite
from ep_moe.engines.transformers.decoding.fixed_cache import FixedCache, windows_of
from ep_moe.engines.transformers.decoding.options import GenerationOptions, check_prompts
from ep_moe.engines.transformers.decoding.passes import Shape, bucket_of, capture, new_pool, pass_shape
from ep_moe.engines.transformers.decoding.sequences import NONE, Sampling, Sequences
from ep_moe.engines.transformers.hooks import Session
from ep_moe.layer import ExpertParallelMoE
from ep_moe.transport import LocalTransport, Transport

PASSES_PER_READ = 16  # after these the host reads tokens, checks the transport and asks whether all ranks have ended
_WARM_UPS = 2  # passes before a capture: kernels compile, libraries allocate their workspaces

Model = Any  # a transformers model; its mixins are more than a type checker can follow


@functools.cache
def _cache_name(model_type: Any) -> str:
    """The parameter of a model's forward that takes the cache; transformers 5.24 has renamed it."""
    return "cache" if "cache" in inspect.signature(model_type.forward).parameters else "past_key_values"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What one rank needs for a generation, sent to all ranks; if it is refused, the other fields are not set."""

    refused: bool = False
    rows: int = 0
    prefills: int = 0  # forward passes for its prompts
    new_tokens: int = 0
    ends: bool = False  # end tokens may end it earlier
    cold: bool = False  # its pass is to be captured and has not been

    def to_ints(self) -> list[int]:
        """The fields as integers, in order."""
        return [int(value) for value in dataclasses.astuple(self)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecoderMemory:
    """Bytes that a decoder holds on this rank, besides the model's own transport.

    Args:
        peer_bytes: memory of its transport that peers map, 0 if they map none. cache_bytes: keys and values.
    """

    peer_bytes: int
    cache_bytes: int


def decode_transport(session: Session) -> Any:
    """The class of the transport of decode passes: the model's, in place of `local` on a GPU one without host syncs.

    The kernels of `nvlink` serve a single rank too. Local.
    """
    if isinstance(session.transport, LocalTransport) and session.group.device.type == "cuda":
        from ep_moe.transport.one_sided import NvlinkTransport  # needs Triton, which a machine with GPUs has

        return NvlinkTransport
    return type(session.transport)


class _PassExperts:
    """Computes experts for the live rows of one pass; other rows go to no expert, and their results are zero.

    Args:
        live: [B] bool. num_tokens: [1] int32, number of rows up to the last live one; rows among them that are not live
            get ids -1.
    """

    def __init__(
        self, session: Session, layers: tuple[ExpertParallelMoE, ...], live: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        self._session, self._layers = session, layers
        self._live, self._num_tokens = live[:, None], num_tokens
        self._counted: dict[int, torch.Tensor] = {}  # by K, made once for all layers to save launches

    def __call__(self, index: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute x [B, H] in layer `index`. Collective, no host sync with a transport that has none."""
        num_topk = ids.shape[1]
        if num_topk not in self._counted:
            self._counted[num_topk] = self._live.long().expand(-1, num_topk).reshape(-1)
        self._session.load.add_times(index, ids, self._counted[num_topk])
        ids = torch.where(self._live, ids, NONE)
        return self._layers[index].forward_routed(x, ids, weights.float(), num_tokens=self._num_tokens)


class Decoder:
    """Generates with one model, on all ranks in step. Made by `ep_moe.engines.transformers.generate`.

    It has its own transport for the decode passes, sized for the largest bucket of any rank: the model's transport is
    sized for prompts, and the memory of a batch, and so of a graph, grows with M.

    Args:
        model: of `from_pretrained` or `shard_experts`; no reference to it is kept.
        graphs: capture the passes; else they run eagerly, the same operations in the same order. May be set between
            generations, to the same on all ranks.
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
    def memory(self) -> DecoderMemory:
        """Memory that the decoder holds now. Local, no host sync."""
        return DecoderMemory(peer_bytes=getattr(self._transport, "peer_bytes", 0), cache_bytes=self._cache.num_bytes)

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
        session, error = self._session, None
        try:
            session.transport.check()
            check_prompts(prompts, mask, options, model)
            num_positions = prompts.shape[1] + options.max_new_tokens
            shape = self.prepare(prompts.shape[0], num_positions, options.temperature > 0)
            request = self._request(prompts, options, shape)
        except ValueError as refusal:
            error, request = refusal, _Request(refused=True)
        requests = self._exchange(request)
        if error is not None:
            raise error
        refused = [rank for rank, other in enumerate(requests) if other.refused]
        if refused:
            raise ValueError(f"rank {refused[0]} refused its prompts; its own error says why")
        num_steps = max(other.new_tokens for other in requests)
        if not num_steps:
            return torch.full((prompts.shape[0], options.max_new_tokens), NONE, device="cpu")
        with first_not_finite(model) as name:
            logits = self._prefill(model, prompts, mask, shape, max(other.prefills for other in requests))
        sequences = self._begin(prompts, mask, options)
        if logits is not None:
            sequences.advance(logits, sampled=shape.sampled)
        session.transport.check()
        made = [self.read(1, prompts.shape[0])]
        check_finite(made[0], name)
        on_step(1)
        done, may_end = 1, any(other.ends for other in requests)
        if num_steps > 1:
            self._make_ready(model, shape, requests)
        while done < num_steps and not (may_end and self._all_have_ended()):
            passes = min(PASSES_PER_READ, num_steps - done)
            for _ in range(passes):
                self.run(model, shape)
            self.check()
            made.append(self.read(passes, prompts.shape[0]))
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
        self._make_ready(model, shape, self._exchange(_Request(rows=num_rows, cold=self.is_cold(shape))))

    def _make_ready(self, model: Model, shape: Shape, requests: list[_Request]) -> None:
        """Make the transport and capture the pass, if any rank lacks them. Collective."""
        rebuilt = self.make_transport(model, max(other.rows for other in requests))
        if self.graphs and (rebuilt or any(other.cold for other in requests)):
            self.capture_pass(model, shape)

    def is_cold(self, shape: Shape) -> bool:
        """Whether a pass of this shape has to be captured first. Local."""
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

    def _request(self, prompts: torch.Tensor, options: GenerationOptions, shape: Shape) -> _Request:
        num_rows, num_columns = prompts.shape
        return _Request(
            rows=num_rows,
            prefills=-(-num_rows // self._rows_per_prefill(num_columns)),
            new_tokens=options.max_new_tokens if num_rows else 0,
            ends=bool(options.end_ids),
            cold=self.is_cold(shape),
        )

    def _rows_per_prefill(self, num_columns: int) -> int:
        return max(self._session.transport.config.max_tokens_per_rank // max(num_columns, 1), 1)

    def _exchange(self, request: _Request) -> list[_Request]:
        """The requests of all ranks. Collective, host sync."""
        group = self._session.group
        table = torch.zeros(group.num_ranks, len(dataclasses.fields(_Request)), dtype=torch.int64, device="cpu")
        table[group.rank] = torch.tensor(request.to_ints(), device="cpu")
        return [
            _Request(
                refused=bool(refused), rows=rows, prefills=prefills, new_tokens=new, ends=bool(ends), cold=bool(cold)
            )
            for refused, rows, prefills, new, ends, cold in group.all_reduce_sum(table.to(group.device)).tolist()
        ]

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

    def _prefill(
        self, model: Model, prompts: torch.Tensor, mask: torch.Tensor | None, shape: Shape, passes: int
    ) -> torch.Tensor | None:
        """Fill the cache; returns the logits [B, V] after each prompt, None without rows. Collective."""
        num_rows, num_columns = prompts.shape
        share, logits = self._rows_per_prefill(num_columns), []
        self._cache.clear()
        for index in range(passes):
            part = slice(index * share, min((index + 1) * share, num_rows))
            if part.start >= num_rows:
                self.prefill_nothing(model)
                continue
            own_mask = None if mask is None else mask[part]
            logits.append(self.prefill(model, prompts[part], own_mask, part.start, shape.capacity))
        return torch.cat(logits) if logits else None

    def clear(self, first: int, count: int) -> None:
        """Zero the keys and values of rows [first, first + count). Local, no host sync."""
        self._cache.clear(first, count)

    def prefill_nothing(self, model: Model) -> None:
        """Take part in a prefill of other ranks. Collective."""
        with self._session.sitting_out():
            dummy = torch.zeros(1, 1, dtype=torch.int64, device=self._session.group.device)
            model(input_ids=dummy, use_cache=False)

    def prefill(
        self, model: Model, prompts: torch.Tensor, mask: torch.Tensor | None, first: int, capacity: int
    ) -> torch.Tensor:
        """Compute the prompts [B', P] of rows [first, first + B') in one pass, and store their keys and values.

        Args:
            mask: [B', P], 0 for padding on the left; None without. capacity: C of the rows' sequences.
        Returns: the logits [B', V] after each prompt. Collective, no host sync on a transport that has none.
        """
        lengths = None if mask is None else mask.sum(-1)
        positions = torch.arange(prompts.shape[1], device=prompts.device)[None]
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
        keep: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self._cache.begin_prefill(first, prompts.shape[0], capacity, lengths)
        output = model(
            input_ids=prompts,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{_cache_name(model.__class__): self._cache},
            **keep,
        )
        return output.logits[:, -1]

    def _begin(self, prompts: torch.Tensor, mask: torch.Tensor | None, options: GenerationOptions) -> Sequences:
        """Set the state after the prompts: each row's last position, and the number of tokens that it wants."""
        sequences = self.sequences
        num_rows, num_columns = prompts.shape
        sequences.end_all(options.end_ids)
        sampling = None
        if options.temperature > 0:
            like = sequences.temperature[:num_rows]
            sampling = Sampling(
                temperature=torch.full_like(like, options.temperature),
                top_p=torch.full_like(like, options.top_p),
                seeds=torch.tensor(options.seeds_of(num_rows), dtype=torch.int64, device="cpu").to(prompts.device),
            )
        lengths = prompts.new_full((num_rows,), num_columns) if mask is None else mask.sum(-1)
        sequences.begin(0, lengths - 1, torch.full_like(lengths, options.max_new_tokens), sampling)
        return sequences

    def _step(self, model: Model, shape: Shape) -> None:
        """One pass: every live row of the bucket gets its next token. A function of fixed shapes without host sync."""
        sequences, cache, session = self.sequences, self._cache, self._session
        here = slice(shape.rows)
        cache.begin_decode(shape.rows, shape.capacity, sequences.positions[here])
        experts = _PassExperts(session, self._layers, sequences.live[here], sequences.num_tokens(shape.rows))
        text = model.config.get_text_config()
        with session.decoding(experts), grouped_attention(text):
            output = model(
                input_ids=sequences.tokens[here, None],
                attention_mask=cache.masks(text, model.dtype),
                position_ids=sequences.positions[here, None],
                use_cache=True,
                **{_cache_name(model.__class__): cache},
            )
        sequences.advance(output.logits[:, -1], sampled=shape.sampled)

    def run(self, model: Model, shape: Shape) -> None:
        """One pass, replayed if it is captured. Collective, no host sync."""
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
            self.run(model, shape)
        self.check()
        if shape not in self._replays:
            self._pool = self._pool or new_pool()
            self._replays[shape] = capture(lambda: self._step(model, shape), self._pool)
        sequences.live.copy_(live)
        sequences.step.zero_()
        group.wait_for_all("capture")  # captures take different times, and the next pass has a timeout

    def check(self) -> None:
        """Raise errors of the passes before their tokens are read. Host sync."""
        assert self._transport is not None
        self._transport.check()

    def read(self, passes: int, rows: int) -> torch.Tensor:
        """The tokens of the last passes, [passes, B] on the host, NONE where a row had ended. Host sync."""
        self.sequences.step.zero_()
        return self.sequences.made[:passes, :rows].to("cpu", copy=True)

    def _all_have_ended(self) -> bool:
        """Whether no row of any rank is live. Collective, host sync."""
        return not int(self._session.group.all_reduce_sum(self.sequences.live.sum(0, keepdim=True)))
