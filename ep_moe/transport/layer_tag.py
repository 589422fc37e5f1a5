"""The tag in every rank's header that identifies the layer of a round, in two 32-bit words.

Ranks that call different layers, or layers created with different settings, would mix their tokens without an error.
So each round compares the tags of all ranks before any payload is used.
"""

import dataclasses
import zlib

from ep_moe.config import ALIGNMENT, MoEConfig
from ep_moe.placement import Placement

MOST_LAYERS = 1 << 12  # layer numbers are taken modulo this
_ACTIVATION_BITS, _PLACEMENT_BITS, _SIZE_BITS = 20, 20, 12


def _digest(value: object, bits: int) -> int:
    """A checksum of plain values that is the same on every rank: it does not depend on Python's hash seed."""
    checksum = zlib.crc32(repr(value).encode())
    return (checksum ^ checksum >> bits) & ((1 << bits) - 1)


def signed_word(word: int) -> int:
    """The int32 with the bits of a number in [0, 2^32)."""
    return word - (1 << 32) if word >> 31 else word


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerTag:
    """A layer as ranks compare it: its number, and checksums of the settings that must be the same on all ranks.

    The default is the tag of rounds that belong to no layer.
    """

    number: int = 0  # [0, MOST_LAYERS)
    size: int = 0  # intermediate / 16, modulo 2^12
    activation: int = 0  # 20 bits
    placement: int = 0  # 20 bits; of one that may change, its sizes
    words: tuple[int, int] = dataclasses.field(init=False, repr=False, compare=False)  # the same as two int32

    def __post_init__(self) -> None:
        layer, settings = (
            self.number << _ACTIVATION_BITS | self.activation,
            self.size << _PLACEMENT_BITS | self.placement,
        )
        object.__setattr__(self, "words", (signed_word(layer), signed_word(settings)))

    @classmethod
    def of(cls, number: int, config: MoEConfig, placement: Placement, *, changing: bool = False) -> "LayerTag":
        """The tag of a layer. Its layout may differ between ranks; its scheme is compared as the payload's format.

        Captured graphs keep the words of a tag, so of a placement that is `changing` it has the sizes alone: who
        changes the placement makes sure that all ranks do.
        """
        kind, *numbers = dataclasses.astuple(config.activation)  # floats, however they were given
        return cls(
            number=number % MOST_LAYERS,
            size=config.intermediate // ALIGNMENT % (1 << _SIZE_BITS),
            activation=_digest((kind.value, *numbers), _ACTIVATION_BITS),
            placement=_digest(
                (placement.num_experts if changing else placement.physical_to_logical, placement.starts),
                _PLACEMENT_BITS,
            ),
        )

    @classmethod
    def from_words(cls, layer: int, settings: int) -> "LayerTag":
        """The tag with these `words`, of which only the lower 32 bits are used."""
        layer, settings = layer & 0xFFFFFFFF, settings & 0xFFFFFFFF
        return cls(
            number=layer >> _ACTIVATION_BITS,
            activation=layer & ((1 << _ACTIVATION_BITS) - 1),
            size=settings >> _PLACEMENT_BITS,
            placement=settings & ((1 << _PLACEMENT_BITS) - 1),
        )


NO_LAYER = LayerTag()


def other_layer_message(own: LayerTag, rank: int, theirs: LayerTag, their_rank: int, round_: int) -> str:
    """The message of every transport if two ranks are in different layers in a round; each rank names itself first."""
    if own.number != theirs.number:
        return (
            f"ranks are out of step in round {round_}: rank {rank} is in layer {own.number}, rank {their_rank} in "
            f"layer {theirs.number}; every rank calls the same layers in the same order, with zero tokens too"
        )
    differing = [
        name
        for name, differs in (
            (f"intermediate ({own.size * ALIGNMENT} and {theirs.size * ALIGNMENT})", own.size != theirs.size),
            ("activation", own.activation != theirs.activation),
            ("placement", own.placement != theirs.placement),
        )
        if differs
    ]
    return (
        f"rank {rank} and rank {their_rank} have made layer {own.number} with different settings: "
        f"{'; '.join(differing)} (found in round {round_})"
    )
