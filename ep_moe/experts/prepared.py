"""The launches of the experts' calls: found once for a shape, then repeated with other addresses.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts, N received token rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ep_moe.experts.grouped_gemm import Backend, Between, CallShape
from ep_moe.experts.launching import aligned
from ep_moe.experts.ready_rows import inner_order, inner_width
from ep_moe.experts.requantize import prepare_requantize, prepare_tile_list
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.layout.triton import prepare_weighted_sum
from ep_moe.quant import as_bytes
from ep_moe.weights import ExpertWeights

_NAMES = {  # field of a batch -> name of an argument, where they differ
    "expert_row_start": "row_start",
    "expert_num_tokens": "num_tokens",
    "scale": "x_scale",
}
_STRIDED = ("x", "x_scale")  # whose strides kernels take; other tensors are contiguous


def batch_tensors(batch: ExpertBatch) -> dict[str, torch.Tensor]:
    """The tensors of a batch that kernels read, by the names of `PreparedCall`, in the order of `addressed`. Local."""
    return {_NAMES.get(field, field): getattr(batch, field) for field in batch.addressed}


def weight_tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The tensors of weights that kernels read, by the names of `PreparedCall`. Local."""
    named: dict[str, torch.Tensor | None] = {
        f"{name}_{part}": tensor
        for name, matrix in (("w13", weights.w13), ("w2", weights.w2))
        for part, tensor in matrix.tensors.items()
    }
    named |= {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias, "static_scale": weights.w2_input_scale}
    return {name: tensor for name, tensor in named.items() if tensor is not None} | weights.per_expert.tensors


def with_dense_rows(batch: ExpertBatch) -> ExpertBatch:
    """The batch, with a copy of x if its rows have gaps between their columns, or are apart. Local."""
    if batch.x.stride(-1) == 1 and (batch.x.dim() == 2 or batch.x.is_contiguous()):
        return batch
    return dataclasses.replace(batch, x=batch.x.contiguous())


