"""DeepSeek's published balancing (EPLB) in plain loops, from its description: the baseline of our plans.

Copies go, one by one, to the expert with the highest load per copy. They are packed in order of descending load, each
into the pack of least load that is not full; nothing keeps two copies of an expert apart. Hierarchical: groups are
packed on nodes in the same way, then each node's copies are made and packed on its own ranks.
"""

from collections.abc import Sequence


def packed(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Items in packs of equal size."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals, size = [0.0] * num_packs, len(weights) // num_packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        pack = min((each for each in range(num_packs) if len(packs[each]) < size), key=lambda each: totals[each])
        packs[pack].append(item)
        totals[pack] += weights[item]
    return packs


def flat(load: Sequence[float], num_copies: int, num_ranks: int) -> list[list[int]]:
    """The experts of each rank, without regard to nodes."""
    counts = [1] * len(load)
    for _ in range(num_copies - len(load)):
        counts[max(range(len(load)), key=lambda expert: load[expert] / counts[expert])] += 1
    copies = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return [[copies[i] for i in pack] for pack in packed([load[e] / counts[e] for e in copies], num_ranks)]


def eplb(load: Sequence[float], num_copies: int, num_ranks: int, num_groups: int, num_nodes: int) -> list[list[int]]:
    """The experts of each rank; num_ranks divides num_copies."""
    if num_groups % num_nodes:
        return flat(load, num_copies, num_ranks)
    size = len(load) // num_groups
    groups = [list(range(first, first + size)) for first in range(0, len(load), size)]
    found = []
    for node in packed([sum(load[expert] for expert in group) for group in groups], num_nodes):
        experts = [expert for group in node for expert in groups[group]]
        own = flat([load[expert] for expert in experts], num_copies // num_nodes, num_ranks // num_nodes)
        found += [[experts[each] for each in rank] for rank in own]
    return found


def rank_loads(load: Sequence[float], ranks: Sequence[Sequence[int]]) -> list[float]:
    """Load of each rank, with equal shares of all copies."""
    copies = [expert for rank in ranks for expert in rank]
    return [sum(load[expert] / copies.count(expert) for expert in rank) for rank in ranks]
