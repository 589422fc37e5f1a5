"""One GEMM of all local experts by itself, without activation: kernels on a GPU, torch on a CPU.

Letters: L local experts, C rows of an expert in BATCHED, K columns that the GEMM reduces over, N those of its result.
"""

import torch

from ep_moe.config import DTYPES
from ep_moe.experts.reference import read_rows, rows_of
from ep_moe.layout import Batched, ExpertBatch
from ep_moe.quant import StoredMatrix, dequantize_weight


def rows_gemm(
    batch: ExpertBatch, matrix: StoredMatrix, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute y = w @ x + b for every row of every local expert.

    Args:
        batch: `Batched` or `Compact`; its scheme describes rows and weights; rows that hold no token are never read.
        matrix: w, [L, N, K] as the scheme stores it. bias: [L, N], any float dtype.
        out: optional result, of the shape and dtype below; rows that hold no token are not written.
    Returns: `batch.dtype`; BATCHED [L, C, N], COMPACT [rows, N], with a `row_index` [rows of it, N].
    Errors: ValueError with the value and what is needed, or for a scheme without kernels; RuntimeError for such a GPU.
    Local, on the current stream; on a GPU no host sync, and safe in CUDA graphs.
    """
    shape = _check(batch, matrix, bias, out)
    if out is None:
        out = torch.empty(shape, dtype=batch.dtype, device=batch.x.device)
    if out.numel() == 0 or batch.x.numel() == 0:
        return out
    if not batch.x.is_cuda:
        return _reference(batch, matrix, bias, out)
    from ep_moe.experts.rows_launch import by_kernels  # imports Triton, which exists only on Linux

    return by_kernels(batch, matrix, bias, out)


def _check(
    batch: ExpertBatch, matrix: StoredMatrix, bias: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[int, ...]:
    """The shape of the result."""
    values = matrix.values
    if values.dim() != 3 or values.shape[0] != batch.num_local_experts:
        raise ValueError(f"w is {tuple(values.shape)}; [{batch.num_local_experts} experts, N, K] needed")
    if batch.dtype not in DTYPES.values():
        raise ValueError(f"dtype ({batch.dtype}) of the batch is not one of {', '.join(DTYPES)}")
    rows = batch.x.shape[:-1] if batch.row_index is None else batch.row_index.shape
    shape = (*rows, values.shape[1])
    needed: dict[str, tuple[torch.Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        f"w {part}": (getattr(matrix, part), *expected)
        for part, expected in batch.scheme.weight.parts((*values.shape[:2], batch.hidden), batch.dtype).items()
    }
    if bias is not None:
        needed["bias"] = (bias, tuple(values.shape[:2]), None)
    if out is not None:
        needed["out"] = (out, shape, batch.dtype)
    if isinstance(batch, Batched) and batch.row_index is None:
        needed["x"] = (batch.x, (values.shape[0], *batch.x.shape[1:]), batch.scheme.payload.dtype or batch.dtype)
    for name, (tensor, size, dtype) in needed.items():
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found is None or found != (size, dtype or found[1]):
            raise ValueError(f"{name} is {found}; {size} {dtype} needed for scheme '{batch.scheme.name}'")
    return shape


def _reference(batch: ExpertBatch, matrix: StoredMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """In float32, one expert after the other; reads counts and starts back to the host."""
    starts, counts = torch.stack([batch.expert_row_start, batch.expert_num_tokens]).tolist()
    for expert, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count > 0:
            y = read_rows(batch, start, count) @ dequantize_weight(matrix[expert], batch.scheme).t()
            rows_of(out, start, count).copy_(y if bias is None else y + bias[expert].float())
    return out
