"""The most of each size that the one-sided protocol's words can hold."""

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernels.exchange.wire_layout import PLACE_BITS
from ep_moe.placement import Placement

MOST_RANKS = 32  # one bit each in int32 masks
MOST_TOKENS = 1 << PLACE_BITS.value  # of a rank: an entry's low bits hold a row's place, its high bits the expert
MOST_LOCAL_EXPERTS = 1 << 31 - PLACE_BITS.value


def check_limits(name: str, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
    """Raise ValueError if a size exceeds what transport `name` carries. Local."""
    most_experts = max(map(placement.num_local_experts, range(group.num_ranks)))
    for size, value, limit in (
        ("num_ranks", group.num_ranks, MOST_RANKS),
        ("max_tokens_per_rank", config.max_tokens_per_rank, MOST_TOKENS),
        ("num_local_experts", most_experts, MOST_LOCAL_EXPERTS),
    ):
        if value > limit:
            raise ValueError(f"{size} ({value}) exceeds {limit}, the most that transport {name!r} carries")
