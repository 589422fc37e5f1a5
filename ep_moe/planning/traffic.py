"""What travels in a round, and what arrives at the rank that gets most, from the loads of experts.

Letters: T tokens on each rank, K top-k, E logical experts, P physical experts, R ranks.
"""

import dataclasses
import functools
from collections.abc import Sequence

SAMPLES = 4096  # tokens whose experts are drawn


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Means over tokens, and the load of the slowest rank.

    Args:
        remote_ranks: other ranks that a token travels to. remote_on_node: those on the token's own node.
        remote_nodes: other nodes that it travels to.
        imbalance: rows that arrive at the rank that gets most, by the mean rank's.
        expert_shares: of that rank's physical experts that get tokens: the part of all (token, expert) pairs.
    """

    remote_ranks: float
    remote_on_node: float
    remote_nodes: float
    imbalance: float
    expert_shares: tuple[float, ...]


@functools.lru_cache(maxsize=512)
def traffic(loads: tuple[float, ...], num_topk: int, num_ranks: int, redundant: int, ranks_per_node: int) -> Traffic:
    """Place experts on ranks, as `plan_placement` does, and draw the experts of `SAMPLES` tokens, always the same ones.

    Args:
        loads: [E], the part of all (token, expert) pairs that each expert gets. redundant: P - E.
    Errors: ValueError if R does not divide P, or K exceeds E. Local.
    """
    import torch

    from ep_moe.balance import plan_placement, rank_loads

    num_experts, num_physical = len(loads), len(loads) + redundant
    if num_physical % num_ranks:
        raise ValueError(f"num_ranks ({num_ranks}) does not divide the physical experts ({num_physical})")
    if num_topk > num_experts:
        raise ValueError(f"num_topk ({num_topk}) exceeds num_experts ({num_experts})")
    [placement] = plan_placement([loads], num_physical, num_ranks, ranks_per_node=ranks_per_node).placements
    [load_of] = rank_loads([loads], [placement])
    worst = max(range(num_ranks), key=load_of.__getitem__)
    ranks_of: list[list[int]] = [[] for _ in loads]
    for position in placement.active:
        ranks_of[placement.physical_to_logical[position]].append(position * num_ranks // num_physical)
    copies = [len(ranks) for ranks in ranks_of]

    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(SAMPLES, num_experts).exponential_(generator=generator)
    # the K smallest of exponential / load are a draw without replacement by load
    ids = (noise / torch.tensor(loads).clamp(min=1e-9)).topk(num_topk, largest=False).indices  # [SAMPLES, K]
    token = torch.arange(SAMPLES)
    table = torch.tensor([[ranks[i % len(ranks)] for i in range(max(copies))] for ranks in ranks_of])
    dest = table[ids, (token[:, None] // num_ranks) % torch.tensor(copies)[ids]]
    source = token % num_ranks
    reached = torch.zeros(SAMPLES, num_ranks, dtype=torch.bool).scatter_(1, dest, True)
    reached[token, source] = False
    num_nodes = -(-num_ranks // ranks_per_node)
    padded = torch.nn.functional.pad(reached, (0, num_nodes * ranks_per_node - num_ranks))
    per_node = padded.view(SAMPLES, num_nodes, ranks_per_node)
    own = per_node[token, source // ranks_per_node].sum(1).float().mean().item()
    nodes = per_node.any(2)
    nodes[token, source // ranks_per_node] = False
    return Traffic(
        remote_ranks=reached.sum(1).float().mean().item(),
        remote_on_node=own,
        remote_nodes=nodes.sum(1).float().mean().item(),
        imbalance=load_of[worst] * num_ranks,
        expert_shares=tuple(loads[e] / len(ranks) for e, ranks in enumerate(ranks_of) if worst in ranks),
    )


def uniform(num_experts: int) -> tuple[float, ...]:
    """Equal loads."""
    return (1 / num_experts,) * num_experts


def recorded(measured: Sequence[Sequence[float]], num_experts: int) -> tuple[float, ...]:
    """Loads of any number of experts with the unevenness of measured ones.

    Args:
        measured: a row for each layer. The sorted loads, a layer's mean, are stretched to `num_experts`.
    """
    import torch

    profile = torch.tensor([sorted(layer) for layer in measured]).mean(0)
    stretched = torch.nn.functional.interpolate(profile.view(1, 1, -1), num_experts, mode="linear", align_corners=True)
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
    loads = (stretched.flatten() / stretched.sum())[order]
    return tuple(loads.tolist())
