"""The expert of each pair, from lists by expert: kernels against a loop, also over memory that was filled before."""

import pytest
import torch

from ep_moe.local_moe.listed_pairs import ragged_pairs, sorted_pairs
from ep_moe.testing import poisoned_memory
from interpreted.common import DEVICE, generator


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("pairs", "height", "end"), [(1, 16, 16), (37, 4, 100), (1500, 16, 3000), (9, 8, 0)])
def test_sorted_pairs(pairs: int, height: int, end: int, dtype: torch.dtype) -> None:
    """Places behind `end`, numbers outside [0, P), and blocks of no expert, whose pairs are listed too."""
    random, blocks = generator(f"sorted {pairs}"), -(-2 * pairs // height)
    places = torch.randperm(2 * pairs, generator=random)[: blocks * height] - pairs // 4
    experts = torch.randint(-1, 7, (blocks,), generator=random)
    wanted, listed = torch.full((pairs,), -1, dtype=torch.int32), torch.zeros(pairs, dtype=torch.uint8)
    for place, pair in enumerate(places.tolist()):
        if place < end and 0 <= pair < pairs:
            wanted[pair], listed[pair] = int(experts[place // height]), 1
    launches = sorted_pairs(pairs, len(places), height, DEVICE)
    given = {"pairs": places.to(DEVICE, dtype), "experts": experts.to(DEVICE, dtype)}
    for _ in range(2):
        with poisoned_memory():
            memory = launches.run(given | {"end": torch.tensor([end], dtype=dtype, device=DEVICE)})
        found = launches.workspace.views(memory)
        assert torch.equal(found["ids"].cpu(), wanted)
        assert torch.equal(found["listed"].cpu(), listed)


@pytest.mark.parametrize(
    ("placed", "mapped", "on_input", "dtype"),
    [(True, True, False, torch.int32), (False, False, True, torch.int64), (True, False, True, torch.int32)],
)
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 1, 1), (5, 3, 7), (20, 4, 160), (3, 2, 1024)])
def test_ragged_pairs(
    tokens: int, topk: int, experts: int, dtype: torch.dtype, placed: bool, mapped: bool, on_input: bool
) -> None:
    """Experts without places, places behind the last expert's, numbers of no pair and no token, experts that are not
    here; rows are any tokens."""
    random, count = generator(f"ragged {tokens}"), tokens * topk
    x = torch.randn(tokens, 40, generator=random).bfloat16()
    rows = torch.randint(-1, tokens + 1, (count,), generator=random)
    pairs = torch.randperm(count + 3, generator=random)[:count] - 1 if placed else torch.arange(count)
    chosen = torch.randint(experts, (count - count // 5,), generator=random)
    counts = torch.bincount(chosen, minlength=experts).int()
    factors = torch.rand(count, generator=random).bfloat16()
    of = torch.randint(-1, experts, (experts,), generator=random) if mapped else torch.arange(experts)
    ids, weights = torch.full((count,), -1, dtype=torch.int32), torch.zeros(count)
    wanted = torch.zeros(count, 40).bfloat16()
    for place, expert in enumerate(torch.arange(experts).repeat_interleave(counts.long()).tolist()):
        pair, row = int(pairs[place]), int(rows[place])
        if 0 <= pair < count and 0 <= row < tokens:
            ids[pair], weights[pair] = int(of[expert]), 1.0 if on_input else float(factors[place])
            wanted[pair] = x[row] * factors[place] if on_input else x[row]
    launches = ragged_pairs(x.to(DEVICE), count, experts, placed=placed, mapped=mapped, on_input=on_input)
    given = {"x": x.to(DEVICE), "counts": counts.to(DEVICE), "rows": rows.to(DEVICE, dtype)}
    given |= {"factors": factors.to(DEVICE)} | ({"pairs": pairs.to(DEVICE, dtype)} if placed else {})
    for _ in range(2):
        with poisoned_memory():
            memory = launches.run(given | ({"map": of.to(DEVICE, dtype)} if mapped else {}))
        found = launches.workspace.views(memory)
        assert torch.equal(found["ids"].view(-1).cpu(), ids)
        listed = ids >= 0
        assert torch.equal(found["weights"].view(-1).cpu()[listed], weights[listed])
        assert torch.equal(found["tokens"].cpu()[listed], wanted[listed])
