"""The launches of the experts' calls, prepared once for a shape, and the choice of their backend and tiles.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts, N received token rows.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import Backend, CallShape
from ep_moe.experts.prepared_rows import inner_order, inner_width
from ep_moe.experts.requantize import prepare_requantize, prepare_tile_list
from ep_moe.experts.tile_tables import find_table, log_once
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.layout import ExpertBatch
from ep_moe.layout.triton import prepare_weighted_sum
from ep_moe.quant import as_bytes
from ep_moe.weights import ExpertWeights

_NAMES = {  # field of a batch -> name of an argument, where they differ
    "expert_row_start": "row_start",
    "expert_num_tokens": "num_tokens",
    "scale": "x_scale",
}
STRIDED = ("x", "x_scale")  # whose strides kernels take; other tensors are contiguous


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
    """The batch, with a copy of x if there are gaps between its columns, or between its rows. Local."""
    if batch.x.stride(-1) == 1 and (batch.x.dim() == 2 or batch.x.is_contiguous()):
        return batch
    return dataclasses.replace(batch, x=batch.x.contiguous())


def _wanted_tiles(shape: CallShape, tiles: ExpertTiles | Path | None) -> tuple[ExpertTiles | None, str]:
    """The tiles themselves, or those of the table for this shape, whose file is the second result."""
    if isinstance(tiles, ExpertTiles):
        return tiles, ""
    name = shape.scheme.name if shape.scheme.weight.quantized else str(shape.dtype).removeprefix("torch.")
    table = find_table(shape.intermediate, shape.hidden, shape.device, name, tiles)
    return (None, "") if table is None else (table.choose(shape.expected_rows), table.source)


def choose_backend(
    shape: CallShape, backends: Sequence[Backend], tiles: ExpertTiles | Path | None
) -> tuple[Backend, ExpertTiles]:
    """The backend of calls of this shape, and its tiles; arguments and errors as of `KernelExperts`. Local."""
    wanted, source = _wanted_tiles(shape, tiles)
    if wanted is not None and wanted.backend:
        named = {backend.name: backend for backend in backends}.get(wanted.backend)
        reason = f"these experts compute by '{backends[-1].name}' kernels" if named is None else named.obstacle(shape)
        if named is not None and reason is None:
            found = named.tiles(shape, wanted, source)
            assert found is not None
            return named, found
        if isinstance(tiles, ExpertTiles):
            raise ValueError(f"tiles are for backend '{wanted.backend}': {reason}")
        log_once(f"{source}: backend '{wanted.backend}' is not used, defaults are: {reason}")
        wanted = None
    found_by = ((backend, backend.tiles(shape, wanted, source)) for backend in backends)
    return next((backend, found) for backend, found in found_by if found is not None)


class PreparedCall:
    """The launches of calls of one shape. Their tensors have names: those of the batch, "y", those of the weights,
    those of the workspace.

    Args:
        shape: of the calls. backend: of both GEMMs. tiles: of both GEMMs.
        of_batch, of_weights: names of the tensors of the batch, and of the weights, that are not None.
        summed: N and K of FLAT batches, whose rows are weighted and summed.

    Attributes:
        sequence: the kernels, whose workspace has the intermediates.
        row_tiles: the most row tiles of a call, and the rows of each.
        steps: names of the launches, of "tile_list", "gather", "first", "find_amax", "requantize", "second", "sum".
    Local; nothing is launched.
    """

    def __init__(
        self,
        shape: CallShape,
        backend: Backend,
        tiles: ExpertTiles,
        of_batch: tuple[str, ...],
        of_weights: tuple[str, ...],
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
            "inner": (inner, shape.format.rows or scheme.activation.dtype or shape.dtype),
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
        inner_scale = "static_scale" if "static_scale" in of_weights else "inner_scale"
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
        self.sequence = LaunchSequence(list(steps.values()), (*of_batch, "y", *of_weights), pieces, shape.device)

    def run(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Launch with these tensors of batch and weights and y. Local, no host sync."""
        self.sequence.run(_without_e8m0(tensors))

    def separate(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
        """The launches by name of step, to be called one by one with these tensors of batch and weights and y.

        They share one workspace: each is called once, in their order, before single ones are called again. Local, no
        host sync.
        """
        _, launches = self.sequence.bound(_without_e8m0(tensors))  # their tensors keep the memory
        return dict(zip(self.steps, launches, strict=True))


def _without_e8m0(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, with scales of one byte as bytes: Triton has no e8m0."""
    return {
        name: as_bytes(tensor) if tensor.dtype == torch.float8_e8m0fnu or name == "x_scale" else tensor
        for name, tensor in tensors.items()
    }
