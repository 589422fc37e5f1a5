"""The text behind the shipped model: the King James Version, public domain.

It comes from Debian's packages bible-kjv and bible-kjv-text, as `bible -f Gen1:1-Rev22:21` prints it: one verse per
line after its reference, pure ASCII. docs/MODEL.md has the commands.
Letters: N windows, S bytes per window.
"""

import dataclasses
import re
from importlib import resources

import torch

HELDOUT_EVERY = 20  # every 20th chapter is held out

SHIPPED_HELDOUT_BYTES = 65536  # 128 windows of 512

_VERSE = re.compile(r"([1-3]?[A-Za-z]+)(\d+):(\d+) (.+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """One chapter: `book` is the listing's short name ("Ge"), `verses` the text without references."""

    book: str
    number: int
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        """A verse per line."""
        return "".join(f"{verse}\n" for verse in self.verses)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Plain text in two parts: the training text, and the held-out chapters."""

    train: bytes
    heldout: bytes


def parse(listing: str) -> list[Chapter]:
    """Reads the raw listing into chapters, in order, and drops the references.

    Example: "Ge1:1 In the beginning ..." opens Chapter(book="Ge", number=1, verses=("In the beginning ...", ...)).
    Raises ValueError for a line that is not a verse.
    """
    verses: dict[tuple[str, int], list[str]] = {}
    for line_number, line in enumerate(listing.splitlines(), start=1):
        match = _VERSE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {line_number} ({line[:40]!r}) is not a verse like 'Ge1:1 In the beginning ...'")
        book, chapter, _, verse = match.groups()
        verses.setdefault((book, int(chapter)), []).append(" ".join(verse.split()))
    return [Chapter(book=book, number=number, verses=tuple(lines)) for (book, number), lines in verses.items()]


def join(chapters: list[Chapter]) -> bytes:
    """Plain text of some chapters: a verse per line, a blank line between chapters."""
    return "\n".join(chapter.text for chapter in chapters).encode("ascii")


def split(chapters: list[Chapter]) -> Split:
    """Holds out every 20th chapter (index % 20 == 19); the rest is for training."""
    last = HELDOUT_EVERY - 1
    return Split(
        train=join([chapter for index, chapter in enumerate(chapters) if index % HELDOUT_EVERY != last]),
        heldout=join(chapters[last::HELDOUT_EVERY]),
    )


def windows(text: bytes, length: int) -> torch.Tensor:
    """Cuts text into non-overlapping windows, [N, S] int64, token id = byte; a rest shorter than S is dropped.

    Raises ValueError if the text does not fill one window.
    """
    if len(text) < length:
        raise ValueError(f"text of {len(text)} bytes does not fill one window of {length}")
    count = len(text) // length
    return torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8).view(count, length).long()


def shipped_heldout() -> bytes:
    """The first 65,536 bytes of the held-out chapters, which ship with the package."""
    return resources.files("ep_moe.app").joinpath("heldout.txt").read_bytes()
