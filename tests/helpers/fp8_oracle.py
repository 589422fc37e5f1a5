"""Experts in fp8 in plain torch: a loop over tokens, with rounded tokens and dequantized weights.

Letters: T tokens, K top-k or columns, H hidden, I intermediate.
"""

import torch

E4M3_MAX = 448.0


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x in fp8 with a scale, and back."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The next power of two that is not smaller."""
    return torch.exp2(scale.log2().ceil())


def rounded_rows(x: torch.Tensor, group: int, static: float | None, powers: bool = False) -> torch.Tensor:
    """Tokens [T, K] with a scale per token and group of columns, or one that is given."""
    if static is not None:
        return rounded(x, torch.tensor(static))
    scales = [(part, part.abs().amax(1, keepdim=True).clamp(min=1e-10) / E4M3_MAX) for part in x.split(group, dim=1)]
    return torch.cat([rounded(part, power_of_two(scale) if powers else scale) for part, scale in scales], dim=1)


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks, one for each element of a matrix of a shape."""
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def quantized(weight: torch.Tensor, block: tuple[int, int], powers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8, and the scales of its blocks."""
    rows = [part.split(block[1], dim=1) for part in weight.split(block[0], dim=0)]
    scale = torch.stack([torch.stack([part.abs().max() / E4M3_MAX for part in row]) for row in rows])
    scale = power_of_two(scale) if powers else scale
    return (weight / spread(scale, weight.shape, block)).to(torch.float8_e4m3fn), scale


def loop(
    weights: list[tuple[torch.Tensor, torch.Tensor]],
    group: int,
    static: tuple[float | None, float | None],
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    powers: bool = False,
) -> torch.Tensor:
    """The oracle: dequantized weights [2I, H] and [H, I] of each expert, tokens [T, H], ids and weights [T, K]."""
    x, ids, shares = arguments
    result = torch.zeros_like(x)
    tokens = rounded_rows(x, group, static[0], powers)
    for token in range(x.shape[0]):
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            gate, up = (weights[expert][0] @ tokens[token]).chunk(2)
            inner = rounded_rows((torch.nn.functional.silu(gate) * up)[None], group, static[1], powers)[0]
            result[token] += share * (weights[expert][1] @ inner)
    return result
