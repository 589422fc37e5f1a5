"""Samples of tests' parameters."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations of these values or tuples of values; all but every `every`-th diagonal of them are `matrix`."""
    numbered = [list(enumerate(value if isinstance(value, tuple) else (value,) for value in axis)) for axis in axes]
    return [
        pytest.param(
            *itertools.chain(*(values for _, values in chosen)),
            marks=pytest.mark.matrix if sum(number for number, _ in chosen) % every else (),
        )
        for chosen in itertools.product(*numbered)
    ]


def without(names: Iterable[str], *large: str) -> list[Any]:
    """These names, of which the large ones are `matrix`."""
    named = list(names)
    assert {*large} <= {*named}
    return [pytest.param(name, marks=pytest.mark.matrix if name in large else ()) for name in named]
