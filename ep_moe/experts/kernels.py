"""The experts as kernels: the tile list, the first GEMM with its epilogue, requantization, the second GEMM.

The launches of a call follow from its `CallShape` and are prepared once (`ep_moe.experts.prepared`); later calls find
them here. No host sync, and launches do not depend on the counts: a call can be captured in a CUDA graph and replayed
with other counts. Runs on a CPU under TRITON_INTERPRET=1.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts.column_order import in_column_order, warn_slow
from ep_moe.experts.formats import holds_e4m3, row_of
from ep_moe.experts.grouped_gemm import Backend, CallShape
from ep_moe.experts.launching import aligned
from ep_moe.experts.prepared import (
    STRIDED,
    PreparedCall,
    batch_tensors,
    choose_backend,
    weight_tensors,
    with_dense_rows,
)
from ep_moe.experts.reference import check_fit
from ep_moe.experts.tile_tables import device_name, log_once
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.allocation import allocator
from ep_moe.kernel_launch.plan_cache import PlanCache
from ep_moe.kernels.device import Device
from ep_moe.layout import ExpertBatch, Flat, weighted_sum
from ep_moe.weights import ExpertWeights

_MOST_CALLS = 256  # of one layer, by the signatures of batches; captured calls of all batch sizes are fewer
_MOST_PREPARED = 512  # shapes of calls of all layers that compute alike


class RepeatedCall:
    """Calls with the same weights and with batches of one signature.

    Args:
        prepared: the launches. batch, weights: of a first call; of the batch only the scheme is kept alive.

    Attributes:
        sequence: the launches, first that of the tile list. weights: the tensors that they read, by the names `held`.
        row_tiles: as of `PreparedCall`.
        y_shape, dtype: of the output.
        in_place: there are rows, and the launches read all tensors where they are: no copies, no sum of FLAT.
    """

    def __init__(self, prepared: PreparedCall, batch: ExpertBatch, weights: ExpertWeights) -> None:
        of_batch, of_weights = batch_tensors(batch), weight_tensors(weights)
        self._prepared, self.sequence, self.dtype = prepared, prepared.sequence, batch.dtype
        self.weights, self.held = list(of_weights.values()), tuple(of_weights)
        self.row_tiles = prepared.row_tiles
        self._scheme = batch.scheme  # a signature has its id
        shape = self.y_shape = batch.output_shape
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        self._new_y = allocator(shape, strides, batch.dtype, batch.x.device)
        rows = batch.x if batch.row_index is None else batch.row_index
        self._is_empty = not rows.numel() or not batch.x.numel()
        contiguous = (tensor for name, tensor in (of_batch | of_weights).items() if name not in STRIDED)
        self._repeats = with_dense_rows(batch) is batch and all(each.is_contiguous() for each in contiguous)
        self.in_place = self._repeats and not isinstance(batch, Flat) and not self._is_empty

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
        named = {name: each if name in STRIDED else each.contiguous() for name, each in named.items()}
        self._prepared.run(named | dict(zip(self.held, map(aligned, self.weights), strict=True)))


class _CallsOfWeights:
    """Cached calls of one `ExpertWeights`; dropped with it."""

    def __init__(self, weights: ExpertWeights, drop: "functools.partial[None]") -> None:
        self.calls: dict[object, RepeatedCall] = {}
        self.weights = weakref.ref(weights, drop)


def _drop(known: dict[int, _CallsOfWeights], key: int, _: object) -> None:
    known.pop(key, None)


def signature_of(batch: ExpertBatch) -> tuple[object, ...]:
    """Cache key of a batch without a template: type, scheme, shapes, strides, dtypes. Local."""
    tensors = batch_tensors(batch)
    sizes = [(name, t.shape, t.stride(), t.dtype, t.device) for name, t in tensors.items()]
    return type(batch), id(batch.scheme), batch.dtype, batch.expected_rows, *sizes


class KernelExperts:
    """Two grouped GEMMs of all local experts as kernels: the first backend that has tiles for a call takes it.

    Results differ from `ReferenceExperts` only in the order of sums: products accumulate in float32, and the
    intermediate is requantized from float32. That is fused into the first GEMM if each tile holds whole scale groups
    (of 16, 32, 64 or 128) or scales are static.

    Weights are checked in their first call: later their tensors keep shapes and dtypes, but may move.

    Args:
        activation: between the two GEMMs.
        backends: of the GEMMs; the last one computes all calls.
        tiles: tile sizes, or a folder with tables of them, which are used before the package's; a table is chosen by
            the shape and tiles by the batch's `expected_rows`. A call raises ValueError if they do not fit the scheme
            of its weights, or if they are for a backend that does not compute it. An entry of a table for such a
            backend is replaced by the defaults; the log has the reason once.

    Attributes:
        name: of the first backend.
    """

    def __init__(
        self,
        activation: ActivationConfig,
        backends: Sequence[Backend],
        *,
        tiles: ExpertTiles | Path | None = None,
    ) -> None:
        self.activation, self.backends, self.tiles = activation, tuple(backends), tiles
        self.name = self.backends[0].name
        self._prepared = PlanCache[PreparedCall](_MOST_PREPARED)
        self._known: dict[int, _CallsOfWeights] = {}  # by the weights' id

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts of every row; `ep_moe.experts.base.Experts` has the arguments and the result.

        If the batch has a `row_index` and is not FLAT, the output is [rows of row_index, H]. Weights that are not
        contiguous, or not at a multiple of 16 bytes, are copied for each call.
        Errors: also ValueError for a scheme without kernels, RuntimeError for a GPU that they do not run on.
        Local, on the current stream, no host sync, CUDA-graph safe.
        """
        if weights.w13_order is not None:
            return self._ordered(batch, weights, weights.w13_order, out)
        return self._call(batch, weights, out)

    def _ordered(
        self, batch: ExpertBatch, weights: ExpertWeights, order: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """A call with tokens in the order of w13's columns; FLAT rows are computed as those of COMPACT, and summed."""
        warn_slow()
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
        """The cached call of these weights and batches of this signature; None if there was no such call. Local."""
        if weights.w13_order is not None:  # whose calls copy the batch first
            return None
        known = self._known.get(id(weights))
        return None if known is None else known.calls.get(signature)

    def _new_call(self, batch: ExpertBatch, weights: ExpertWeights, signature: object) -> RepeatedCall:
        """Cache the call of batches with this signature and of these weights."""
        row_of(weights.scheme, self.backends[-1].name)
        device = weights.w13.values.device
        if holds_e4m3(weights.scheme) and not Device.of(device).fp8:
            what = "no instructions for fp8: kernels convert it by integers and multiply it in 16 bits"
            log_once(f"{device_name(device)} has {what}")
        key = id(weights)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _CallsOfWeights(weights, functools.partial(_drop, self._known, key))
        if len(known.calls) >= _MOST_CALLS:
            known.calls.clear()
        call = known.calls[signature] = RepeatedCall(self.prepare(batch, weights), batch, weights)
        return call

    def prepare(self, batch: ExpertBatch, weights: ExpertWeights) -> PreparedCall:
        """The launches of calls like this one, prepared once for each shape and choice of optional tensors. Local."""
        shape = CallShape.of(with_dense_rows(batch), weights, self.activation)
        tensors = batch_tensors(batch), weight_tensors(weights)
        summed = tensors[0]["token_to_row"].shape if "token_to_row" in tensors[0] else None
        key = shape, *(tuple((name, each.dtype) for name, each in named.items()) for named in tensors), summed
        found = self._prepared.get(key)
        if found is None:
            backend, tiles = self.choose_backend(shape)
            found = PreparedCall(shape, backend, tiles, *map(tuple, tensors), summed=summed)
            self._prepared.keep(key, found)
        return found

    def choose_backend(self, shape: CallShape) -> tuple[Backend, ExpertTiles]:
        """The backend of calls of this shape, and its tiles. Errors: as of a call. Local."""
        return choose_backend(shape, self.backends, self.tiles)

    def backend_of(self, batch: ExpertBatch, weights: ExpertWeights) -> str:
        """The name of the backend that computes such a call. Local."""
        return self.choose_backend(CallShape.of(with_dense_rows(batch), weights, self.activation))[0].name
