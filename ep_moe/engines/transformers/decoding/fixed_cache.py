"""A key-value cache of fixed shapes, whose decode step is the same sequence of operations at every position.

transformers' StaticCache keeps a length on the host for sliding windows, and one length for all rows. Here each row has
a position of its own, on the device, and a sliding window is a ring: position p is stored in entry p mod S.
Letters: B rows, P prompt tokens, C capacity (positions of a row), S entries of a layer: C, or a smaller window.
"""

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """The window of each layer in positions, None for a layer that attends to all of them.

    Errors: ValueError names the first kind of layer whose state is not a window of keys and values. Local.
    """
    text: Any = config.get_text_config()
    types, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            raise ValueError("layers of chunked attention have no cache of fixed shape here")
        types = [FULL if window is None else SLIDING] * text.num_hidden_layers
    for name in types:
        if name not in (FULL, SLIDING):
            raise ValueError(f"layers of type {name!r} have no cache of fixed shape here")
    if SLIDING in types and not isinstance(window, int):
        raise ValueError(f"sliding_window ({window!r}) must be a number of positions")
    return [window if name == SLIDING else None for name in types]


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, S, head dim] each; allocated by its first prefill."""

    def __init__(self, cache: "FixedCache", window: int | None) -> None:
        super().__init__()
        self._cache, self._window = cache, window
        self.is_sliding = window is not None

    def entries(self, capacity: int) -> int:
        """S for C positions."""
        return capacity if self._window is None else min(self._window, capacity)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the rows and the capacity that the cache has reserved. Filled with zeros: an unused
        entry is multiplied by a probability of 0, and 0 * NaN is NaN."""
        rows, entries = self._cache.rows, self.entries(self._cache.capacity)
        self.keys, self.values = (
            states.new_zeros(rows, states.shape[1], entries, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def forget(self) -> None:
        """Free the memory."""
        self.keys, self.values, self.is_initialized = None, None, False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, heads, tokens, head dim]; returns what the tokens attend to: in a prefill these states, in a
        decode step all entries."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._cache.store(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a prefill attends to; a decode step brings its own masks."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """A prefill starts at position 0; a decode step brings its own positions."""
        return 0

    def get_max_length(self) -> int:
        """C."""
        return self._cache.capacity


class FixedCache(Cache):
    """The cache of a rank's sequences: `reserve`, then `begin_prefill` or `begin_decode` before each forward pass.

    Args:
        windows: of each layer, as `windows_of` returns them.
    """

    def __init__(self, windows: list[int | None]) -> None:
        self.rows, self.capacity = 0, 0  # allocated, or to be allocated by the next prefill
        self._span = slice(0)  # rows of the current pass
        self._used = 0  # C of the current sequences
        self._decoding = False
        self._lengths: torch.Tensor | None = None  # of padded prompts, else None
        self._positions: torch.Tensor | None = None
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}  # of the current pass, shared by layers of the same S
        self._own = [FixedLayer(self, window) for window in windows]
        super().__init__(layers=[*self._own])

    @property
    def num_bytes(self) -> int:
        """Bytes of allocated keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self._own for tensor in (layer.keys, layer.values) if tensor is not None]

    def reserve(self, rows: int, capacity: int) -> bool:
        """Reserve memory for B rows of C positions; True if new memory is needed. Local."""
        if rows <= self.rows and capacity <= self.capacity:
            return False
        self.rows, self.capacity = max(rows, self.rows), max(capacity, self.capacity)
        self.forget()
        return True

    def forget(self) -> None:
        """Free the memory; the next prefill allocates it again. Local."""
        for layer in self._own:
            layer.forget()

    def clear(self, first: int = 0, count: int | None = None) -> None:
        """Zero `count` rows, by default all: rows that hold no sequence may have stored NaN. Local, no host sync."""
        last = None if count is None else first + count
        if tensors := [tensor[first:last] for tensor in self._tensors()]:
            torch._foreach_zero_(tensors)

    def begin_prefill(self, first: int, count: int, capacity: int, lengths: torch.Tensor | None) -> None:
        """The next pass computes whole prompts [count, P] for rows [first, first + count).

        Args:
            capacity: C of these sequences. lengths: [count] int64 of prompts with padding on the left, None without.
        """
        self._decoding, self._span, self._used = False, slice(first, first + count), capacity
        self._lengths, self._positions = lengths, None
        self._indices = {}

    def begin_decode(self, rows: int, capacity: int, positions: torch.Tensor) -> None:
        """The next pass computes one token for each of the first `rows` rows, at `positions` [rows] int64."""
        self._decoding, self._span, self._used = True, slice(0, rows), capacity
        self._lengths, self._positions = None, positions
        self._indices = {}

    def masks(self, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
        """The masks of a decode step as transformers prepares them for a static cache.

        Returns: one [B, 1, 1, S], or one for each type of layer, to be added to scores: 0 for an entry that the token
            attends to. Floats, since torch would convert bools in every layer. Local, no host sync.
        """
        assert self._positions is not None
        by_entries: dict[int, torch.Tensor] = {}
        for layer in self._own:
            entries = layer.entries(self._used)
            if entries not in by_entries:
                seen = torch.arange(entries, device=self._positions.device) <= self._positions[:, None]
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                by_entries[entries] = mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None, None]
        types = getattr(config, "layer_types", None)
        masks = [by_entries[layer.entries(self._used)] for layer in self._own]
        return masks[0] if types is None else dict(zip(types, masks, strict=True))

    def store(
        self, layer: FixedLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`FixedLayer.update` for the current pass."""
        entries = layer.entries(self._used)
        assert layer.keys is not None
        assert layer.values is not None
        memory = [tensor[self._span, :, :entries] for tensor in (layer.keys, layer.values)]
        if self._decoding:
            index = self._decode_index(entries)
            for kept, states in zip(memory, (key_states, value_states), strict=True):
                kept.scatter_(2, index.expand(-1, states.shape[1], 1, states.shape[3]), states)
            return memory[0], memory[1]
        num_tokens = key_states.shape[2]
        count = min(num_tokens, entries)
        for kept, states in zip(memory, (key_states, value_states), strict=True):
            if self._lengths is None and num_tokens <= entries:
                kept[:, :, :count] = states
            else:
                index = self._prefill_index(num_tokens, entries, states)
                kept[:, :, :count] = states.gather(2, index.expand(-1, states.shape[1], count, states.shape[3]))
        return key_states, value_states

    def _decode_index(self, entries: int) -> torch.Tensor:
        """[B, 1, 1, 1], the entry of each row's token."""
        if (entries,) not in self._indices:
            assert self._positions is not None
            self._indices[entries,] = (self._positions % entries)[:, None, None, None]
        return self._indices[entries,]

    def _prefill_index(self, num_tokens: int, entries: int, states: torch.Tensor) -> torch.Tensor:
        """[B, 1, count, 1], the column of the padded prompt that each entry holds: the last position p < length with
        p mod S = entry. Example: S 4, no padding, P 6: entries 0 to 3 hold positions 4, 5, 2, 3."""
        key = (num_tokens, entries)
        if key not in self._indices:
            lengths = self._lengths
            if lengths is None:
                lengths = torch.full((states.shape[0],), num_tokens, device=states.device)
            last = lengths[:, None] - 1
            position = last - (last - torch.arange(min(num_tokens, entries), device=states.device)) % entries
            column = position.clamp(min=0) + num_tokens - lengths[:, None]
            self._indices[key] = column[:, None, :, None]
        return self._indices[key]
