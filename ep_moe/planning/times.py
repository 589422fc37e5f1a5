"""Microseconds of a layer's phases, from counts of bytes and of rows and the constants of the hardware.

Letters: T tokens on each rank, K top-k, H hidden, I intermediate, R ranks.
"""

import dataclasses
import math
from typing import Annotated

from ep_moe.fields import Field, check_fields
from ep_moe.planning.hardware import Hardware
from ep_moe.planning.traffic import Traffic

SCHEMES = ("fp8_block", "none")  # that constants are known of
TILE_ROWS = 16  # rows of an expert are computed in multiples of this
MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One MoE layer: H, I, E, K, the scheme, and whether the first GEMM has a gate and an up half."""

    hidden: Annotated[int, Field(at_least=1)]
    intermediate: Annotated[int, Field(at_least=1)]
    num_experts: Annotated[int, Field(at_least=1)]
    num_topk: Annotated[int, Field(at_least=1)]
    scheme: Annotated[str, Field(choices=SCHEMES)] = "fp8_block"
    gated: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a token's row in dispatch, with scales."""
        return 2 * self.hidden if self.scheme == "none" else self.hidden + 4 * math.ceil(self.hidden / 128)

    @property
    def return_bytes(self) -> int:
        """Bytes of a row in combine."""
        return 2 * self.hidden

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights, with scales of 128 x 128 blocks."""
        return self.expert_params * (2 if self.scheme == "none" else 1 + 4 / 128**2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Microseconds of the slowest rank."""

    dispatch_us: float
    experts_us: float
    combine_us: float
    rest_us: float

    @property
    def whole_us(self) -> float:
        """Of the whole layer, if nothing overlaps."""
        return self.dispatch_us + self.experts_us + self.combine_us + self.rest_us


def nvlink_us(
    hw: Hardware, shape: LayerShape, tokens: int, load: Traffic, *, packs: bool = True, num_sms: int = 0
) -> tuple[float, float]:
    """Dispatch and combine of the one-sided transport inside a node.

    Args:
        packs: False for the FLAT layout, whose dispatch leaves rows where they arrive. num_sms: 0 is all.
    """
    rows = tokens * shape.num_topk * load.imbalance
    sends = tokens * load.remote_ranks
    dispatch = hw.dispatch_wire_us * sends * shape.payload_bytes / MB
    dispatch += hw.dispatch_pack_us * rows * shape.payload_bytes / MB if packs else 0.0
    combine = (hw.combine_wire_us * sends + hw.combine_pack_us * rows) * shape.return_bytes / MB
    floors = [sends * size / hw.link_gbs / 1e3 for size in (shape.payload_bytes, shape.return_bytes)]
    if num_sms:
        dispatch *= max(1.0, hw.dispatch_sms / num_sms)
        combine *= max(1.0, hw.combine_sms / num_sms)
    return hw.dispatch_us + max(dispatch, floors[0]), hw.combine_us + max(combine, floors[1])


def collective_us(
    hw: Hardware, shape: LayerShape, tokens: int, load: Traffic, num_ranks: int, *, per_node: bool = False
) -> tuple[float, float]:
    """Dispatch and combine by NCCL's all-to-all, inside nodes and between them, with packing.

    Args:
        per_node: a token crosses the network once for each node, not for each rank, as by `hierarchical`; what it
            forwards inside nodes is priced as NCCL's, which one-sided stores undercut.
    """
    remote = load.remote_ranks - load.remote_on_node
    crossing = load.remote_nodes if per_node else remote
    inside = load.remote_ranks if per_node else load.remote_on_node
    found = []
    for size, pack in ((shape.payload_bytes, hw.dispatch_pack_us), (shape.return_bytes, hw.combine_pack_us)):
        fixed = (hw.collective_us + hw.collective_rank_us * min(num_ranks - 1, hw.gpus_per_node - 1)) / 2
        wire = hw.collective_wire_us * tokens * inside * size / MB
        network = 0.0
        if remote > 0:
            network = hw.network_us + tokens * crossing * size / hw.network_gbs / 1e3
        rows = tokens * shape.num_topk * load.imbalance
        found.append(fixed + wire + network + pack * rows * size / MB)
    return found[0], found[1]


def experts_us(hw: Hardware, shape: LayerShape, rows: list[float], active: list[float]) -> float:
    """Both GEMMs of one rank.

    Args:
        rows: rows of each expert that has any. active: how likely it is to have any, 1 for certain.
    """
    reading = sum(active) * shape.expert_bytes / hw.weight_gbs / 1e3
    flops = sum(p * math.ceil(m / TILE_ROWS) * TILE_ROWS for m, p in zip(rows, active, strict=True))
    flops *= 2 * shape.expert_params
    multiplying = flops / (hw.bf16_tflops if shape.scheme == "none" else hw.fp8_tflops) / 1e6
    return hw.experts_us + (reading**hw.overlap + multiplying**hw.overlap) ** (1 / hw.overlap)


def rows_of_experts(shape: LayerShape, tokens: int, num_ranks: int, load: Traffic) -> tuple[list[float], list[float]]:
    """Rows of the slowest rank's experts that have any, and how likely each is to have any."""
    pairs = tokens * num_ranks * shape.num_topk
    active = [-math.expm1(tokens * num_ranks * _log_missed(shape, share)) for share in load.expert_shares]
    return [pairs * share / max(p, 1e-9) for share, p in zip(load.expert_shares, active, strict=True)], active


def _log_missed(shape: LayerShape, share: float) -> float:
    """The logarithm of how likely a token is not to choose an expert."""
    return math.log1p(-min(shape.num_topk * share, 1 - 1e-9))
