"""The experts as Triton kernels: a tile list, the first GEMM with its fused epilogue, the second GEMM.

No host sync, and launches do not depend on the counts: a call can be captured in a CUDA graph and replayed with other
counts. Runs on a CPU under TRITON_INTERPRET=1.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import dataclasses
import math

import torch
import triton

from ep_moe.config import ActivationConfig
from ep_moe.experts.base import check_scheme
from ep_moe.experts.reference import check_fit
from ep_moe.experts.tuning import ExpertTiles, GemmTiles, choose_tiles, fit_stages
from ep_moe.kernels.gemm.grouped import _first_gemm_kernel, _second_gemm_kernel
from ep_moe.kernels.gemm.requantize import _expert_amax_kernel, _requantize_kernel
from ep_moe.kernels.gemm.requantize_rounded import _requantize_rounded_kernel
from ep_moe.kernels.gemm.tile_list import _tile_list_kernel
from ep_moe.layout import Batched, ExpertBatch, Flat, weighted_sum
from ep_moe.quant import FP8_CAPABILITY, QuantScheme
from ep_moe.weights import ExpertWeights

_LIST_BLOCK = 128  # entries of the tile list that one program writes
_REQUANTIZE_NUMBERS = 2048  # elements that one program holds at a time, unless a single row has more
_CPU_PROGRAMS = 4  # grid in the interpreter, which runs programs one after the other


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileList:
    """The row tiles of all experts, on the device."""

    tile_expert: torch.Tensor  # [>= Q] int32
    first_tile: torch.Tensor  # [L] int32
    num_tiles: torch.Tensor  # [1] int32, Q
    amax: torch.Tensor  # [L] int32 zeros, for the bits of the largest magnitudes; empty without `with_amax`
    max_tiles: int  # upper bound of Q
    block_m: int

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The kernels' arguments, in order."""
        return self.tile_expert, self.first_tile, self.num_tiles


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Inner:
    """The intermediate between the GEMMs: rows in the order of the tile list."""

    values: torch.Tensor  # [max_tiles * block_m, I]
    scale: torch.Tensor  # [G, max_tiles * block_m]; [L] if static; unused if the scheme is not quantized
    static: bool


def _max_tiles(batch: ExpertBatch, block_m: int) -> int:
    """The most row tiles that the batch can have, from shapes alone."""
    experts = batch.num_local_experts
    if isinstance(batch, Batched) and batch.row_index is None:
        return experts * math.ceil(batch.x.shape[1] / block_m)
    rows = batch.x.shape[0] if batch.row_index is None else batch.row_index.shape[0]
    return min(rows // block_m + experts, rows)


def build_tile_list(batch: ExpertBatch, block_m: int, *, with_amax: bool) -> TileList:
    """Cut the tokens of every expert into tiles of `block_m`. Local, no host sync."""
    experts, max_tiles, device = batch.num_local_experts, _max_tiles(batch, block_m), batch.x.device
    tile_expert, first_tile, num_tiles, amax = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (max_tiles, experts, 1, experts if with_amax else 0)
    )
    _tile_list_kernel[(triton.cdiv(max_tiles, _LIST_BLOCK),)](
        batch.expert_num_tokens,
        tile_expert,
        first_tile,
        num_tiles,
        amax,
        experts,
        max_tiles,
        BLOCK_M=block_m,
        EXPERTS=triton.next_power_of_2(experts),
        TILES=_LIST_BLOCK,
        HAS_AMAX=with_amax,
    )
    return TileList(
        tile_expert=tile_expert,
        first_tile=first_tile,
        num_tiles=num_tiles,
        amax=amax,
        max_tiles=max_tiles,
        block_m=block_m,
    )


def _num_programs(device: torch.device, per_sm: int, most: int) -> int:
    """The grid of a persistent kernel: one wave of the device, and at most `most` programs."""
    if device.type != "cuda":
        return min(_CPU_PROGRAMS, most)
    return min(torch.cuda.get_device_properties(device).multi_processor_count * per_sm, most)


def _requantize_mode(weights: ExpertWeights, block_n: int) -> str:
    """How to requantize the intermediate: "none", "group" and "static" in the first GEMM, others in further kernels."""
    stored = weights.scheme.activation
    if stored.granularity == "none" or stored.granularity == "token":
        return stored.granularity
    if stored.granularity == "tensor":
        return "tensor" if weights.w2_input_scale is None else "static"
    width = stored.block[1]
    if stored.power_of_two:
        return "rounded groups"
    return "group" if width & (width - 1) == 0 and width <= block_n else "other groups"