class PreparedCall:
    """The launches of calls of one shape. Their tensors have names: those of the batch, "y", those of the weights,
    those of `workspace`.

    Args:
        shape: of the calls. backend: of both GEMMs. tiles: of both GEMMs.
        given: names of the tensors of the batch that are there. held: of the weights.
        summed: N and K of FLAT batches, whose rows are weighted and summed.

    Attributes:
        sequence: the kernels, whose workspace has the intermediates.
        row_tiles: how many there are at most, and of how many rows each.
        steps: their names: "tile_list", "gather", "first", "find_amax", "requantize", "second", "sum", if they are
            there.
    Local; nothing is launched.
    """

    def __init__(
        self,
        shape: CallShape,
        backend: Backend,
        tiles: ExpertTiles,
        given: tuple[str, ...],
        held: tuple[str, ...],
        *,
        summed: torch.Size | None,
    ) -> None:
        scheme, num_experts = shape.scheme, shape.num_experts
        max_tiles = shape.max_tiles(tiles.block_m)
        self.row_tiles = max_tiles, tiles.block_m
        between = Between.of(scheme, tiles.first.block_n, static=shape.static_scale)
        inner = max_tiles * tiles.block_m, inner_width(shape, tiles)
        groups = between.num_scales(scheme, shape.intermediate)
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "tile_expert": ((max_tiles,), torch.int32),
            "first_tile": ((num_experts,), torch.int32),
            "num_tiles": ((1,), torch.int32),
            "inner": (inner, shape.row_dtype if shape.widens_rows else scheme.activation.dtype or shape.dtype),
        }
        if between is Between.TENSOR:
            pieces["amax"] = (num_experts,), torch.int32
        if groups:
            pieces["inner_scale"] = (groups, inner[0]), torch.float32
        if not between.fused:
            pieces["wide"] = (inner[0], shape.intermediate), torch.float32
        if summed is not None:
            pieces["rows"] = (shape.max_rows, shape.hidden), shape.dtype
        pieces |= backend.workspace(shape, tiles)
        rows, tile_list = Rows("row_start", "num_tokens", None), TileList(*TileList._fields)
        stored = Stored("inner", "inner_scale")
        first = Stored("wide", None) if "wide" in pieces else stored
        parts = ("values", "scale", "zero", "global_scale", "bias")
        w13, w2 = (tuple(f"{name}_{part}" for part in parts) for name in ("w13", "w2"))
        halves = ("w13_output_scale", "w13_gate_output_scale")
        scalars = ExpertScalars("static_scale", *(halves[::-1] if shape.up_first else halves), "alpha", "beta", "limit")
        inner_scale = "static_scale" if "static_scale" in held else "inner_scale"
        order = inner_order(shape, tiles)
        requantize = prepare_requantize(shape, between, max_tiles, tiles.block_m, width=inner[1], order=order)
        gathered, packed = rows._replace(row_index="row_index"), Stored("packed", "packed_scale")
        of_first = Operands(*(packed if "packed" in pieces else ("x", "x_scale")), *w13)
        steps: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "tile_list": (prepare_tile_list(num_experts, max_tiles, tiles.block_m, shape.device), (rows, tile_list)),
            "gather": (backend.gather(shape, tiles), ("x", "x_scale", packed, gathered, tile_list)),
            "first": (backend.first(shape, tiles, between), (of_first, first, scalars, gathered, tile_list)),
            "find_amax": (requantize.find_amax, (first, rows, tile_list)),
            "requantize": (requantize.requantize, (first, stored, rows, tile_list)),
            "second": (
                backend.second(shape, tiles, between),
                (
                    Operands("inner", inner_scale, *w2),
                    Stored("y" if summed is None else "rows", None),
                    ExpertScalars(None, "w2_output_scale", None, None, None, None),
                    rows,
                    tile_list,
                ),
            ),
        }
        if summed is not None:
            launch = prepare_weighted_sum(summed, shape.hidden, shape.device, out_stride=shape.hidden)
            steps["sum"] = (launch, ("rows", "token_to_row", "topk_weights", None, "y"))
        steps = {name: step for name, step in steps.items() if step[0] is not None}
        self.steps = tuple(steps)
        self.sequence = LaunchSequence(list(steps.values()), (*given, "y", *held), pieces, shape.device)

    def run(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Launch with these tensors of batch and weights and y. Local, no host sync."""
        self.sequence.run(_without_e8m0(tensors))

    def apart(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
        """The launches by name of step, to be called one by one with these tensors of batch and weights and y.

        They hold one workspace, which is written in their order: all are called in it once before single ones are
        repeated. Local, no host sync.
        """
        memory, launches = self.sequence.bound(_without_e8m0(tensors))
        del memory  # the launches' tensors hold it
        return dict(zip(self.steps, launches, strict=True))


def _without_e8m0(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with scales of one byte as bytes: Triton has no e8m0."""
    return {
        name: as_bytes(tensor) if tensor.dtype == torch.float8_e8m0fnu or name == "x_scale" else tensor
        for name, tensor in tensors.items()
    }


class RepeatedCall:
    """Calls with the same weights and with batches of one signature.

    Args:
        prepared: the launches. batch, weights: of a first call; of the batch nothing is kept alive but its scheme.

    Attributes:
        sequence: the launches, first that of the tile list. weights: the tensors that they read, by the names `held`.
        row_tiles: as of `PreparedCall`.
        y_shape, dtype: of the output.
        in_place: there are rows, and the launches read all tensors where they are: no copies, no sum of FLAT.
    """

    def __init__(self, prepared: PreparedCall, batch: ExpertBatch, weights: ExpertWeights) -> None:
        given, held = batch_tensors(batch), weight_tensors(weights)
        self._prepared, self.sequence, self.dtype = prepared, prepared.sequence, batch.dtype
        self.weights, self.held = list(held.values()), tuple(held)
        self.row_tiles = prepared.row_tiles
        self._scheme = batch.scheme  # a signature has its id
        shape = self.y_shape = batch.output_shape
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        self._new_y = allocator(shape, strides, batch.dtype, batch.x.device)
        rows = batch.x if batch.row_index is None else batch.row_index
        self._is_empty = not rows.numel() or not batch.x.numel()
        self._is_flat = isinstance(batch, Flat)
        contiguous = {name: tensor for name, tensor in (given | held).items() if name not in _STRIDED}
        self._repeats = with_dense_rows(batch) is batch and all(each.is_contiguous() for each in contiguous.values())
        self.in_place = self._repeats and not self._is_flat and not self._is_empty

    def __call__(self, batch: ExpertBatch, out: torch.Tensor | None) -> torch.Tensor:
        """Compute the experts of every row; see `KernelExperts`. Local, no host sync."""
        y = self._new_y() if out is None else out.contiguous()
        addresses = [*batch.addresses, *map(torch.Tensor.data_ptr, (y, *self.weights))]
        if not self._repeats or self.sequence.repeat(addresses) is None:
            self._run(batch, y)
        return y if out is None or y is out else out.copy_(y)

    def _run(self, batch: ExpertBatch, y: torch.Tensor) -> None:
        """A first call, or one whose tensors have to be copied or are not aligned."""
        if self._is_empty:
            if isinstance(batch, Flat):
                weighted_sum(y.new_empty(0, y.shape[1]), batch.token_to_row, batch.topk_weights, out=y)
            return
        named = batch_tensors(with_dense_rows(batch)) | {"y": y}
        named = {name: each if name in _STRIDED else each.contiguous() for name, each in named.items()}
        self._prepared.run(named | dict(zip(self.held, map(aligned, self.weights), strict=True)))
