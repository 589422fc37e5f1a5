"""The grouped GEMMs in Triton.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import math
from pathlib import Path
from typing import Any

import triton

from ep_moe.config import ActivationConfig
from ep_moe.experts.grouped_gemm import Between, CallShape, GroupedGemm
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.launching import PreparedKernel, num_programs
from ep_moe.experts.serves import SERVES
from ep_moe.experts.tuning import ExpertTiles, GemmTiles
from ep_moe.kernel_launch.constants import constants
from ep_moe.kernels.gemm.arguments import Epilogue, Scales, TileShape
from ep_moe.kernels.gemm.grouped import _first_gemm_kernel, _second_gemm_kernel


def _prepare(
    kernel: Any,
    numbers: tuple[int | float, ...],
    epilogue: Epilogue,
    shape: CallShape,
    tiles: ExpertTiles,
    between: Between,
    *,
    gemm: GemmTiles,
    aligned: bool,
) -> PreparedKernel:
    """Prepare one of the GEMMs, whose first two numbers are K and N.

    `aligned`: no block of weight scales begins within another half of the weights.
    """
    sums, columns, stored = int(numbers[0]), int(numbers[1]), shape.scheme.weight
    blocked = stored.granularity == "block"
    most = shape.max_tiles(tiles.block_m) * triton.cdiv(columns, gemm.block_n)
    return PreparedKernel(
        kernel=kernel,
        grid=num_programs(shape.device, gemm.programs_per_sm, most),
        numbers=numbers,
        constants={
            "TILE": constants(
                TileShape,
                BLOCK_M=tiles.block_m,
                BLOCK_N=gemm.block_n,
                BLOCK_K=gemm.block_k,
                GROUP_M=tiles.group_m,
                SWAP=gemm.swap,
                EVEN_N=columns % gemm.block_n == 0,
                EVEN_K=sums % gemm.block_k == 0,
            ),
            "SCALES": constants(
                Scales,
                WEIGHT=stored.granularity,
                VECTOR=blocked and not (aligned and stored.block[0] % gemm.block_n == 0),
                GROUP_N=stored.block[0] if blocked else 1,
                GROUP_K=stored.block[1] if blocked else 1,
                STATIC=between is Between.STATIC,
            ),
            "EPILOGUE": epilogue,
            "num_warps": gemm.num_warps,
            "num_stages": gemm.num_stages,
        },
    )


class TritonGemms:
    """Both GEMMs as persistent Triton kernels; a `Backend`."""

    serves = SERVES["triton"]

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_first_gemm_kernel` for calls of this shape. Local."""
        activation, rows = shape.activation, shape.max_tiles(tiles.block_m) * tiles.block_m
        epilogue = constants(
            Epilogue,
            ACTIVATION=shape.activation_name,
            GATED=activation.kind.gated,
            LIMITED=shape.limited,
            REQUANTIZE=between.value if between.fused else "none",
            POWER_OF_TWO=shape.scheme.activation.power_of_two,
        )
        numbers = (
            shape.hidden,
            shape.intermediate,
            shape.x_stride,
            shape.scale_height,
            *shape.scale_strides,
            rows,
            float(activation.alpha),
            float(activation.beta),
            math.inf if activation.limit is None else float(activation.limit),
        )
        return _prepare(
            _first_gemm_kernel,
            numbers,
            epilogue,
            shape,
            tiles,
            between,
            gemm=tiles.first,
            aligned=shape.halves_aligned,
        )

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_second_gemm_kernel` for calls of this shape. Local."""
        epilogue = constants(
            Epilogue, ACTIVATION="identity", GATED=False, LIMITED=False, REQUANTIZE="none", POWER_OF_TWO=False
        )
        numbers = (shape.intermediate, shape.hidden, shape.max_tiles(tiles.block_m) * tiles.block_m)
        return _prepare(_second_gemm_kernel, numbers, epilogue, shape, tiles, between, gemm=tiles.second, aligned=True)


class TritonExperts(KernelExperts):
    """`KernelExperts` whose GEMMs are Triton's; the arguments are explained there."""

    def __init__(self, activation: ActivationConfig, *, tiles: ExpertTiles | Path | None = None) -> None:
        super().__init__(activation, TritonGemms(), tiles=tiles)
