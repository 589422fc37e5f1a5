"""Which calls Hopper's kernels take, and with what tiles."""

import dataclasses

import pytest
import torch

from ep_moe.config import ActivationConfig
from ep_moe.quant import get_scheme

gluon = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon")

from ep_moe.experts.grouped_gemm import CallShape  # noqa: E402 - they import Triton
from ep_moe.experts.hopper.gemms import HopperGemms  # noqa: E402
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles  # noqa: E402


def shape_of(scheme: str, expected_rows: int, *, num_experts: int = 32, hidden: int = 7168) -> CallShape:
    """A call of DeepSeek-V3's experts, whose intermediate is 2048 wide."""
    return CallShape(
        device=torch.device("cpu"),
        scheme=get_scheme(scheme),
        dtype=torch.bfloat16,
        activation=ActivationConfig(),
        num_experts=num_experts,
        hidden=hidden,
        intermediate=2048,
        expected_rows=expected_rows,
        max_rows=num_experts * expected_rows,
        rows_apart=False,
        x_stride=hidden,
        scale_height=1,
        scale_strides=(0, 0, 0),
        static_scale=False,
        gathered=False,
        limited=False,
        up_first=False,
        alternating=False,
    )


@pytest.mark.parametrize(
    ("scheme", "num_experts", "least"),
    [
        ("mxfp4_w4a16", 32, 2),
        ("mxfp4_w4a16", 16, 17),  # 512 tiles of the first GEMM
        ("nvfp4", 32, 2),
        ("int8_w8a16", 32, 2),
        ("int4_w4a16_g128", 32, 17),
    ],
)
def test_rows_from_which_weights_are_decoded(scheme: str, num_experts: int, least: int) -> None:
    backend = HopperGemms(anywhere=True)
    assert backend.tiles(shape_of(scheme, least - 1, num_experts=num_experts)) is None
    for rows, of_tile in {least: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128, 128: 128, 129: 256, 5000: 256}.items():
        tiles = backend.tiles(shape_of(scheme, rows, num_experts=num_experts))
        assert tiles is not None
        assert tiles.block_m == of_tile, rows


@pytest.mark.parametrize(
    ("scheme", "hidden", "reason"),
    [
        ("fp8_w8a16", 7168, "they do not compute scheme 'fp8_w8a16' in torch.bfloat16"),
        ("int4_w4a16_g32_f32", 7168, "they do not compute scheme 'int4_w4a16_g32_f32' in torch.bfloat16"),
        ("int4_w4a16_g48", 7104, "groups of 48 columns do not fit steps of 128, or are less than 8"),
        ("mxfp4_w4a16", 2896, "rows of weights of hidden (2896) columns are no multiple of 16 bytes"),
    ],
)
def test_what_they_do_not_decode(scheme: str, hidden: int, reason: str) -> None:
    backend = HopperGemms(anywhere=True)
    assert backend.obstacle(shape_of(scheme, 512, hidden=hidden)) == reason
    assert backend.tiles(shape_of(scheme, 512, hidden=hidden)) is None


@pytest.mark.parametrize(
    ("scheme", "least", "least_gathered"),
    [("none", 2, 96), ("fp8_block", 1, 64), ("fp8_token", 1, 64), ("int8_block", 1, 64), ("int8_token", 1, 64)],
)
def test_rows_from_which_they_multiply(scheme: str, least: int, least_gathered: int) -> None:
    backend = HopperGemms(anywhere=True)

    def tiles(rows: int, *, gathered: bool = False) -> ExpertTiles | None:
        shape = dataclasses.replace(shape_of(scheme, rows), scale_strides=(0, 1, 2048), gathered=gathered)
        return backend.tiles(shape)

    assert (least == 1) == (tiles(1) is not None)
    for rows, of_tile in {least: 32, 16: 32, 17: 64, 32: 64, 33: 128, 5000: 128}.items():
        assert tiles(rows) == dataclasses.replace(HOPPER_TILES, block_m=of_tile)
    assert tiles(least_gathered - 1, gathered=True) is None
    assert tiles(least_gathered, gathered=True) == HOPPER_TILES


def test_blocks_of_int8_that_they_do_not_multiply() -> None:
    shape = dataclasses.replace(shape_of("int8_block_64x64", 512), scale_strides=(0, 1, 16384))
    assert HopperGemms(anywhere=True).obstacle(shape) == "blocks of scales are (64, 64), not 128 x 128"
