"""The check, when a transport is created, that sizes and placement are the same on all ranks."""

import dataclasses
from collections.abc import Iterator

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement


def compare_ranks(group: EPGroup, placement: Placement, config: TransportConfig) -> None:
    """Raise ValueError if ranks differ in config or placement, or if the placement is for another number of ranks.

    The message holds the differing fields, with this rank's value and the other's. Collective, host sync.
    """
    for rank, (their_placement, their_config) in enumerate(group.all_gather_object((placement, config))):
        differences = [*_config_differences(config, their_config), *_placement_differences(placement, their_placement)]
        if differences:
            raise ValueError(
                f"rank {group.rank} and rank {rank} make the transport differently: {'; '.join(differences)}"
            )
    if placement.num_ranks != group.num_ranks:
        raise ValueError(
            f"the placement spreads experts over {placement.num_ranks} ranks, the group has {group.num_ranks}"
        )


def check_waits_for_all(config: TransportConfig, waiting: str) -> None:
    """Raise ValueError if ranks are to continue without a lost one; `waiting` names what waits for all. Local."""
    if config.on_peer_loss != "raise":
        raise ValueError(f"on_peer_loss ({config.on_peer_loss!r}) needs transport 'nvlink': {waiting} waits for all")


def _config_differences(own: TransportConfig, theirs: TransportConfig) -> Iterator[str]:
    for field in dataclasses.fields(own):
        mine, other = getattr(own, field.name), getattr(theirs, field.name)
        if mine != other:
            yield f"{field.name} ({mine} and {other})"


def _placement_differences(own: Placement, theirs: Placement) -> Iterator[str]:
    """The first element at which the tuples of two placements differ: a whole tuple has hundreds of elements."""
    for name in ("starts", "physical_to_logical"):
        mine, other = getattr(own, name), getattr(theirs, name)
        if len(mine) != len(other):
            yield f"length of the placement's {name} ({len(mine)} and {len(other)})"
        elif mine != other:
            place = next(i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1])
            yield f"the placement's {name}[{place}] ({mine[place]} and {other[place]})"
