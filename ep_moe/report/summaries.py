"""The summary of a benchmark: its newest rows on one kind of GPU, ours beside the baselines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ep_moe.report.records import BENCHES, Record, newest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a benchmark's summary shows; see "summary" in benches.json.

    Args:
        words: title -> path of what tells rows apart. only: path -> values of the rows that count.
        figure: the figure that is compared. baselines: name in rows -> name on the page, the first one is compared.
        unit: of the figure; times are better if they are smaller, rates if they are larger.
        together: paths; of rows that are equal there, those of the newest commit count.
        plot: "bars" or "lines". title: of the plot.
    """

    words: Mapping[str, str]
    only: Mapping[str, Sequence[Any]]
    figure: str
    baselines: Mapping[str, str]
    unit: str
    together: Sequence[str]
    plot: str
    title: str

    @classmethod
    def of(cls, bench: str) -> "Summary":
        """The summary of a known benchmark. Local."""
        return cls(**BENCHES[bench]["summary"])

    def choose(self, records: Sequence[Record]) -> list[Record]:
        """The rows that are shown of one bench: on the kind of GPU that was measured last, by GPUs and words.

        Rows without the figure, or without the first baseline's, have nothing to compare and are left out. Local.
        """
        paths = f"figures.{self.figure}", f"baselines.{next(iter(self.baselines))}.{self.figure}"
        rows = [
            row
            for row in newest(records)
            if all(row.value(path) in values for path, values in self.only.items())
            and all(row.value(path) != "" for path in paths)
        ]
        if not rows:
            return []
        gpu = max(rows, key=lambda row: row.when).gpu
        chosen: dict[str, Record] = {}
        last: dict[str, Record] = {}
        for row in sorted((row for row in rows if row.gpu == gpu), key=lambda row: row.when):
            chosen[str([row.world_size, *self._values(row)])] = row
            last[self._group(row)] = row
        found = [row for row in chosen.values() if not self.together or row.commit == last[self._group(row)].commit]
        return sorted(found, key=lambda row: (row.world_size, *map(_order, self._values(row))))

    def _values(self, row: Record) -> list[Any]:
        return [row.value(path) for path in self.words.values()]

    def _group(self, row: Record) -> str:
        return str([row.value(path) for path in self.together])

    def ours(self, row: Record) -> float:
        """Our figure of a row. Local."""
        return float(row.figures[self.figure])

    def theirs(self, row: Record, name: str) -> float | None:
        """A baseline's figure of a row, None if it has none. Local."""
        value = row.value(f"baselines.{name}.{self.figure}")
        return None if value == "" else float(value)

    def ratio(self, row: Record, name: str) -> float | None:
        """How many times as fast as a baseline; below 1 is slower. Local."""
        theirs = self.theirs(row, name)
        if theirs is None:
            return None
        return self.ours(row) / theirs if self.figure.endswith("_per_sec") else theirs / self.ours(row)

    def labels(self, rows: Sequence[Record]) -> tuple[str, list[str]]:
        """The words that all rows share, and for each row the others, with its number of GPUs. Local."""
        texts = [[f"{row.world_size} GPU{'s' if row.world_size > 1 else ''}"] for row in rows]
        shared = []
        for title, path in self.words.items():
            words = [_word(row.value(path), title) for row in rows]
            if len({*words}) == 1 and len(rows) > 1:
                shared.append(words[0])
            else:
                for text, word in zip(texts, words, strict=True):
                    text.append(word)
        return ", ".join(shared), [", ".join(text) for text in texts]


def is_slower(ratio: float | None) -> bool:
    """Whether a ratio that is shown with two digits is below 1. Local."""
    return ratio is not None and round(ratio, 2) < 1


def _word(value: Any, title: str) -> str:
    if type(value) is int:
        return f"{value} {title if value != 1 else title.replace('tokens', 'token')}"
    return f"{title} {value}" if value == "none" else str(value)


def _order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value
