"""The experts as kernels: the tile list, the first GEMM with its epilogue, requantization, the second GEMM.

The launches of a call follow from its `CallShape` and are prepared once; a call allocates the intermediates and
launches. No host sync, and launches do not depend on the counts: a call can be captured in a CUDA graph and replayed
with other counts. Runs on a CPU under TRITON_INTERPRET=1.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import dataclasses
from pathlib import Path

import torch
import triton

from ep_moe.config import ActivationConfig
from ep_moe.experts.grouped_gemm import Backend, Between, CallShape
from ep_moe.experts.reference import check_fit
from ep_moe.experts.requantize import prepare_requantize, prepare_tile_list
from ep_moe.experts.tile_tables import default_table, find_table
from ep_moe.experts.tuning import ExpertTiles, fit_stages, fit_steps
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.quant import StoredMatrix, as_bytes
from ep_moe.weights import ExpertWeights

_MAX_PREPARED = 256  # shapes that one object keeps; captured calls of all batch sizes are fewer


class PreparedCall:
    """The launches of calls of one shape.

    Args:
        shape: of the calls. backend: of both GEMMs. tiles: of both GEMMs.
    Local; nothing is launched.
    """

    def __init__(self, shape: CallShape, backend: Backend, tiles: ExpertTiles) -> None:
        scheme, self._device = shape.scheme, shape.device
        self._num_experts, self._max_tiles = shape.num_experts, shape.max_tiles(tiles.block_m)
        self._between = Between.of(scheme, tiles.first.block_n, static=shape.static_scale)
        self._rows, self._columns = self._max_tiles * tiles.block_m, shape.intermediate
        self._groups = self._between.num_scales(scheme, shape.intermediate)
        micro = scheme.activation.family == "micro"
        self._dtype = torch.bfloat16 if micro else scheme.activation.dtype or shape.dtype
        self._tile_list = prepare_tile_list(shape.num_experts, self._max_tiles, tiles.block_m)
        self._first = backend.first(shape, tiles, self._between)
        self._requantize = prepare_requantize(shape, self._between, self._max_tiles, tiles.block_m)
        self._second = backend.second(shape, tiles, self._between)

    def _make_tile_list(self, rows: Rows) -> TileList:
        """Cut the tokens of every expert into row tiles. Local, no host sync."""
        sizes = self._max_tiles, self._num_experts, 1, self._num_experts
        names = TileList._fields if self._between is Between.TENSOR else TileList._fields[:-1]
        tensors = (torch.empty(size, dtype=torch.int32, device=self._device) for size in sizes)
        tiles = TileList(**{"amax": None, **dict(zip(names, tensors, strict=False))})
        self._tile_list(rows, tiles)
        return tiles

    def _empty_inner(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._rows, self._columns, dtype=dtype, device=self._device)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, y: torch.Tensor) -> None:
        """Write the output rows of every expert that has tokens; y is contiguous. Local, no host sync."""
        rows = Rows(batch.expert_row_start.contiguous(), batch.expert_num_tokens.contiguous(), None)
        pool_rows = rows._replace(row_index=_contiguous(batch.row_index))
        tiles = self._make_tile_list(rows)
        static = _contiguous(weights.w2_input_scale)
        own = {name: tensor.contiguous() for name, tensor in weights.per_expert.tensors.items()}
        first = ExpertScalars(
            static_scale=static,
            output_scale=own.get("w13_output_scale"),
            gate_output_scale=own.get("w13_gate_output_scale"),
            alpha=own.get("alpha"),
            beta=own.get("beta"),
            limit=own.get("limit"),
        )
        second = ExpertScalars(None, own.get("w2_output_scale"), *[None] * 4)
        scale = None
        if self._groups:
            scale = torch.empty(self._groups, self._rows, dtype=torch.float32, device=self._device)
        inner = stored = Stored(self._empty_inner(self._dtype), scale)
        if self._requantize is not None:
            inner = Stored(self._empty_inner(torch.float32), None)
        w13, w2 = _weight_operands(weights.w13), _weight_operands(weights.w2)
        bias13, bias2 = _contiguous(weights.w13_bias), _contiguous(weights.w2_bias)
        pool_scale = _plain(batch.scale)
        self._first(Operands(x=batch.x, x_scale=pool_scale, bias=bias13, **w13), inner, first, pool_rows, tiles)
        if self._requantize is not None:
            self._requantize(inner, stored, rows, tiles)
        x_scale = stored.scale if static is None else static
        operands = Operands(x=stored.data, x_scale=x_scale, bias=bias2, **w2)
        self._second(operands, Stored(y, None), second, rows, tiles)


class KernelExperts:
    """Two grouped GEMMs of all local experts as kernels of a `Backend`.

    Results differ from `ReferenceExperts` only in the order of sums: products accumulate in float32, and the
    intermediate is requantized from float32. That is fused into the first GEMM if each tile holds whole scale groups
    (of 16, 32, 64 or 128) or scales are static.

    Args:
        activation: between the two GEMMs.
        backend: of the GEMMs.
        tiles: tile sizes, or a folder with tables of them, which are used before the package's; a table is chosen by
            the shape and tiles by the batch's `expected_rows`. A call raises ValueError if they do not fit the scheme
            of its weights.
    """

    def __init__(
        self, activation: ActivationConfig, backend: Backend, *, tiles: ExpertTiles | Path | None = None
    ) -> None:
        self.activation = activation
        self.backend = backend
        self.tiles = tiles
        self._prepared: dict[CallShape, PreparedCall] = {}

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts of every row; `ep_moe.experts.base.Experts` has the arguments and the result.

        If the batch has a `row_index` and is not FLAT, the output is [rows of row_index, H]. Weights that are not
        contiguous are copied for each call.
        Errors: also ValueError for what the backend does not compute, RuntimeError for a GPU that it does not run on.
        Local, on the current stream, no host sync, CUDA-graph safe.
        """
        check_fit(batch, weights, self.activation, out)
        self.backend.serves.check(
            weights.scheme, activation=self.activation.kind, dtype=batch.dtype, device=weights.w13.values.device
        )
        if isinstance(batch, Flat) or out is None:
            rows = batch.output_shape if batch.row_index is None else (batch.row_index.shape[0], batch.hidden)
            y = batch.x.new_empty(rows, dtype=batch.dtype)
        else:
            y = out.contiguous()
        if y.numel() and batch.x.numel():
            if batch.x.stride(-1) != 1 or (batch.x.dim() == 3 and not batch.x.is_contiguous()):
                batch = dataclasses.replace(batch, x=batch.x.contiguous())
            with torch.cuda.device_of(batch.x):
                self.prepare(batch, weights)(batch, weights, y)
        if isinstance(batch, Flat):
            return weighted_sum(y, batch.token_to_row, batch.topk_weights, out=out)
        return y if out is None or y is out else out.copy_(y)

    def prepare(self, batch: ExpertBatch, weights: ExpertWeights) -> PreparedCall:
        """The launches of calls like this one, prepared once for each shape. Local."""
        shape = CallShape.of(batch, weights, self.activation)
        found = self._prepared.get(shape)
        if found is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            found = self._prepared[shape] = PreparedCall(shape, self.backend, self.choose_tiles(shape))
        return found

    def choose_tiles(self, shape: CallShape) -> ExpertTiles:
        """Tiles for calls of this shape: those of the constructor, or of a table."""
        if isinstance(self.tiles, ExpertTiles):
            return _checked(self.tiles, shape)
        stored, gated = shape.scheme.weight, shape.activation.kind.gated
        blocked, dtype = stored.granularity == "block", str(shape.dtype).removeprefix("torch.")
        name = shape.scheme.name if stored.quantized else dtype
        table = find_table(shape.intermediate, shape.hidden, shape.device, name, self.tiles)
        if table is not None:
            tiles = _checked(table.choose(shape.expected_rows), shape, f"{table.source}: ")
        elif shape.decodes:
            table = default_table(shape.row_dtype, gated=gated, weight_bits=shape.weight_bits, row_bits=shape.row_bits)
            tiles = fit_steps(table.choose(shape.expected_rows), stored.group_width, across=shape.folds)
        else:
            table = default_table(
                shape.row_dtype,
                gated=gated,
                group_k=stored.group_width,
                whole_blocks=not blocked or (stored.block[0] % 128 == 0 and shape.halves_aligned),
            )
            tiles = table.choose(shape.expected_rows)
        if shape.device.type != "cuda":
            return tiles
        properties = triton.runtime.driver.active.utils.get_device_properties(shape.device.index)
        widths = shape.row_bits or 8 * shape.row_dtype.itemsize, shape.weight_bits
        return fit_stages(tiles, properties["max_shared_mem"], *widths, gated=gated)


