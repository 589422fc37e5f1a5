"""A stand-in for the rows of a model, and ranks that serve with it; no module here takes long to import."""

import copy
import dataclasses
import multiprocessing
import os
import random
import signal
import threading

import pytest

from ep_moe.engines.transformers.decoding.fixed_cache import BLOCK
from ep_moe.engines.transformers.decoding.passes import Logprob, RowsMade, RowsPlan, RowStart, Sampling
from ep_moe.engines.transformers.decoding.sequences import BROKEN, NONE
from ep_moe.group import EPGroup, StorePlace
from ep_moe.placement import Placement
from ep_moe.serving.channel import RankChannel, Ready
from ep_moe.serving.core import Leader
from ep_moe.serving.rank import Member, follow
from ep_moe.serving.ranks import ServerEndedError, StoreRanks
from ep_moe.serving.scheduler import Generation, Limits, Progress

LIMITS = Limits(
    num_ranks=3,
    num_rows=4,
    num_positions=96,
    max_prefill_tokens=24,
    max_waiting=1000,
    passes_per_plan=4,
    vocab_size=256,
    end_ids=(0,),
    placements=(Placement((0, 1, 2), (0, 3, 3, 3)),) * 2,
)


def limits_of(num_ranks: int) -> Limits:
    """Those of so many ranks."""
    placements = (Placement((0, 1, 2), (0, *[3] * num_ranks)),) * 2
    return dataclasses.replace(LIMITS, num_ranks=num_ranks, placements=placements)


ONE = limits_of(1)


def next_token(token: int, position: int) -> int:
    """What the fake ranks' model says after a token; 0, the end, now and then."""
    return (token * 31 + position * 7 + 5) % 251


def continuation(generation: Generation) -> list[int]:
    """All tokens of a generation by that model."""
    token, position, made = generation.prompt[-1], len(generation.prompt), []
    assert generation.max_new_tokens is not None
    while len(made) < generation.max_new_tokens and (not made or made[-1] != 0):
        token = next_token(token, position)
        made.append(token)
        position += 1
    return made


def logprob(token: int, count: int) -> Logprob:
    """What that model says of a token: the likeliest ones are those after it."""
    return Logprob(value=-token / 8, rank=5, top=tuple((token + place, -place / 8) for place in range(1, count + 1)))


def logprobs(asked: dict[int, Sampling], tokens: list[list[int]]) -> dict[int, list[Logprob]]:
    """Those of the columns that asked for them."""
    return {
        column: [logprob(each[column], sampling.logprobs) for each in tokens]
        for column, sampling in asked.items()
        if sampling.logprobs is not None
    }


