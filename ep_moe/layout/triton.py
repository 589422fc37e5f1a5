"""Packing and unpacking as Triton kernels, without host sync; launches do not depend on the ids.

Safe in CUDA graphs. Runs on a CPU under TRITON_INTERPRET=1.

Letters: N received token rows, K top-k, H hidden, G scale groups, L local experts, C rows of an expert in BATCHED.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
import triton

from ep_moe.config import Layout
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.rows.permute import (
    Ids,
    Placed,
    Places,
    ScaleGroups,
    Words,
    _count_rows_kernel,
    _merge_and_place_kernel,
    _merge_repeats_kernel,
    _pack_rows_kernel,
    _sum_counts_kernel,
    _weighted_sum_kernel,
)
from ep_moe.layout.base import Packed, TokenRows
from ep_moe.layout.frame import Counts, Frame, Place, make_frame
from ep_moe.quant import QuantScheme, as_bytes

_LAST_ID = torch.iinfo(torch.int32).max
_MERGE_IDS = 1024  # ids that one program merges
_BLOCK_COMPARISONS = 4096  # of ids, by which a token's program finds its rows' order within the block of tokens
_BLOCK_IDS = 512  # the most ids of a block
_MOST_BLOCKS = 4  # of tokens that one program merges and counts: more take several kernels
_FEW_PAIRS = 1024  # of tokens and experts, which each program that copies a token compares with those of its token
_FEW_COMPARISONS = 8192  # of such a program
_FEWEST_BINS = 32  # of a histogram: one for each thread of a warp
_COUNTED_EXPERTS = 32  # experts that one program counts
_SUMMED_COUNTS = 4096  # counts that are summed at a time
UNIT_WORDS = 4  # 32-bit words in one 16-byte access
_COPIED_WORDS = 2048  # the most words that one program copies
_SUMMED_BY_THREAD = 8  # columns: one 16-byte access in the narrower dtypes
_MOST_LAUNCHES = 512  # of each kind that are kept, some for each N


def merge_repeats(
    ids: torch.Tensor, weights: torch.Tensor, *, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.layout.merge_repeats` in one launch. Local, on the current stream, no host sync."""
    num_tokens, num_topk = ids.shape
    if ids.stride(1) != 1:
        ids = ids.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    local_ids = torch.empty(num_tokens, num_topk, dtype=torch.int32, device=ids.device)
    local_weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=ids.device)
    if local_ids.numel():
        own = first, _LAST_ID if last is None else last
        strides = ids.stride(0), weights.stride(0)
        launch = _merge_launch((num_tokens, num_topk), own, strides, ids.dtype, ids.device)
        launch((Placed(ids, weights, local_ids, local_weights, None, None, None),))
    return local_ids, local_weights


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def _merge_launch(
    ids_shape: tuple[int, int],
    own: tuple[int, int],
    strides: tuple[int, int],
    ids_dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """The launch of `merge_repeats` for experts [own[0], own[1]); of calls with ids of this dtype."""
    del ids_dtype  # Triton reads it off the tensors of the first call
    num_tokens, num_topk = ids_shape
    columns = triton.next_power_of_2(num_topk)
    tokens = max(_MERGE_IDS // columns, 1)
    return Kernel(
        _merge_repeats_kernel,
        triton.cdiv(num_tokens, tokens),
        settings=(num_tokens, *own, *strides),
        constants={"K": num_topk, "COLUMNS": columns, "TOKENS": tokens},
        device=device,
    )


def block_tokens(num_topk: int) -> int:
    """The tokens of a block, in which the rows of an expert are counted."""
    columns = triton.next_power_of_2(num_topk)
    return max(min(_BLOCK_COMPARISONS // columns**2, _BLOCK_IDS // columns), 1)


def _ids_constants(experts: int, num_topk: int) -> Ids:
    """How kernels read ids [N, K] in blocks of tokens."""
    columns = triton.next_power_of_2(num_topk)
    return Ids(L=experts, K=num_topk, COLUMNS=columns, TOKENS=block_tokens(num_topk))


def _placement(frame: Frame) -> tuple[int, int, Layout]:
    """What determines the rows of experts: the height of one if BATCHED, the alignment of starts if not."""
    return frame.height, frame.alignment, frame.layout


def _new_counts(ids: torch.Tensor, experts: int) -> Counts:
    """Counts of ids [N, K], to be filled."""
    num_tokens, num_topk = ids.shape
    like: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    before = torch.empty(triton.cdiv(num_tokens, block_tokens(num_topk)), experts, **like)
    counts, starts = torch.empty(2, -(-experts // UNIT_WORDS) * UNIT_WORDS, **like)
    return Counts(before, counts[:experts], starts[:experts])


def _count_rows(ids: torch.Tensor, frame: Frame, counts: Counts) -> None:
    """Count the rows of every expert, in total and in the blocks of tokens before each block. Two launches."""
    if frame.num_local_experts == 0:
        return
    count, add = _count_launches(ids.shape, frame.num_local_experts, _placement(frame), _SUMMED_COUNTS, ids.device)
    if len(counts.before):
        count((ids, counts.before))
    add(counts)


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def _count_launches(
    ids_shape: tuple[int, int],
    experts: int,
    placed: tuple[int, int, Layout],
    summed_counts: int,
    device: torch.device,
) -> tuple[Kernel, Kernel]:
    """The launches of `_count_rows`: one takes ids and counts, the other counts, counts of experts, and starts."""
    (num_tokens, num_topk), (height, alignment, layout) = ids_shape, placed
    blocks, padded = triton.cdiv(num_tokens, block_tokens(num_topk)), triton.next_power_of_2(experts)
    count = Kernel(
        _count_rows_kernel,
        (blocks, triton.cdiv(experts, _COUNTED_EXPERTS)),
        settings=(num_tokens,),
        constants={"IDS": _ids_constants(experts, num_topk), "EXPERTS": _COUNTED_EXPERTS},
        device=device,
    )
    add = Kernel(
        _sum_counts_kernel,
        1,
        settings=(blocks, height, alignment),
        constants={
            "L": experts,
            "EXPERTS": padded,
            "BLOCKS": max(summed_counts // padded, 1),
            "BATCHED": layout is Layout.BATCHED,
        },
        device=device,
    )
    return count, add


def is_one_launch(ids_shape: torch.Size) -> bool:
    """Whether one program merges and counts ids [N, K]: up to `_MOST_BLOCKS` blocks of tokens."""
    num_tokens, num_topk = ids_shape
    return num_tokens <= _MOST_BLOCKS * block_tokens(num_topk)


def are_few(ids_shape: torch.Size) -> bool:
    """Whether programs that copy tokens with ids [N, K] find their rows on their own."""
    num_tokens, num_topk = map(triton.next_power_of_2, ids_shape)
    return num_tokens * num_topk <= min(_FEW_PAIRS, _FEW_COMPARISONS // num_topk)


class PlaceShape(NamedTuple):
    """What determines the launch that merges and counts tokens of a few blocks.

    Example: `of(shape, own, strides, frame)` is None for 300 tokens with 8 experts each, which are five blocks of 64.
    """

    num_tokens: int
    num_topk: int
    experts: int
    own: tuple[int, int]  # [first, last) of all experts
    strides: tuple[int, int]  # of rows of ids and weights
    height: int  # rows of an expert if BATCHED
    alignment: int  # of starts if not
    batched: bool

    @classmethod
    def of(
        cls, ids_shape: torch.Size, own: tuple[int, int], strides: tuple[int, int], frame: Frame
    ) -> "PlaceShape | None":
        """The shape of a launch for ids [N, K]; None if they are too many for one program."""
        if not is_one_launch(ids_shape):
            return None
        batched = frame.layout is Layout.BATCHED
        own_experts = frame.num_local_experts
        return cls(ids_shape[0], ids_shape[1], own_experts, own, strides, frame.height, frame.alignment, batched)

    @property
    def settings(self) -> tuple[int, ...]:
        """The numbers that the kernel takes."""
        return self.num_tokens, *self.own, *self.strides, self.height, self.alignment

    @property
    def constants(self) -> dict[str, Any]:
        """Those of the kernel."""
        return {
            "IDS": _ids_constants(self.experts, self.num_topk),
            "EXPERTS": max(triton.next_power_of_2(self.experts + 1), _FEWEST_BINS),
            "BLOCKS": triton.cdiv(self.num_tokens, block_tokens(self.num_topk)),
            "BATCHED": self.batched,
        }

    @property
    def constants_of_few(self) -> dict[str, Any]:
        """Those of one block with all tokens."""
        ids = self.constants["IDS"]._replace(TOKENS=triton.next_power_of_2(self.num_tokens))
        return self.constants | {"IDS": ids, "BLOCKS": 1}


Step = tuple[Kernel, tuple[Any, ...]]  # a launch with the names of its tensors


def place_launches(
    names: Placed,
    ids_shape: torch.Size,
    own: tuple[int, int],
    strides: tuple[int, int],
    frame: Frame,
    *,
    ids_dtype: torch.dtype,
    device: torch.device,
) -> tuple[PlaceShape | None, list[Step]]:
    """The launches of `merge_repeats` and `_count_rows` over tensors of these names: one, and its shape, or three."""
    shape = PlaceShape.of(ids_shape, own, strides, frame)
    if shape is not None:
        settings, constants = shape.settings, shape.constants
        one = Kernel(_merge_and_place_kernel, 1, settings=settings, constants=constants, device=device, early=True)
        return shape, [(one, (names,))]
    merge = _merge_launch(tuple(ids_shape), own, strides, ids_dtype, device)
    count, add = _count_launches(tuple(ids_shape), frame.num_local_experts, _placement(frame), _SUMMED_COUNTS, device)
    counts = names.before, names.expert_num_tokens, names.expert_row_start
    merged = names._replace(before=None, expert_num_tokens=None, expert_row_start=None)
    return None, [(merge, (merged,)), (count, (names.local_ids, names.before)), (add, counts)]


def row_unit(x: torch.Tensor) -> int:
    """The unit, in 32-bit words, by which rows [N, V] are copied: the largest of 4, 2 and 1 that divides a row.

    Example: 48 elements of "nvfp4" are 24 bytes, copied 8 at a time.

    Errors: ValueError if a row is not a multiple of 4 bytes. Local, no host sync.
    """
    row_bytes = x.shape[1] * x.element_size()
    if row_bytes % 4:
        raise ValueError(f"a row of {row_bytes} bytes is not a multiple of 4")
    return math.gcd(row_bytes // 4, UNIT_WORDS)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """View rows [N, V] as int32 words [N, W], each row aligned to `row_unit`; unaligned rows are copied first.

    Errors: ValueError if a row is not a multiple of 4 bytes. Local, no host sync.
    """
    unit_bytes = 4 * row_unit(x)
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % unit_bytes or x.data_ptr() % unit_bytes:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def copy_block(row_words: int) -> tuple[int, int]:
    """The words of a row that one program copies, and its warps: at least 16 bytes for every thread."""
    words = min(max(triton.next_power_of_2(row_words), 32 * UNIT_WORDS), _COPIED_WORDS)
    return words, min(words // (32 * UNIT_WORDS), 4)


def pack(
    rows: TokenRows,
    layout: Layout,
    *,
    scheme: QuantScheme,
    dtype: torch.dtype,
    place: Place | None = None,
    **sizes: Any,
) -> Packed:
    """`ep_moe.layout.pack`, whose other arguments are `sizes`, in three launches, two with `place`; rows that are no
    whole words are copied before and after.

    Errors: ValueError in BATCHED if an expert may have more than C rows, whichever it is: `rows.max_expert_rows`, or N
    if there is no such bound, can be checked without a host sync. Local, on the current stream, no host sync.
    """
    num_tokens, num_topk = rows.local_topk_ids.shape
    most = num_tokens if rows.max_expert_rows is None else min(num_tokens, rows.max_expert_rows)
    if layout is Layout.BATCHED and most > sizes["capacity"]:
        raise ValueError(f"an expert may have {most} rows, which exceeds capacity ({sizes['capacity']})")
    width, size = rows.x.shape[1], rows.x.element_size()
    if width * size % 4 and (layout is not Layout.FLAT or not rows.x.is_contiguous()):
        wide = rows.x.new_empty(num_tokens, width + (-width * size % 4) // size)
        wide[:, :width] = rows.x
        packed = pack(dataclasses.replace(rows, x=wide), layout, scheme=scheme, dtype=dtype, place=place, **sizes)
        x = packed.batch.x[..., :width].contiguous()
        return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, x=x))
    frame = make_frame(rows, layout, **sizes)
    ids = rows.local_topk_ids.contiguous()
    counts = _new_counts(ids, frame.num_local_experts)
    if place is None:
        _count_rows(ids, frame, counts)
    else:
        place(frame, counts)
    token_to_row = torch.empty(num_tokens, num_topk, dtype=torch.int32, device=ids.device)
    _copy_rows(rows, ids, frame, counts, token_to_row)
    return frame.finish(rows, scheme, dtype, counts.expert_row_start, counts.expert_num_tokens, token_to_row)


def _copy_rows(rows: TokenRows, ids: torch.Tensor, frame: Frame, counts: Counts, token_to_row: torch.Tensor) -> None:
    """Fill the frame and `token_to_row`. One launch."""
    num_tokens, num_topk = ids.shape
    if num_tokens == 0:
        return
    copy = frame.x.data_ptr() != rows.x.data_ptr()
    x = as_words(rows.x) if copy else None
    scale = None if rows.scale is None else as_bytes(rows.scale)
    shape = CopyShape.of(rows if x is None else dataclasses.replace(rows, x=x), frame, copied=copy)
    copy_launch(shape, None if scale is None else scale.dtype, ids.device)(
        (
            Places(ids, counts.before, counts.expert_row_start),
            x,
            scale,
            token_to_row,
            frame.row_index,
            frame.x.view(-1, frame.x.shape[-1]).view(torch.int32) if copy else None,
            None if frame.scale is None else as_bytes(frame.scale),
        )
    )


class CopyShape(NamedTuple):
    """What determines the launch that copies rows."""

    num_tokens: int
    num_topk: int
    experts: int
    row_words: int  # 32-bit words of a row
    unit: int  # `row_unit`
    groups: int  # scales of a row
    copied: bool  # False: values stay where they are
    indexed: bool  # whether there is a row_index
    strides: tuple[int, ...]  # of the rows in units, of the scales by token and by group
    height: int  # rows that share a matrix of scales
    out_rows: int  # the capacity in rows

    @classmethod
    def of(cls, rows: TokenRows, frame: Frame, *, copied: bool = True) -> "CopyShape":
        """The shape of a launch that copies rows to a frame, or only finds where they go."""
        x, scale = rows.x, rows.scale
        num_tokens, num_topk = rows.local_topk_ids.shape
        unit = row_unit(x) if copied else UNIT_WORDS
        return cls(
            num_tokens=num_tokens,
            num_topk=num_topk,
            experts=frame.num_local_experts,
            row_words=x.shape[1] * x.element_size() // 4,
            unit=unit,
            groups=0 if scale is None else scale.shape[1],
            copied=copied,
            indexed=frame.row_index is not None,
            strides=(
                x.stride(0) * x.element_size() // 4 // unit * copied,
                *((0, 0) if scale is None else scale.stride()),
            ),
            height=frame.height,
            out_rows=frame.num_rows,
        )

    @property
    def words(self) -> tuple[Words, int, int]:
        """How a row is copied: programs of a token, and the warps of each."""
        block, num_warps = copy_block(self.row_words)
        programs = triton.cdiv(self.row_words, block) if self.copied else 1
        return Words(ROW=self.row_words, UNIT=self.unit, BLOCK=block), programs, num_warps


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def copy_launch(shape: CopyShape, scale_dtype: torch.dtype | None, device: torch.device) -> Kernel:
    """The launch that copies rows of this shape, with scales of this dtype as bytes.

    It takes `Places`, rows as words, scales as bytes, token_to_row, row_index, rows as words, scales as bytes; None for
    absent ones.
    """
    del scale_dtype  # Triton reads it off the tensors of the first call
    words, programs, num_warps = shape.words
    groups = triton.next_power_of_2(max(shape.groups, 1))
    return Kernel(
        _pack_rows_kernel,
        (shape.num_tokens, programs),
        settings=(shape.height, shape.out_rows, *shape.strides),
        constants={
            "IDS": _ids_constants(shape.experts, shape.num_topk),
            "WORDS": words,
            "SCALES": ScaleGroups(G=shape.groups, GROUPS=groups),
        },
        options={"num_warps": num_warps},
        device=device,
        early=True,
    )


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def _sum_launch(
    summed: torch.Size,
    hidden: int,
    strides: tuple[int, int],
    dtypes: tuple[torch.dtype | None, ...],
    device: torch.device,
) -> Kernel:
    """The launch of `weighted_sum`, for y, weights, shared and out of these dtypes; None for those that are absent."""
    del dtypes  # Triton reads them off the tensors of the first call
    return prepare_weighted_sum(summed, hidden, device, shared_stride=strides[0], out_stride=strides[1])


def prepare_weighted_sum(
    summed: torch.Size, hidden: int, device: torch.device, *, shared_stride: int = 0, out_stride: int
) -> Kernel:
    """Prepare `weighted_sum` for a token_to_row of this shape; it takes y, token_to_row, weights, shared and out."""
    num_tokens, num_topk = summed
    block = min(max(triton.next_power_of_2(hidden), 32 * _SUMMED_BY_THREAD), 128 * _SUMMED_BY_THREAD)
    return Kernel(
        _weighted_sum_kernel,
        (num_tokens, triton.cdiv(hidden, block)),
        settings=(shared_stride, out_stride),
        constants={"H": hidden, "K": num_topk, "BLOCK": block},
        options={"num_warps": block // (32 * _SUMMED_BY_THREAD), "enable_fp_fusion": False},
        device=device,
        early=True,
    )


def weighted_sum(
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ep_moe.layout.weighted_sum` in one launch. Local, on the current stream, no host sync."""
    y, token_to_row = y.reshape(-1, y.shape[-1]).contiguous(), token_to_row.contiguous()
    num_tokens, hidden = token_to_row.shape[0], y.shape[1]
    target = out if out is not None and out.stride(1) == 1 else y.new_empty(num_tokens, hidden)
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    if target.numel():
        weights = None if topk_weights is None else topk_weights.contiguous()
        strides = 0 if shared is None else shared.stride(0), target.stride(0)
        tensors = y, token_to_row, weights, shared, target
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (y, weights, shared, target))
        _sum_launch(token_to_row.shape, hidden, strides, dtypes, y.device)(tensors)
    return target if out is None or target is out else out.copy_(target)
