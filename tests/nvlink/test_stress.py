"""Random rounds on two ranks and on three, from just before the epoch wraps."""

import time

import pytest

from ep_moe.group import EPGroup
from ep_moe.kernels import exchange
from nvlink.common import on_ranks, patched
from nvlink.stress import Stress, StressConfig, stress

ROUNDS = {2: 200, 3: 10}  # by the number of ranks; 2 cores do 6 of 2 ranks in a second


def stress_on_rank(group: EPGroup, config: StressConfig, word_tokens: int) -> int:
    """The rounds on this rank; ranks with more tokens than `word_tokens` send rows."""
    with patched(WORD_TOKENS=word_tokens, UNPLANNED_TOKENS=2, BLOCK_TOKENS=2):
        return stress(group, config)


@pytest.mark.parametrize("num_ranks", ROUNDS, ids=lambda number: f"{number}-ranks")
def test_random_rounds(num_ranks: int) -> None:
    config = StressConfig(rounds=ROUNDS[num_ranks], seed=num_ranks)
    start = time.monotonic()
    done = on_ranks(stress_on_rank, config, 1, num_ranks=num_ranks)
    print(f"{config.rounds} rounds in {time.monotonic() - start:.0f} s")
    assert min(done) >= config.rounds


def epochs_on_rank(group: EPGroup) -> list[int]:
    """The last epoch that has ended on a slot after each of its first rounds."""
    run = Stress(group, StressConfig(rounds=0))
    slot, shape = run.transport._memory.slots[1], run.shapes[0]
    ended = []
    for number in range(4):
        run.one(number, shape, 1)
        ended.append(int(slot.state[exchange.DONE.value]))
    run.look(0, 4)
    group.barrier()
    run.transport.destroy()
    return ended


def test_the_epoch_wraps_past_what_empty_memory_holds() -> None:
    assert on_ranks(epochs_on_rank) == [[-2, -1, 1, 2]] * 2
