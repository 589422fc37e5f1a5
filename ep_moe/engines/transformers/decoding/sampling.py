"""Choosing the next tokens on the device: the likeliest, or a sample that depends on seed, position and logits alone.

The same sequence therefore samples the same tokens in any batch and on any rank. Letters: B rows, V vocabulary.
"""

import torch

_INCREMENT, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # of splitmix64, as int64


def _shift(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def uniform(seeds: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) from a seed and a counter each, [B] int64, by splitmix64 (Steele, Lea and Flood, 2014).

    Returns: [B] float32, of 24 random bits. Local, no host sync.
    """

    def mix(numbers: torch.Tensor) -> torch.Tensor:
        numbers = (numbers ^ _shift(numbers, 30)) * _FIRST
        numbers = (numbers ^ _shift(numbers, 27)) * _SECOND
        return numbers ^ _shift(numbers, 31)

    return _shift(mix(mix(seeds * _INCREMENT) + counters * _INCREMENT), 40).float() * 2.0**-24


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row among the likeliest tokens that together reach `top_p`.

    Args:
        logits: [B, V] float32. temperature: [B], above 0. top_p: [B], in (0, 1]. numbers: [B], in [0, 1).
    Returns: [B] int64, the likeliest token for a temperature near 0. Local, no host sync.
    """
    # from the largest logit down, no quotient is above 0; a GPU may take a temperature below the least normal one as 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    ordered, tokens = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    up_to = ordered.cumsum(-1)
    taken = (up_to - ordered < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)  # at least 1, even for NaN
    goal = numbers[:, None] * up_to.gather(1, taken - 1)
    place = (up_to <= goal).sum(-1, keepdim=True)
    return tokens.gather(1, torch.minimum(place, taken - 1)).squeeze(1)
