"""A key-value cache of fixed shapes, whose decode step is the same sequence of operations at every position.

transformers' StaticCache keeps a length on the host for sliding windows, and one length for all rows. Here each row has
a position of its own, on the device, and a sliding window is a ring: position p is stored in entry p mod S.
Letters: B rows, N tokens of a chunk of a prompt, C capacity (positions of a row), S entries of a layer: C, or a smaller
window.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 16  # positions whose keys and values are copied together; divides every capacity
_NOWHERE = 2**40  # the position of a key that no token attends to


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
        """Store [B, heads, tokens, head dim]; returns what the tokens attend to: in a prefill these states, behind the
        entries of positions before them, in a decode step all entries."""
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._cache.store(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a prefill from position 0 on attends to; other passes bring their own masks."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """A prefill starts at position 0, or brings its own positions, as a decode step does."""
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
        self._span: slice | torch.Tensor = slice(0)  # rows of the current pass
        self._used = 0  # C of the current sequences
        self._positions: torch.Tensor | None = None  # of a decode step's tokens
        self._firsts: Sequence[int] = ()  # of a prefill: the position of each row's first token, and that behind its
        self._ends: Sequence[int] = ()  # last one
        self._bounds: torch.Tensor | None = None  # the same, [2, B, 1]
        self._indices: dict[tuple[int, ...], Any] = {}  # of the current pass, shared by layers of the same S
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

    def clear(self, rows: Sequence[int] | None = None) -> None:
        """Zero some rows, by default all: rows that hold no sequence may have stored NaN. Local, no host sync."""
        spans = [slice(None)] if rows is None else [slice(row, row + 1) for row in rows]
        if tensors := [tensor[span] for tensor in self._tensors() for span in spans]:
            torch._foreach_zero_(tensors)

    def clear_behind(self, positions: torch.Tensor) -> None:
        """Zero what rows have stored from these positions on, [B] int64: a pass that a failed rank took part in may
        have stored NaN, which a mask does not hide. Rings that are full keep all. Local, no host sync."""
        for tensor in self._tensors():
            behind = torch.arange(tensor.shape[2], device=positions.device) >= positions[:, None]
            tensor[: positions.shape[0]].masked_fill_(behind[:, None, :, None], 0)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], device: torch.device) -> None:
        """Copy the keys and values of BLOCK positions each, in all layers, none of which has a smaller window.

        Args:
            sources, targets: block i of row r is r * C / BLOCK + i; no target is a source.
        Local, no host sync.
        """
        index = torch.tensor([sources, targets], device="cpu").to(device, non_blocking=True)
        per_row = self.capacity // BLOCK
        rows, places = index // per_row, index % per_row
        for tensor in self._tensors():
            blocks = tensor.unflatten(2, (per_row, BLOCK))
            blocks[rows[1], :, places[1]] = blocks[rows[0], :, places[0]]

    def begin_prefill(
        self, rows: Sequence[int], firsts: Sequence[int], ends: Sequence[int], capacity: int, device: torch.device
    ) -> None:
        """The next pass computes tokens of prompts, [B, N] with padding on the left, for B rows in any order.

        Args:
            firsts, ends: positions [first, end) of each row; the cache has those before.
            capacity: C of these sequences.
        """
        consecutive = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._span = slice(rows[0], rows[0] + len(rows))
        if not consecutive:
            self._span = torch.tensor(rows, device="cpu").to(device, non_blocking=True)
        self._used, self._positions = capacity, None
        self._firsts, self._ends = firsts, ends
        self._bounds = torch.tensor([firsts, ends], device="cpu")[..., None].to(device, non_blocking=True)
        self._indices = {}

    def begin_decode(self, rows: int, capacity: int, positions: torch.Tensor) -> None:
        """The next pass computes one token for each of the first `rows` rows, at `positions` [rows] int64."""
        self._span, self._used, self._positions = slice(0, rows), capacity, positions
        self._indices = {}

    def masks(self, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
        """The masks of a decode step, or of a prefill behind cached positions, as transformers prepares them for a
        static cache.

        Returns: one [B, 1, N, keys], or one for each type of layer, to be added to scores: 0 for a key that the token
            attends to; N is 1 in a decode step. Floats, since torch would convert bools in every layer. Local, no host
            sync.
        """
        by_entries: dict[int, torch.Tensor] = {}
        for layer in self._own:
            entries = layer.entries(self._used)
            if entries not in by_entries:
                seen = self._seen(entries)
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                by_entries[entries] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
        types = getattr(config, "layer_types", None)
        masks = [by_entries[layer.entries(self._used)] for layer in self._own]
        return masks[0] if types is None else dict(zip(types, masks, strict=True))

    def _seen(self, entries: int) -> torch.Tensor:
        """[B, N, keys] bool: whether a token attends to a key."""
        if self._positions is not None:
            return (torch.arange(entries, device=self._positions.device) <= self._positions[:, None])[:, None]
        assert self._bounds is not None
        first, end = self._bounds
        num_tokens, device = self._num_tokens, first.device
        tokens = end - num_tokens + torch.arange(num_tokens, device=device)  # before `first`: padding
        cached = _last_position(torch.arange(self._num_cached(entries), device=device), first, entries)
        keys = torch.cat([cached.masked_fill(cached < 0, _NOWHERE), tokens.masked_fill(tokens < first, _NOWHERE)], 1)
        keys, tokens = keys[:, None], tokens[:, :, None]
        return (keys <= tokens) & (keys > tokens - entries)

    @property
    def _num_tokens(self) -> int:
        """N of a prefill."""
        return max(end - first for first, end in zip(self._firsts, self._ends, strict=True))

    def _num_cached(self, entries: int) -> int:
        """Entries that tokens of a prefill attend to."""
        return min(max(self._firsts), entries)

    def store(
        self, layer: FixedLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`FixedLayer.update` for the current pass."""
        entries = layer.entries(self._used)
        assert layer.keys is not None
        assert layer.values is not None
        if self._positions is not None:
            index = self._decode_index(entries)
            memory = [tensor[self._span, :, :entries] for tensor in (layer.keys, layer.values)]
            for kept, states in zip(memory, (key_states, value_states), strict=True):
                kept.scatter_(2, index.expand(-1, states.shape[1], 1, states.shape[3]), states)
            return memory[0], memory[1]
        keys, values = (
            self._store_prompt(memory, states, entries)
            for memory, states in ((layer.keys, key_states), (layer.values, value_states))
        )
        return keys, values

    def _store_prompt(self, memory: torch.Tensor, states: torch.Tensor, entries: int) -> torch.Tensor:
        """Store tokens of prompts; returns what they attend to."""
        lowest, highest = min(self._firsts), max(self._ends)
        attended, num_cached = states, self._num_cached(entries)
        if num_cached:  # before a ring's entries are overwritten
            attended = torch.cat([memory[self._span, :, :num_cached], states], 2)
        if highest <= entries and len(set(self._firsts)) == len(set(self._ends)) == 1:
            memory[self._span, :, lowest:highest] = states
            return attended
        if highest > entries:
            lowest, highest = 0, entries
        column, is_new = self._prefill_index(lowest, highest, entries)
        new = states.gather(2, column.expand(-1, states.shape[1], -1, states.shape[3]))
        memory[self._span, :, lowest:highest] = torch.where(is_new, new, memory[self._span, :, lowest:highest])
        return attended

    def _decode_index(self, entries: int) -> torch.Tensor:
        """[B, 1, 1, 1], the entry of each row's token."""
        if (entries,) not in self._indices:
            assert self._positions is not None
            self._indices[entries,] = (self._positions % entries)[:, None, None, None]
        return self._indices[entries,]

    def _prefill_index(self, lowest: int, highest: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of entries [lowest, highest): the column of the padded tokens that each holds from now on, and whether it
        does, [B, 1, entries, 1] each. Example: S 4, tokens at 0 to 5: entries 0 to 3 hold positions 4, 5, 2, 3."""
        if (lowest, highest, entries) not in self._indices:
            assert self._bounds is not None
            first, end = self._bounds
            position = _last_position(torch.arange(lowest, highest, device=first.device), end, entries)
            column = (position - end + self._num_tokens).clamp(min=0)
            found = column[:, None, :, None], (position >= first)[:, None, :, None]
            self._indices[lowest, highest, entries] = found
        column, is_new = self._indices[lowest, highest, entries]
        return column, is_new


def _last_position(entry: torch.Tensor, end: torch.Tensor, entries: int) -> torch.Tensor:
    """The last position before `end` that an entry of a ring holds, negative if there is none."""
    return end - 1 - (end - 1 - entry) % entries
