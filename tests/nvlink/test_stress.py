"""Random rounds on two ranks and on three, from just before the epoch wraps; over NVSHMEM's stores too."""

import time
from typing import Any

import pytest

from ep_moe.group import EPGroup
from ep_moe.kernels.exchange import round_state
from nvlink.common import on_ranks, patched
from nvlink.stress import Stress, StressConfig, stress

# of 20 shapes with each seed
RUNS = [
    pytest.param(2, 0, 40, {}, id="2-ranks-0"),
    *(pytest.param(2, seed, 660, {}, id=f"2-ranks-{seed}-long", marks=pytest.mark.matrix) for seed in range(1, 5)),
    pytest.param(3, 6, 20, {}, id="3-ranks"),
    *(
        pytest.param(2, 7, 40, {"transport": "nvshmem", "options": {"nvshmem_stores": stores}}, id=stores, marks=marks)
        for stores, marks in (("puts", ()), ("addresses", pytest.mark.matrix))
    ),
]


def stress_on_rank(group: EPGroup, config: StressConfig, word_tokens: int) -> int:
    """The rounds on this rank; ranks with more tokens than `word_tokens` send rows."""
    with patched(WORD_TOKENS=word_tokens, SELF_COUNTED_TOKENS=2, BLOCK_TOKENS=2):
        return stress(group, config)


@pytest.mark.parametrize(("num_ranks", "seed", "rounds", "options"), RUNS)
def test_random_rounds(num_ranks: int, seed: int, rounds: int, options: dict[str, Any]) -> None:
    config = StressConfig(rounds=rounds, seed=seed, **options)
    start = time.monotonic()
    done = on_ranks(stress_on_rank, config, 1, num_ranks=num_ranks)
    print(f"{rounds} rounds in {time.monotonic() - start:.0f} s")
    assert min(done) >= rounds


def epochs_on_rank(group: EPGroup) -> list[int]:
    """The last epoch that has ended on a slot after each of its first rounds."""
    run = Stress(group, StressConfig(rounds=0))
    slot, shape = run.transport._states.slots[1], run.shapes[0]
    ended = []
    for number in range(4):
        run.one(number, shape, 1)
        ended.append(int(slot.state_ptr[round_state.DONE.value]))
    run.look(0, 4)
    group.barrier()
    run.transport.destroy()
    return ended


def test_the_epoch_wraps_past_what_empty_memory_holds() -> None:
    assert on_ranks(epochs_on_rank) == [[-2, -1, 1, 2]] * 2