def _scale_args(scheme: QuantScheme, tiles: GemmTiles, *, aligned: bool) -> dict[str, object]:
    """The constexprs of both GEMMs that describe the scales of their weights."""
    stored, blocked = scheme.weight, scheme.weight.granularity == "block"
    return {
        "WEIGHT_SCALE": stored.granularity,
        "VECTOR": blocked and not (aligned and stored.block[0] % tiles.block_n == 0),
        "GROUP_N": stored.block[0] if blocked else 1,
        "GROUP_K": stored.block[1] if blocked else 1,
    }


def _tile_args(tiles: GemmTiles, shared: ExpertTiles, columns: int, sums: int) -> dict[str, object]:
    """The tile sizes as constexprs and Triton launch options."""
    return {
        "SWAP": tiles.swap,
        "BLOCK_M": shared.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_M": shared.group_m,
        "EVEN_N": columns % tiles.block_n == 0,
        "EVEN_K": sums % tiles.block_k == 0,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


class TritonExperts:
    """Two grouped GEMMs of all local experts as persistent Triton kernels.

    Results differ from `ReferenceExperts` only in the order of sums: products accumulate in float32, and the
    intermediate is requantized from float32. That is fused into the first GEMM if each tile holds whole scale groups
    (of 16, 32, 64 or 128) or scales are static, but not if scales are powers of two.

    Args:
        activation: between the two GEMMs.
        tiles: tile sizes; None chooses by the batch's `expected_rows`. A call raises ValueError if they do not fit
            the scheme of its weights.
    """

    def __init__(self, activation: ActivationConfig, *, tiles: ExpertTiles | None = None) -> None:
        self.activation = activation
        self.tiles = tiles

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the experts of every row; `ep_moe.experts.base.Experts` has the arguments and the result.

        If the batch has a `row_index` and is not FLAT, the output is [rows of row_index, H]. Weights that are not
        contiguous are copied for each call.
        Errors: also ValueError for a format or scales that the kernels do not support, RuntimeError for fp8 on a GPU
        before sm_89.
        Local, on the current stream, no host sync, CUDA-graph safe.
        """
        check_fit(batch, weights, self.activation, out)
        _check_machine(weights)
        if isinstance(batch, Flat) or out is None:
            rows = batch.output_shape if batch.row_index is None else (batch.row_index.shape[0], batch.hidden)
            y = batch.x.new_empty(rows, dtype=batch.dtype)
        else:
            y = out.contiguous()
        with torch.cuda.device_of(batch.x):
            self._compute(_packed(batch), weights, y)
        if isinstance(batch, Flat):
            return weighted_sum(y, batch.token_to_row, batch.topk_weights, out=out)
        return y if out is None or y is out else out.copy_(y)

    def _compute(self, batch: ExpertBatch, weights: ExpertWeights, y: torch.Tensor) -> None:
        """Write the output rows of every expert that has tokens."""
        if y.numel() == 0 or batch.x.numel() == 0:
            return
        tiles = self._choose_tiles(batch, weights)
        mode = _requantize_mode(weights, tiles.first.block_n)
        tile_list = build_tile_list(batch, tiles.block_m, with_amax=mode == "tensor")
        inner = self._first(batch, weights, tiles, tile_list, mode)
        self._second(batch, weights, tiles, tile_list, inner, y)

    def _choose_tiles(self, batch: ExpertBatch, weights: ExpertWeights) -> ExpertTiles:
        """Tiles for this batch and these weights: those of the constructor, or chosen by size."""
        gated, (block_n, block_k) = self.activation.kind.gated, weights.scheme.weight.block
        blocked = weights.scheme.weight.granularity == "block"
        if self.tiles is not None:
            for name, gemm in (("first", self.tiles.first), ("second", self.tiles.second)):
                if blocked and block_k % gemm.block_k:
                    raise ValueError(
                        f"block_k ({gemm.block_k}) of the {name} GEMM does not divide the {block_k} columns that "
                        f"share a scale in scheme '{weights.scheme.name}'"
                    )
            return self.tiles
        dtype, device = weights.w13.values.dtype, weights.w13.values.device
        tiles = choose_tiles(
            batch.expected_rows,
            dtype,
            gated=gated,
            group_k=block_k if blocked else 0,
            whole_blocks=not blocked or (block_n % 128 == 0 and self._halves_aligned(weights)),
        )
        if device.type != "cuda":
            return tiles
        properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
        return fit_stages(tiles, properties["max_shared_mem"], dtype.itemsize, gated=gated)

    def _halves_aligned(self, weights: ExpertWeights) -> bool:
        """True if no block of scales of w13 spans both the gate and the up half."""
        return not self.activation.kind.gated or weights.w2.values.shape[2] % weights.scheme.weight.block[0] == 0

    def _first(
        self, batch: ExpertBatch, weights: ExpertWeights, tiles: ExpertTiles, tile_list: TileList, mode: str
    ) -> _Inner:
        """Launch the first GEMM: w13, bias, activation and fused requantization; else requantize afterwards."""
        scheme, activation, device = weights.scheme, self.activation, batch.x.device
        hidden, intermediate = batch.hidden, weights.w2.values.shape[2]
        rows = tile_list.max_tiles * tile_list.block_m
        final = mode in ("none", "group", "static")
        values_dtype = (scheme.activation.dtype or batch.dtype) if final else torch.float32
        values = torch.empty(rows, intermediate, dtype=values_dtype, device=device)
        groups = scheme.activation.num_groups(intermediate)
        scale = torch.empty(groups, rows, dtype=torch.float32, device=device)
        static = None
        if mode == "static" and weights.w2_input_scale is not None:
            static = weights.w2_input_scale.contiguous()
        x = batch.x.reshape(-1, hidden)
        x = x if x.stride(1) == 1 else x.contiguous()
        x_scale, (block_stride, row_stride, group_stride) = x, (0, 0, 0)
        height = 1
        if batch.scale is not None:
            x_scale, height = batch.scale, max(batch.scale.shape[-2], 1)
            row_stride, group_stride = x_scale.stride(-2), x_scale.stride(-1)
            block_stride = x_scale.stride(0) if x_scale.dim() == 3 else 0
        limit = activation.limit
        most = tile_list.max_tiles * triton.cdiv(intermediate, tiles.first.block_n)
        _first_gemm_kernel[(_num_programs(device, tiles.first.programs_per_sm, most),)](
            x,
            x_scale,
            weights.w13.values.contiguous(),
            _or(weights.w13.scale, values),
            _or(weights.w13_bias, values),
            values,
            scale,
            _or(static, scale),
            batch.expert_row_start,
            batch.expert_num_tokens,
            _or(batch.row_index, batch.expert_row_start),
            *tile_list.pointers,
            hidden,
            intermediate,
            x.stride(0),
            height,
            block_stride,
            row_stride,
            group_stride,
            rows,
            float(activation.alpha),
            float(activation.beta),
            math.inf if limit is None else float(limit),
            KIND=activation.kind.value,
            LIMITED=limit is not None,
            GATED=activation.kind.gated,
            REQUANTIZE=mode if final else "none",
            HAS_BIAS=weights.w13_bias is not None,
            HAS_INDEX=batch.row_index is not None,
            **_scale_args(scheme, tiles.first, aligned=self._halves_aligned(weights)),
            **_tile_args(tiles.first, tiles, intermediate, hidden),
        )
        if final:
            return _Inner(values=values, scale=scale if static is None else static, static=static is not None)
        return self._requantize(batch, scheme, tile_list, values, scale, mode)

    def _requantize(
        self,
        batch: ExpertBatch,
        scheme: QuantScheme,
        tile_list: TileList,
        inner: torch.Tensor,
        scale: torch.Tensor,
        mode: str,
    ) -> _Inner:
        """Requantize the float32 intermediate [rows, I] if the first GEMM could not."""
        rows, intermediate = inner.shape
        values = torch.empty(inner.shape, dtype=scheme.activation.dtype, device=inner.device)
        if mode == "rounded groups":
            return self._requantize_rounded(scheme, tile_list, batch.expert_num_tokens, inner, values, scale)
        width = scheme.activation.block[1] if scheme.activation.granularity == "group" else intermediate
        per_tensor = mode == "tensor"
        block = triton.next_power_of_2(width)
        per_program = max(min(_REQUANTIZE_NUMBERS // block, tile_list.block_m), 1)
        grid = (_num_programs(inner.device, 8, rows // per_program),)
        if per_tensor:
            _expert_amax_kernel[grid](
                inner,
                tile_list.amax,
                batch.expert_num_tokens,
                *tile_list.pointers,
                intermediate,
                BLOCK_M=tile_list.block_m,
                ROWS=per_program,
                BLOCK=block,
            )
        _requantize_kernel[grid](
            inner,
            values,
            scale,
            tile_list.amax,
            batch.expert_num_tokens,
            *tile_list.pointers,
            intermediate,
            width,
            rows,
            PER_TENSOR=per_tensor,
            BLOCK_M=tile_list.block_m,
            ROWS=per_program,
            BLOCK=block,
            num_warps=4 if block <= 4096 else 8,
        )
        return _Inner(values=values, scale=scale, static=False)

    def _requantize_rounded(
        self,
        scheme: QuantScheme,
        tile_list: TileList,
        expert_num_tokens: torch.Tensor,
        inner: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor,
    ) -> _Inner:
        """Requantize the float32 intermediate [rows, I] in groups whose scales are powers of two."""
        (rows, intermediate), group = inner.shape, scheme.activation.block[1]
        block = triton.next_power_of_2(group)
        per_program = max(min(_REQUANTIZE_NUMBERS // block, tile_list.block_m), 1)
        most = rows // per_program * scale.shape[0]
        _requantize_rounded_kernel[(_num_programs(inner.device, 8, most),)](
            inner,
            values,
            scale,
            expert_num_tokens,
            *tile_list.pointers,
            intermediate,
            rows,
            GROUP=group,
            BLOCK_M=tile_list.block_m,
            ROWS=per_program,
            BLOCK=block,
        )
        return _Inner(values=values, scale=scale, static=False)

    def _second(
        self,
        batch: ExpertBatch,
        weights: ExpertWeights,
        tiles: ExpertTiles,
        tile_list: TileList,
        inner: _Inner,
        y: torch.Tensor,
    ) -> None:
        """Launch the second GEMM: w2, bias and a single rounding."""
        _, hidden, intermediate = weights.w2.values.shape
        most = tile_list.max_tiles * triton.cdiv(hidden, tiles.second.block_n)
        _second_gemm_kernel[(_num_programs(y.device, tiles.second.programs_per_sm, most),)](
            inner.values,
            inner.scale,
            weights.w2.values.contiguous(),
            _or(weights.w2.scale, y),
            _or(weights.w2_bias, y),
            y,
            batch.expert_row_start,
            batch.expert_num_tokens,
            *tile_list.pointers,
            intermediate,
            hidden,
            inner.values.shape[0],
            STATIC=inner.static,
            HAS_BIAS=weights.w2_bias is not None,
            **_scale_args(weights.scheme, tiles.second, aligned=True),
            **_tile_args(tiles.second, tiles, hidden, intermediate),
        )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous; or `other` as a placeholder pointer that the kernel does not read."""
    return other if tensor is None else tensor.contiguous()


def _packed(batch: ExpertBatch) -> ExpertBatch:
    """The batch with contiguous index tensors, as the kernels need them."""
    return dataclasses.replace(
        batch,
        expert_row_start=batch.expert_row_start.contiguous(),
        expert_num_tokens=batch.expert_num_tokens.contiguous(),
        row_index=None if batch.row_index is None else batch.row_index.contiguous(),
    )


def _check_machine(weights: ExpertWeights) -> None:
    """Raise for unsupported formats and combinations of scales, and for fp8 on a GPU without it."""
    scheme, device = weights.scheme, weights.w13.values.device
    check_scheme(scheme)
    per_weight, per_activation = scheme.weight.granularity, scheme.activation.granularity
    if (per_weight == "block") != (per_activation == "group"):
        raise ValueError(
            f"scheme '{scheme.name}' scales weights per {per_weight} and activations per {per_activation}; "
            "'triton' experts take blocks with groups, and neither without the other"
        )
    if scheme.weight.quantized and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise RuntimeError(
            f"fp8 in Triton needs compute capability {FP8_CAPABILITY}, {torch.cuda.get_device_name(device)} has "
            f"{torch.cuda.get_device_capability(device)}; 'torch' experts do without"
        )
