"""Uneven loads for benchmarks: shares of tokens that choose each expert, and ids of tokens that follow them.

Letters: T tokens of this rank, K top-k, E experts.
"""

import torch

from ep_moe.placement import Placement

UNIT = 1 << 20  # shares are integers, so that each token gets exactly K ids
HOT_SHARE = 0.7  # of all pairs of token and expert, on the first rank


def named_load(name: str, placement: Placement, seed: int) -> list[float]:
    """How often tokens choose each expert, [E], as weights.

    Args:
        name: "uniform"; "zipf", 1 / n for the n-th expert of a random order; "one_rank", HOT_SHARE for the experts of
            the first rank. placement: whose ranks those are; without copies.
    Local.
    """
    num_experts, hot = placement.num_experts, placement.local_experts(0)
    if name == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed)).tolist()
        return [1 / (place + 1) for place in order]
    if name == "one_rank" and 0 < len(hot) < num_experts:
        others = (1 - HOT_SHARE) / (num_experts - len(hot))
        return [HOT_SHARE / len(hot) if expert in set(hot) else others for expert in range(num_experts)]
    return [1.0] * num_experts


def token_shares(load: list[float], num_topk: int) -> torch.Tensor:
    """The part of all tokens that chooses each expert, [E] int64 in 1 / UNIT; they add up to K.

    Shares follow the load, [E]. A token chooses an expert once: what exceeds all tokens goes to the other experts, in
    proportion. Local.
    """
    weights = torch.tensor(load, dtype=torch.float64)
    shares = torch.zeros_like(weights)
    open_ = torch.ones(len(load), dtype=torch.bool)
    while True:
        if not weights[open_].any():
            weights[open_] = 1.0
        left = num_topk - int((~open_).sum())
        shares[open_] = left * weights[open_] / weights[open_].sum()
        full = open_ & (shares >= 1)
        shares[full] = 1
        if not full.any() or (open_ & ~full).sum() == 0:
            break
        open_ &= ~full
    units = (shares * UNIT).long()
    missing = num_topk * UNIT - int(units.sum())  # less than one for each expert
    units[torch.nonzero(units < UNIT).squeeze(1)[:missing]] += 1
    return units


def draw_ids(shares: torch.Tensor, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token, [T, K] int32, so that each expert has its share of tokens on average.

    A token takes the experts at equal distances along its own random order of all of them, each as long as its share.

    Args: shares: of `token_shares`. generator: on the device of the result. Local, host sync.
    """
    order = torch.rand(num_tokens, len(shares), generator=generator, device=generator.device).argsort(1)
    ends = shares.to(order.device)[order].cumsum(1)
    ends += torch.randint(UNIT, (num_tokens, 1), generator=generator, device=generator.device)
    steps = torch.nn.functional.pad(ends // UNIT, (1, 0)).diff(dim=1)
    columns = steps.nonzero()[:, 1].view(num_tokens, -1)
    return order.gather(1, columns).int()
