"""Which blocks of tokens a rank's prefix cache holds, and which of them a prompt begins with.

Keys and values of a block depend on its tokens and on those before it alone, so that a block is known by its parent and
its tokens: by these themselves, not by a hash of them, so that no two prefixes are taken for each other.
"""

import collections
from collections.abc import Iterator, Sequence

from ep_moe.engines.transformers.decoding.fixed_cache import BLOCK

_ROOT = -1  # the parent of first blocks


class PrefixBlocks:
    """The blocks of one rank's prefix cache; new ones take the places of those that were used least recently.

    A block is used whenever one behind it is: the least recently used one has none behind it.

    Args:
        num_blocks: places, 0 for no cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_made = 0  # blocks so far, each of which has its own number
        # (number of the parent, tokens) -> (number, place), the least recently used first
        self._blocks: collections.OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = collections.OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return BLOCK * len(self._blocks)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The places of the longest known prefix, one for each of its blocks; they are not used by that."""
        return [self._blocks[key][1] for key in self._known(tokens)]

    def add(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Use all whole blocks of a prefix, as many as there are places; returns (index in the prefix, place) of those
        that are new."""
        known = list(self._known(tokens))
        parent = self._blocks[known[-1]][0] if known else _ROOT
        for key in reversed(known):  # a parent is used after those behind it
            self._blocks.move_to_end(key)
        new = []
        for index in range(len(known), min(len(tokens) // BLOCK, self._num_blocks)):
            place = len(self._blocks)
            if place == self._num_blocks:
                _, (_, place) = self._blocks.popitem(last=False)
            key = parent, tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            parent, self._num_made = self._num_made, self._num_made + 1
            self._blocks[key] = parent, place
            known.append(key)
            new.append((index, place))
        for key in reversed(known):
            self._blocks.move_to_end(key)
        return new

    def _known(self, tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The keys of the longest known prefix."""
        parent = _ROOT
        for index in range(min(len(tokens) // BLOCK, self._num_blocks)):
            key = parent, tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
            if key not in self._blocks:
                return
            yield key
            parent = self._blocks[key][0]
