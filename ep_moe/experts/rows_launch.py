"""The launches of one GEMM by itself (`ep_moe.experts.rows_gemm`): the tile list, then the GEMM."""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ep_moe.config import tiles_dir
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.prepared import with_dense_rows
from ep_moe.experts.requantize import prepare_tile_list
from ep_moe.experts.triton import TritonExperts, TritonGemms
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.layout import ExpertBatch
from ep_moe.quant import StoredMatrix

_MOST_PREPARED = 256  # shapes of calls that a process keeps launches for
_NO_SCALARS = ExpertScalars(*[None] * len(ExpertScalars._fields))


class RowsLaunch:
    """Prepared launches for calls of one shape, whose tensors have the same dtypes.

    Args: shape: `CallShape.alone`. tiles: a folder with tables of tiles, read before the package's.
    Local; nothing is launched.
    """

    def __init__(self, shape: CallShape, tiles: Path | None) -> None:
        chosen = TritonExperts(shape.activation, tiles=tiles).choose_tiles(shape)
        most = shape.max_tiles(chosen.block_m)
        self._list = prepare_tile_list(shape.num_experts, most, chosen.block_m, shape.device)
        self._gemm = TritonGemms().rows(shape, chosen)
        pieces = {"tile_expert": most, "first_tile": shape.num_experts, "num_tiles": 1}
        self._workspace = Workspace({name: ((count,), torch.int32) for name, count in pieces.items()}, shape.device)

    def run(self, batch: ExpertBatch, weights: Sequence[torch.Tensor | None], y: torch.Tensor) -> None:
        """Write y, contiguous. weights: values, scale, zero, global scale and bias. Local, no host sync."""
        tiles = TileList(**self._workspace.views(self._workspace.allocate()), amax=None)
        rows = Rows(batch.expert_row_start, batch.expert_num_tokens, None)
        self._list((rows, tiles))
        operands = Operands(batch.x, batch.scale, *weights)
        self._gemm((operands, Stored(y, None), _NO_SCALARS, rows._replace(row_index=batch.row_index), tiles))


def by_kernels(batch: ExpertBatch, matrix: StoredMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """`rows_gemm` in Triton, also in its interpreter; arguments are checked already."""
    TritonGemms.serves.check(batch.scheme, dtype=batch.dtype, device=batch.x.device)
    batch, y = with_dense_rows(batch), out.contiguous()
    parts = (matrix.values, matrix.scale, matrix.zero, matrix.global_scale, bias)
    weights = [None if part is None else part.contiguous() for part in parts]
    dtypes = tuple(None if part is None else part.dtype for part in (batch.x, batch.row_index, *weights))
    shape = CallShape.alone(batch, matrix.values.shape[1])
    _prepared(threading.get_ident(), shape, dtypes).run(batch, weights, y)
    return out if y is out else out.copy_(y)


@functools.lru_cache(maxsize=_MOST_PREPARED)
def _prepared(thread: int, shape: CallShape, dtypes: tuple[torch.dtype | None, ...]) -> RowsLaunch:
    """The launches of calls of this shape; launches keep their arguments, so threads do not share them."""
    del thread, dtypes
    return RowsLaunch(shape, tiles_dir())
