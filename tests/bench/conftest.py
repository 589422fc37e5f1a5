"""Fixtures of benchmarks."""

import pkgutil

import pytest

from ep_moe import cli
from ep_moe.group import EPGroup


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the only rank in this process."""
    monkeypatch.setattr(
        cli, "on_ranks", lambda target, *args: pkgutil.resolve_name(target)(EPGroup.single("cpu"), *args)
    )
