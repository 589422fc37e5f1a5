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
    options = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}
    maps = {"starts": placement.starts, "physical_to_logical": placement.physical_to_logical}
    for rank, (their_options, their_maps) in enumerate(group.all_gather_object((options, maps))):
        differences = [*_option_differences(options, their_options), *_map_differences(maps, their_maps)]
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


def _option_differences(own: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    for name, mine in own.items():
        if mine != theirs[name]:
            yield f"{name} ({mine} and {theirs[name]})"


def _map_differences(own: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """The first element at which the tuples of two placements differ: a whole tuple has hundreds of elements."""
    for name, mine in own.items():
        other = theirs[name]
        if len(mine) != len(other):
            yield f"length of the placement's {name} ({len(mine)} and {len(other)})"
        elif mine != other:
            place = next(i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1])
            yield f"the placement's {name}[{place}] ({mine[place]} and {other[place]})"