class FakeRows:
    """One rank without a model, which carries out plans as `RowDecoder` does, and checks what it may rely on.

    A cell of the cache holds the token of its position.
    """

    def __init__(self, limits: Limits, rank: int) -> None:
        self._limits, self._rank = limits, rank
        self._live: dict[int, list[int]] = {}  # row -> last token, its position, tokens left
        self._sampling: dict[int, Sampling] = {}
        self._waited: set[int] = set()  # live rows that got no token from the last plan
        self._starts: dict[int, RowStart] = {}
        self._cells = [[NONE] * (2 * limits.num_positions) for _ in range(limits.num_rows)]
        self._positions = [0] * limits.num_rows  # at which decode passes store, live or not
        self._places = [[NONE] * BLOCK for _ in range(limits.prefix_blocks)]

    def regroup(self, rank: int) -> None:
        """See `RowDecoder.regroup`."""
        self._rank = rank

    def interrupt(self, plan: RowsPlan) -> None:
        """A plan that fails at its end: the cache has changed, what rows are about has not."""
        names = "_live", "_sampling", "_starts", "_positions"
        before = {name: copy.deepcopy(getattr(self, name)) for name in names}
        self._run(plan)
        for name, value in before.items():
            setattr(self, name, value)

    def spoil(self, plan: RowsPlan, made: RowsMade, chance: random.Random) -> RowsMade:
        """NaN from a rank that has failed in this plan, the last one that this rank has carried out."""
        tokens = [list(step) for step in made.tokens]
        for column in range(len(tokens[0])):
            row, size = plan.chunks[self._rank][column] if plan.chunks else (column, 0)
            steps = [index for index, step in enumerate(tokens) if step[column] != NONE]
            if chance.random() < 0.5:
                continue
            if size:
                last = self._positions[row]
                self._cells[row][last - size : last] = [BROKEN] * size
            if steps:
                first = chance.choice(steps)
                for index in steps:
                    tokens[index][column] = made.tokens[index][column] if index < first else NONE
                tokens[first][column] = BROKEN
                self._live.pop(row, None)
        return dataclasses.replace(made, tokens=tokens)

    def run(self, plan: RowsPlan) -> RowsMade:
        """See `RowDecoder.run`."""
        made = self._run(plan)
        if not plan.load:
            return made
        waited = [0.25 * source * (self._rank + 1) for source in range(self._limits.num_ranks)]
        return dataclasses.replace(made, load=[[self._rank + 1, 2, 3], [4, 5, 6]], waited=waited)

    def _run(self, plan: RowsPlan) -> RowsMade:
        for row, index, place in plan.saves[self._rank] if plan.saves else ():
            self._places[place] = self._cells[row][index * BLOCK : (index + 1) * BLOCK]
        for row in plan.ended[self._rank]:
            self._live.pop(row, None)
        for start in plan.starts[self._rank]:
            assert start.row not in self._live
            found = [token for place in start.prefix for token in self._places[place]]
            assert len(found) < len(start.prompt)
            self._cells[start.row][: len(found)] = found
            self._starts[start.row], self._positions[start.row] = start, len(found)
        if any(plan.chunks):
            assert not self._waited & self._live.keys()
            self._waited = set(self._live)
            return self._prefill(plan.chunks[self._rank])
        self._waited = set()
        shape = plan.shapes[self._rank]
        assert all(row < shape.rows for row in self._live)
        asked = list(self._live)
        made = [[self._advance(row, shape.capacity) for row in range(shape.rows)] for _ in range(plan.passes)]
        assert shape.adjusted or not any(self._sampling[row].adjusted for row in self._live)
        return RowsMade(tokens=made, logprobs=logprobs({row: self._sampling[row] for row in asked}, made))

    def _prefill(self, chunks: tuple[tuple[int, int], ...]) -> RowsMade:
        assert len(chunks) * max((size for _, size in chunks), default=0) <= self._limits.max_prefill_tokens
        assert len({row for row, _ in chunks}) == len(chunks)
        tokens, asked, prompts = [], {}, {}
        for place, (row, size) in enumerate(chunks):
            start, first = self._starts[row], self._positions[row]
            end = self._positions[row] = first + size
            self._cells[row][first:end] = start.prompt[first:end]
            assert tuple(self._cells[row][:end]) == start.prompt[:end]
            if start.sampling.prompt_logprobs is not None:
                behind = start.prompt[first + 1 : end + 1]
                prompts[place] = [logprob(token, start.sampling.prompt_logprobs) for token in behind]
            if end < len(start.prompt):
                tokens.append(NONE)
                continue
            self._live[row] = [start.prompt[-1], end - 1, start.max_new_tokens]
            asked[place] = self._sampling[row] = start.sampling
            tokens.append(self._next(row))
        return RowsMade(tokens=[tokens], logprobs=logprobs(asked, [tokens]), prompts=prompts)

    def _advance(self, row: int, capacity: int) -> int:
        """A decode pass in a row, which stores something also if the row is not live."""
        place = self._positions[row] % capacity
        self._cells[row][place] = self._live[row][0] if row in self._live else BROKEN
        return self._next(row) if row in self._live else NONE

    def _next(self, row: int) -> int:
        token, position, left = self._live[row]
        token, sampling = next_token(token, position + 1), self._sampling[row]
        self._live[row], self._positions[row] = [token, position + 1, left - 1], position + 1
        if left == 1 or token in sampling.stop_ids or (token == 0 and not sampling.ignore_end):
            del self._live[row]
        return token


def serve_fake(group: EPGroup) -> None:
    """A rank that serves with fake rows."""
    limits = limits_of(group.num_ranks)
    channel = RankChannel(StorePlace.from_env(), group.rank, group.config.heartbeat_secs)
    channel.answer(0, Ready(limits=limits))
    follow(channel, Member(group, FakeRows(limits, group.rank)))


def lead(group: EPGroup, act: str) -> list[list[int]]:
    """Serve with fake rows, rank 0 with a leader beside; rank 1 kills itself if `act` says so.

    Returns what the generations got.
    """
    if group.rank:
        if act == "die":
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        serve_fake(group)
        return []
    starter, connection = multiprocessing.Pipe()
    ranks = StoreRanks(StorePlace.from_env(), group.num_ranks, False, starter=connection, timeout_secs=20)

    def serve() -> None:
        try:
            serve_fake(group)
        except RuntimeError as error:
            starter.send(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    leader = Leader(ranks, ranks.wait_until_ready())
    found: list[list[Progress]] = []
    ended = threading.Semaphore(0)

    def submit(generation: Generation) -> None:
        mine: list[Progress] = []
        found.append(mine)

        def on_progress(progress: Progress) -> None:
            mine.append(progress)
            if progress.finish:
                ended.release()

        leader.submit(generation, on_progress)

    def feed() -> None:
        for size in range(1, 21):
            submit(Generation(prompt=(size,) * size, max_new_tokens=size))
        for _ in range(20):
            ended.acquire()
        if act == "close":
            leader.close()

    threading.Thread(target=feed, daemon=True).start()
    if act == "close":
        leader.run()
    else:  # idle by the time of the death
        with pytest.raises(ServerEndedError, match="rank 1 was killed by SIGKILL"):
            leader.run()
    with pytest.raises(ServerEndedError, match="closed" if act == "close" else "rank 1 was killed"):
        submit(Generation(prompt=(1,)))
    thread.join(10)
    return [[token for progress in mine for token in progress.tokens] for mine in found[:20]]
