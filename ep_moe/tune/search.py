"""The search for the fastest backend and tiles: for each backend from its tiles to better neighbours, until none is
better or the time is over; then the fastest of all beside the default.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ep_moe.experts.tuning import ExpertTiles
from ep_moe.tune.candidates import neighbours
from ep_moe.tune.journal import Chosen, Compiled, Journal, Trial
from ep_moe.tune.problem import Problem

_GAIN = 0.99  # tiles replace others if they take at most this share of the time
_HOPELESS = 1.5  # a backend is not searched if its own tiles take so many times as long as the best ones
_QUICK, _ROUNDS, _THOROUGH = 8, 5, 8  # timed calls of a candidate; rounds of the last comparison, and calls of each


class Compile(Protocol):
    """Compiles candidates for at most some seconds; the reasons why the compiled cannot be launched, else ""."""

    def __call__(self, candidates: Sequence[ExpertTiles], secs: float, /) -> dict[ExpertTiles, str]: ...


@dataclasses.dataclass(kw_only=True, slots=True)
class Search:
    """Searches tiles for one number of rows after another.

    Args:
        problem: to measure on. journal: of the trials. compile: kernels beforehand, in parallel.
        report: called after each candidate, with the number of trials and the fastest.
    """

    problem: Problem
    journal: Journal
    compile: Compile
    report: Callable[[int, Trial], None]

    def run(self, rows: int, seeds: Iterable[ExpertTiles], secs: float) -> Chosen:
        """The fastest backend and tiles for `rows` rows per expert that can be found in about `secs` seconds.

        The default stays unless others are faster by more than 1 % when both are timed in turn. Every candidate is
        compared with the oracle first. The time is shared by the backends, of which those with the fewest tiles to try
        are searched first.

        Args:
            seeds: to start from, besides the tiles of each backend that are used without a tuned table.
        Errors: RuntimeError if the default itself is wrong. Host sync.
        """
        end = time.monotonic() + secs
        self.problem.set_rows(rows)
        default, *others = self.problem.choices()
        starts = [default, *others, *seeds]
        self._try(rows, starts, end, always=1)
        first = self.journal.trials[rows, default]
        if first.why:
            raise RuntimeError(f"the default tiles for {rows} rows per expert cannot be used: {first.why}")
        of_backends: dict[str, list[Trial]] = {}
        for tiles in starts:
            of_backends.setdefault(tiles.backend, []).append(self._known(rows, tiles))
        begun = sorted((min(trials, key=_us) for trials in of_backends.values()), key=self._num_neighbours)
        best, complete = first, True
        for index, start in enumerate(begun):
            now = time.monotonic()
            if start.us > _HOPELESS * best.us:
                continue
            found, searched = self._climb(rows, start, now + (end - now) / (len(begun) - index))
            best, complete = min(best, found, key=_us), complete and searched
        return self._compare(rows, default, best.tiles, complete=complete)

    def compile_near(self, rows: int, secs: float) -> int:
        """Compile the tiles that `run` begins with, and those near the fastest so far, at first those in use.

        Returns how many are compiled. Host sync.
        """
        self.problem.set_rows(rows)
        starts = self.problem.choices()
        best = min(self.journal.of(rows), key=_us, default=self._known(rows, starts[0]))
        candidates = [*starts, best.tiles, *neighbours(best.tiles, self.problem.shape)]
        return len(self._compiled(candidates, secs))

    def _compiled(self, candidates: Iterable[ExpertTiles], secs: float) -> dict[ExpertTiles, str]:
        """Those of the candidates that are compiled after at most `secs` seconds, and why they cannot be launched."""
        known = self.journal.compiled
        new = [tiles for tiles in dict.fromkeys(candidates) if tiles not in known]
        for tiles, why in (self.compile(new, secs) if new and secs else {}).items():
            self.journal.add(Compiled(tiles=tiles, why=why))
        return {tiles: known[tiles] for tiles in candidates if tiles in known}

    def _num_neighbours(self, trial: Trial) -> int:
        return sum(1 for _ in neighbours(trial.tiles, self.problem.shape))

    def _climb(self, rows: int, best: Trial, end: float) -> tuple[Trial, bool]:
        """The fastest tiles of one backend that are found from `best` on, and whether none near them is faster."""
        complete = bool(best.why)  # a backend whose own tiles are refused is not searched
        while time.monotonic() < end and not complete:
            around = list(neighbours(best.tiles, self.problem.shape))
            found = self._try(rows, around, end)
            parts = [
                min((self._known(rows, t) for t in around if self._differs_in(part, t, best)), key=_us, default=best)
                for part in ("first", "second")
            ]
            both = dataclasses.replace(best.tiles, first=parts[0].tiles.first, second=parts[1].tiles.second)
            found = min(found, self._try(rows, [both], end), key=_us)
            measured = all((rows, tiles) in self.journal.trials for tiles in around)
            complete = measured and not found.us < _GAIN * best.us and time.monotonic() < end
            if not measured and not found.us < best.us:
                break  # the others are not compiled
            best = min(best, found, key=_us)
        return best, complete

    def _differs_in(self, part: str, tiles: ExpertTiles, best: Trial) -> bool:
        """True if the GEMM `part` alone differs from the best tiles."""
        return dataclasses.replace(tiles, **{part: getattr(best.tiles, part)}) == best.tiles

    def _known(self, rows: int, tiles: ExpertTiles) -> Trial:
        return self.journal.trials.get((rows, tiles)) or Trial(rows=rows, tiles=tiles)

    def _try(self, rows: int, candidates: Sequence[ExpertTiles], end: float, *, always: int = 0) -> Trial:
        """Measure what has not been measured yet, the first `always` even if the time is over; the fastest of all."""
        new = [tiles for tiles in dict.fromkeys(candidates) if (rows, tiles) not in self.journal.trials]
        left = max(end - time.monotonic(), 0.0)
        refused = self._compiled(new[always:], left)
        for tiles in itertools.chain(new[:always], refused):
            if tiles not in new[:always] and time.monotonic() > end:
                break
            self.journal.add(self._measure(rows, tiles, refused.get(tiles, "")))
            self.report(len(self.journal.trials), min(self.journal.of(rows), key=_us))
        return min((self._known(rows, tiles) for tiles in candidates), key=_us)

    def _measure(self, rows: int, tiles: ExpertTiles, why: str) -> Trial:
        us = float("inf")
        if not why:
            try:
                error = self.problem.error(tiles)
                if error <= self.problem.limit:
                    us = statistics.median(self.problem.times(tiles, _QUICK))
                else:
                    why = f"its worst row error ({error:.3g}) exceeds {self.problem.limit:g}"
            except Exception as failure:  # noqa: BLE001 - what a compiler or driver may raise has no common type
                if "illegal" in str(failure) or "unspecified launch failure" in str(failure):
                    raise  # the device's context is lost
                why = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Trial(rows=rows, tiles=tiles, us=us, why=why)

    def _compare(self, rows: int, default: ExpertTiles, found: ExpertTiles, *, complete: bool) -> Chosen:
        """Time both in turn."""
        us = in_turn(self.problem, default, found)
        tiles = found if us[found] < _GAIN * us[default] else default
        chosen = Chosen(rows=rows, tiles=tiles, us=us[tiles], default_us=us[default], complete=complete)
        self.journal.add(chosen)
        return chosen


def in_turn(problem: Problem, default: ExpertTiles, found: ExpertTiles) -> dict[ExpertTiles, float]:
    """The median microseconds of both, timed in turn. Host sync."""
    times: dict[ExpertTiles, list[float]] = {default: [], found: []}
    for _ in range(_ROUNDS if found != default else 1):
        for tiles, samples in times.items():
            samples += problem.times(tiles, _THOROUGH)
    return {tiles: statistics.median(samples) for tiles, samples in times.items()}


def _us(trial: Trial) -> float:
    return trial.us
