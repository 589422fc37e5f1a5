"""The work of ranks that generate in step: plans, the shapes of decode passes, their capture as CUDA graphs.

A plan is equal on all ranks. It says what every rank does next, so that ranks need not agree on anything else: which of
them sit out a prefill, and which capture a pass that the others only take part in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.placement import Placement

LEAST_CAPACITY = 256  # a pass with fewer positions takes as long, and each capacity is a graph of its own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The key of a captured pass: rows of its bucket, capacity in positions, whether it samples, and whether it also
    adjusts logits and keeps log-probabilities: such a pass samples, which changes no token of greedy rows."""

    rows: int
    capacity: int
    sampled: bool
    adjusted: bool = False


def pass_shape(num_rows: int, num_positions: int, sampled: bool, adjusted: bool = False) -> Shape:
    """The shape of decode passes for the first rows of a rank, 0 or more, up to a number of positions. Local."""
    capacity = bucket_of(num_positions, LEAST_CAPACITY)
    return Shape(rows=bucket_of(num_rows), capacity=capacity, sampled=sampled or adjusted, adjusted=adjusted)


def all_shapes(num_rows: int, num_positions: int) -> list[Shape]:
    """Those of all decode passes for up to so many rows and positions, the largest first. Local."""
    most = (bucket_of(num_rows), bucket_of(num_positions))
    rows, positions = (range(number.bit_length() - 1, -1, -1) for number in most)
    found = [
        pass_shape(1 << row, 1 << position, sampled, adjusted)
        for row in rows
        for position in positions
        for sampled, adjusted in ((True, True), (True, False), (False, False))
    ]
    return list(dict.fromkeys(found))


def bucket_of(number: int, least: int = 1) -> int:
    """The power of two that a number of rows or positions is rounded up to. Local."""
    return max(1 << max(number - 1, 0).bit_length(), least)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of a sequence are chosen, and what is returned besides.

    Logits are adjusted first: penalties, `logit_bias`, `min_tokens`, `grammar`. Then they are divided by the
    temperature, and a token is drawn among those that `min_p`, `top_k` and `top_p` leave, in this order, each on the
    probabilities that the one before has left.

    Args:
        temperature: 0 takes the likeliest token. top_p: in (0, 1]; the likeliest tokens that together reach it.
        top_k: so many of the likeliest tokens; 0 for all. min_p: in [0, 1]; tokens with at least this part of the
            likeliest one's probability.
        seed: 64 bits; a drawn token depends on it, the position and the logits alone.
        repetition_penalty: above 0; the logits of tokens of the prompt and of the continuation are divided by it if
            they are positive, else multiplied. presence_penalty: subtracted from the logits of tokens of the
            continuation. frequency_penalty: subtracted as often as they occur there.
        logit_bias: (token, added to its logit) pairs.
        min_tokens: before so many new tokens no token ends the sequence. stop_ids: tokens that end it besides the
            model's own. ignore_end: the model's own do not.
        grammar: of the text, as `ep_moe.grammar` reads it; "" for any text.
        logprobs: log-probabilities of each new token and of so many likeliest ones beside it, before any adjustment;
            None for none. prompt_logprobs: the same of the prompt's tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False
    grammar: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def adjusted(self) -> bool:
        """Whether passes adjust its logits or keep its log-probabilities."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.logit_bias or self.grammar) or self.min_tokens > 0 or self.logprobs is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowStart:
    """A sequence that starts in a row of a rank.

    Args:
        row: its index, in which no sequence runs. prompt: token ids, one or more. max_new_tokens: 1 or more.
        prefix: places in the prefix cache of the blocks that the prompt begins with, not all of it.
        num_made: so many tokens at the end of the prompt are the sequence's own, of a row that is lost: penalties,
            `min_tokens` and the grammar go on from there.
    """

    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    prefix: tuple[int, ...] = ()
    num_made: int = 0

    @property
    def made(self) -> tuple[int, ...]:
        """These tokens."""
        return self.prompt[len(self.prompt) - self.num_made :]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """Natural logarithms of probabilities at one position, with all tokens of the vocabulary in the sum.

    Args:
        value: of the token. rank: of the token, 1 for the likeliest. top: (token, logarithm) of the likeliest ones.
    """

    value: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsMade:
    """What a plan has made on one rank.

    Args:
        tokens: [passes][row] of the rows up to the bucket's size, NONE for a row without a token, BROKEN for one whose
            logits are not finite, which ends it; of a plan with chunks [1][chunk], NONE before the last of a prompt. A
            row whose grammar is being compiled has no tokens until then.
        logprobs: of the rows (or chunks) that asked for them, of each pass.
        prompts: of the chunks that asked for them, of the prompt's tokens behind each of the chunk's.
        ended: rows (or chunks) whose grammar ends them behind these tokens: "" for a complete text, else what is wrong.
        load: [layer][expert], this rank's tokens that went to each expert so far; empty if not asked for.
        rebalancing: with `load`, the entries of this rank's `RebalanceStatus`; empty without a rebalancer.
        placements: of rank 0, with `load`, which rank has which expert by layer; empty without a rebalancer.
        waited: with `load`: seconds that this rank's rounds have waited so far, for each source rank; or one number,
            for all of them, if the transport does not tell them apart.
    """

    tokens: list[list[int]]
    logprobs: dict[int, list[Logprob]] = dataclasses.field(default_factory=dict)
    prompts: dict[int, list[Logprob]] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    load: list[list[int]] = dataclasses.field(default_factory=list)
    rebalancing: dict[str, Any] = dataclasses.field(default_factory=dict)
    placements: tuple[Placement, ...] = ()
    waited: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsPlan:
    """A prefill, or a few decode passes; each field but `passes` and `load` has an entry for each rank.

    Args:
        saves: (row, index, place): block `index` of a row is copied to a place of the prefix cache, before anything
            else; () for none on any rank.
        ended: rows that end before a pass because their client has left.
        starts: sequences that get a row; their first chunks are in the same plan.
        chunks: (row, number of tokens) of the prompts that are prefilled further, in one pass: at most
            max_tokens_per_rank tokens, each row padded to the most. The last chunk of a prompt makes a token.
        passes: decode passes, 0 in a plan with chunks.
        shapes: of these passes.
        load: the ranks also report the load of their experts, and how long they have waited.
    """

    saves: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    ended: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[RowStart, ...], ...]
    chunks: tuple[tuple[tuple[int, int], ...], ...] = ()
    passes: int = 0
    shapes: tuple[Shape, ...] = ()
    load: bool = False


MESSAGES = (RowsPlan, RowStart, Shape, Sampling, RowsMade, Logprob)  # what ranks send to each other


def new_pool() -> Any:
    """A memory pool for graphs, which can share it because they are never replayed at the same time. Local."""
    return torch.cuda.graph_pool_handle()


def capture(call: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture a call, which is not run, as a CUDA graph; returns its replay. Local, host sync.

    Errors: RuntimeError for a call that cannot be captured, for example one with a host sync.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's thread queries events meanwhile, which would invalidate a global capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        raise RuntimeError(
            f"a decode pass cannot be captured as a CUDA graph, decode_graphs=False decodes without graphs: {error}"
        ) from error
    return graph.replay