def _checked(tiles: ExpertTiles, shape: CallShape, source: str = "") -> ExpertTiles:
    """The tiles. Errors: ValueError if a step of a reduction would cross from one scale to the next.

    A step over weights that are decoded together with their scales may have several whole groups.
    """
    width, micro = shape.scheme.weight.group_width, shape.scheme.payload.family == "micro"
    for name, gemm in (("first", tiles.first), ("second", tiles.second)):
        if micro and (gemm.block_k % width or gemm.block_n % width):
            raise ValueError(
                f"{source}block_n ({gemm.block_n}) and block_k ({gemm.block_k}) of the {name} GEMM are not multiples "
                f"of the {width} columns that share a scale in scheme '{shape.scheme.name}'"
            )
        if not micro and width % gemm.block_k and not (shape.folds and gemm.block_k % width == 0):
            raise ValueError(
                f"{source}block_k ({gemm.block_k}) of the {name} GEMM does not divide the {width} columns "
                f"that share a scale in scheme '{shape.scheme.name}'"
            )
    return tiles


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _plain(scale: torch.Tensor | None) -> torch.Tensor | None:
    """Scales of one byte as bytes: Triton has no e8m0."""
    return None if scale is None else as_bytes(scale)


def _weight_operands(matrix: StoredMatrix) -> dict[str, torch.Tensor | None]:
    """A weight's tensors by the names of `Operands`."""
    scale = matrix.scale
    if scale is not None and scale.dtype == torch.float8_e8m0fnu:  # Triton has no such dtype
        scale = as_bytes(scale)
    return {
        "w": matrix.values.contiguous(),
        "w_scale": _contiguous(scale),
        "w_zero": _contiguous(matrix.zero),
        "w_global_scale": _contiguous(matrix.global_scale),
    }
