"""The experts as kernels: the tile list, the first GEMM with its epilogue, requantization, the second GEMM.

The launches of a call follow from its `CallShape` and are prepared once (`ep_moe.experts.prepared`). No host sync, and
launches do not depend on the counts: a call can be captured in a CUDA graph and replayed with other counts. Runs on a
CPU under TRITON_INTERPRET=1.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import dataclasses
import functools
import weakref
from pathlib import Path

import torch
import triton

from ep_moe.config import ActivationConfig
from ep_moe.experts.column_order import in_column_order, tell_slow
from ep_moe.experts.grouped_gemm import Backend, CallShape, PreferredBackend
from ep_moe.experts.prepared import PreparedCall, RepeatedCall, batch_tensors, weight_tensors, with_dense_rows
from ep_moe.experts.ready_rows import parts
from ep_moe.experts.reference import check_fit
from ep_moe.experts.tile_tables import default_table, find_table, tell_once
from ep_moe.experts.tuning import ExpertTiles, GemmTiles, fit_stages, fit_steps
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.weights import ExpertWeights

_MAX_PREPARED = 256  # shapes that one object keeps; captured calls of all batch sizes are fewer


class _Known:
    """The calls with some weights, as long as these exist."""

    def __init__(self, weights: ExpertWeights, forget: "functools.partial[None]") -> None:
        self.calls: dict[object, RepeatedCall] = {}
        self.weights = weakref.ref(weights, forget)


def _forget(known: dict[int, _Known], key: int, _: object) -> None:
    known.pop(key, None)


def signature_of(batch: ExpertBatch) -> tuple[object, ...]:
    """All of a batch without a template but the addresses and values of its tensors. Local."""
    tensors = batch_tensors(batch)
    sizes = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors.items()]
    return type(batch), id(batch.scheme), batch.dtype, batch.expected_rows, *sizes


class KernelExperts:
    """Two grouped GEMMs of all local experts as kernels of a `Backend`.

    Results differ from `ReferenceExperts` only in the order of sums: products accumulate in float32, and the
    intermediate is requantized from float32. That is fused into the first GEMM if each tile holds whole scale groups
    (of 16, 32, 64 or 128) or scales are static.

    Weights are checked in their first call: later their tensors keep shapes and dtypes, but may move.

    Args:
        activation: between the two GEMMs.
        backend: of the GEMMs.
        preferred: a backend that is used in its place for the calls that it takes, with tiles of its own.
        tiles: tile sizes, or a folder with tables of them, which are used before the package's; a table is chosen by
            the shape and tiles by the batch's `expected_rows`. A call raises ValueError if they do not fit the scheme
            of its weights, or if they are for a backend that does not compute it. An entry of a table for such a
            backend is left for the defaults; the log says once why.
    """

    def __init__(
        self,
        activation: ActivationConfig,
        backend: Backend,
        *,
        preferred: PreferredBackend | None = None,
        tiles: ExpertTiles | Path | None = None,
    ) -> None:
        self.activation = activation
        self.backend, self.preferred = backend, preferred
        self.tiles = tiles
        self._prepared: dict[object, PreparedCall] = {}
        self._known: dict[int, _Known] = {}  # by the weights' id

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts of every row; `ep_moe.experts.base.Experts` has the arguments and the result.

        If the batch has a `row_index` and is not FLAT, the output is [rows of row_index, H]. Weights that are not
        contiguous, or not at a multiple of 16 bytes, are copied for each call.
        Errors: also ValueError for what the backend does not compute, RuntimeError for a GPU that it does not run on.
        Local, on the current stream, no host sync, CUDA-graph safe.
        """
        if weights.w13_order is not None:
            return self._ordered(batch, weights, weights.w13_order, out)
        return self._call(batch, weights, out)

    def _ordered(
        self, batch: ExpertBatch, weights: ExpertWeights, order: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """A call with tokens in the order of w13's columns; FLAT rows are computed as those of COMPACT, and summed."""
        tell_slow()
        check_fit(batch, weights, self.activation, out)
        if not batch.x.numel():
            return self._call(batch, weights, out)
        if not isinstance(batch, Flat):
            return self._call(in_column_order(batch, order), weights, out)
        y = self._call(in_column_order(batch, order), weights, None)
        return weighted_sum(y, batch.token_to_row, batch.topk_weights, out=out)

    def _call(self, batch: ExpertBatch, weights: ExpertWeights, out: torch.Tensor | None) -> torch.Tensor:
        """A call whose tokens have their columns in the order of w13's."""
        template = batch.template
        signature = signature_of(batch) if template is None else template.signature
        known = self._known.get(id(weights))
        call = None if known is None else known.calls.get(signature)
        if call is None or out is not None:
            check_fit(batch, weights, self.activation, out)
        if call is None:
            call = self._new_call(batch, weights, signature)
        return call(batch, out)

    def repeated(self, signature: object, weights: ExpertWeights) -> RepeatedCall | None:
        """What earlier calls with these weights and batches of this signature are, None if there were none. Local."""
        if weights.w13_order is not None:  # whose calls copy the batch first
            return None
        known = self._known.get(id(weights))
        return None if known is None else known.calls.get(signature)

    def _new_call(self, batch: ExpertBatch, weights: ExpertWeights, signature: object) -> RepeatedCall:
        """The call of batches with this signature and of these weights, from now on."""
        self.backend.serves.check(
            weights.scheme, activation=self.activation.kind, dtype=batch.dtype, device=weights.w13.values.device
        )
        known = self._known.get(id(weights))
        if known is None:
            key = id(weights)
            known = self._known[key] = _Known(weights, functools.partial(_forget, self._known, key))
        if len(known.calls) >= _MAX_PREPARED:
            known.calls.clear()
        call = known.calls[signature] = RepeatedCall(self.prepare(batch, weights), batch, weights)
        return call

    def prepare(self, batch: ExpertBatch, weights: ExpertWeights) -> PreparedCall:
        """The launches of calls like this one, prepared once for each shape and choice of optional tensors. Local."""
        batch = with_dense_rows(batch)
        shape, given, held = (
            CallShape.of(batch, weights, self.activation),
            batch_tensors(batch),
            weight_tensors(weights),
        )
        summed = given["token_to_row"].shape if "token_to_row" in given else None
        key = shape, tuple((name, tensor.dtype) for name, tensor in (given | held).items()), summed
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            backend, tiles = self.choose_backend(shape)
            found = PreparedCall(shape, backend, tiles, tuple(given), tuple(held), summed=summed)
            self._prepared[key] = found
        return found

    def choose_backend(self, shape: CallShape) -> tuple[Backend, ExpertTiles]:
        """The backend of calls of this shape, and its tiles. Errors: as of a call. Local."""
        given, source = self._given_tiles(shape)
        if given is not None and given.backend not in ("", self.backend.serves.name):
            reason = self._obstacle(given.backend, shape)
            if reason is None:
                assert self.preferred is not None
                return self.preferred, given
            if isinstance(self.tiles, ExpertTiles):
                raise ValueError(f"tiles are for backend '{given.backend}': {reason}")
            tell_once(f"{source}: backend '{given.backend}' is not used, defaults are: {reason}")
            given = None
        if self.preferred is not None and (given is None or not given.backend):
            tiles = self.preferred.tiles(shape)
            if tiles is not None:
                return self.preferred, tiles
        return self.backend, _launchable(_default(shape) if given is None else _checked(given, shape, source), shape)

    def _obstacle(self, backend: str, shape: CallShape) -> str | None:
        """The reason why the backend of this name computes no calls of this shape; None if it is the preferred one, and
        does."""
        if self.preferred is None or self.preferred.serves.name != backend:
            return f"these experts compute by '{self.backend.serves.name}' kernels"
        return self.preferred.obstacle(shape)

    def _given_tiles(self, shape: CallShape) -> tuple[ExpertTiles | None, str]:
        """The tiles of the constructor, or of the table for this shape, whose file is the second result."""
        if isinstance(self.tiles, ExpertTiles):
            return self.tiles, ""
        stored, dtype = shape.scheme.weight, str(shape.dtype).removeprefix("torch.")
        name = shape.scheme.name if stored.quantized else dtype
        table = find_table(shape.intermediate, shape.hidden, shape.device, name, self.tiles)
        return (None, "") if table is None else (table.choose(shape.expected_rows), table.source)

    def choices(self, shape: CallShape) -> list[ExpertTiles]:
        """The tiles of calls of this shape, and then the default ones of each backend that computes them. Local."""
        backend, tiles = self.choose_backend(shape)
        own = dataclasses.replace(_launchable(_default(shape), shape), backend=self.backend.serves.name)
        found = [dataclasses.replace(tiles, backend=backend.serves.name), own]
        if self.preferred is not None and self.preferred.obstacle(shape) is None:
            found.append(self.preferred.default_tiles)
        return list(dict.fromkeys(found))

    def backend_of(self, batch: ExpertBatch, weights: ExpertWeights) -> str:
        """The name of the backend that computes such a call, in `SERVES`. Local."""
        return self.choose_backend(CallShape.of(with_dense_rows(batch), weights, self.activation))[0].serves.name


def _default(shape: CallShape) -> ExpertTiles:
    """Triton's tiles for calls of shapes without a table of their own."""
    stored, gated = shape.scheme.weight, shape.activation.kind.gated
    if shape.decodes:
        table = default_table(
            shape.row_dtype,
            gated=gated,
            weight_bits=shape.weight_bits,
            fp8_weights=stored.family == "scaled" and stored.dtype == torch.float8_e4m3fn,
        )
        tiles = table.choose(shape.expected_rows)
        if all(_sums_within_groups(shape, gemm) for gemm in (tiles.first, tiles.second)):
            return tiles
        return fit_steps(tiles, stored.group_width, across=True)
    blocked = stored.granularity == "block"
    table = default_table(
        shape.row_dtype,
        gated=gated,
        group_k=stored.group_width,
        whole_blocks=not blocked or (stored.block[0] % 128 == 0 and shape.halves_aligned),
    )
    return table.choose(shape.expected_rows)


def _sums_within_groups(shape: CallShape, gemm: GemmTiles) -> bool:
    """True if no product over K crosses from one scale of weights to the next."""
    return shape.scheme.weight.group_width % (gemm.block_k // parts(shape, gemm)) == 0


def _launchable(tiles: ExpertTiles, shape: CallShape) -> ExpertTiles:
    """The tiles with as many stages as fit the GPU."""
    if shape.device.type != "cuda":
        return tiles
    properties = triton.runtime.driver.active.utils.get_device_properties(shape.device.index)
    widths, stored = (8 * shape.row_dtype.itemsize, shape.weight_bits), shape.scheme.weight
    grouped = stored.granularity in ("group", "block")
    rearranged = stored.packed > 1 and not shape.decodes_pairs(folded=grouped)
    return fit_stages(
        tiles, properties["max_shared_mem"], *widths, gated=shape.activation.kind.gated, rearranged=rearranged
    )


def _checked(tiles: ExpertTiles, shape: CallShape, source: str) -> ExpertTiles:
    """The tiles. Errors: ValueError if a step of a reduction would cross from one scale to the next.

    A step over weights that are decoded together with their scales may have several whole groups.
    """
    source = source and f"{source}: "
    width, micro = shape.scheme.weight.group_width, shape.scheme.payload.family == "micro"
    for name, gemm in (("first", tiles.first), ("second", tiles.second)):
        if micro and (gemm.block_k % width or gemm.block_n % width):
            raise ValueError(
                f"{source}block_n ({gemm.block_n}) and block_k ({gemm.block_k}) of the {name} GEMM are not multiples "
                f"of the {width} columns that share a scale in scheme '{shape.scheme.name}'"
            )
        within = _sums_within_groups(shape, gemm)
        if not micro and not within and not (shape.decodes and gemm.block_k % width == 0):
            raise ValueError(
                f"{source}block_k ({gemm.block_k}) of the {name} GEMM does not divide the {width} columns "
                f"that share a scale in scheme '{shape.scheme.name}'"
            )
    return tiles
