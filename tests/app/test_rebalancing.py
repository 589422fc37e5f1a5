"""`--rebalance`: when the ranks of a command move experts."""

from typing import Any

import pytest

from ep_moe.app.rebalancing import OneRebalance, RebalanceConfig

MEANINGS: dict[str, tuple[int | None, int | None]] = {  # every, once_after
    "off": (None, None),
    "once": (None, 100),
    "once:7": (None, 7),
    "every:3000": (3000, None),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_when_experts_move(name: str) -> None:
    config = RebalanceConfig(rebalance=name)
    assert (config.every, config.once_after) == MEANINGS[name]


@pytest.mark.parametrize(
    "name", ["", "on", "every", "every:", "every:0", "every:-1", "once:", "once:1.5", "off:3", "every:9999999999"]
)
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not off, once, once:PASSES or every:PASSES"):
        RebalanceConfig(rebalance=name)


def test_a_gain_is_a_part() -> None:
    with pytest.raises(ValueError, match=r"rebalance_min_gain \(1.0\) is not in \[0, 1\)"):
        RebalanceConfig(rebalance_min_gain=1.0)


@pytest.mark.parametrize(("passes", "asked"), [(2, []), (3, ["request"]), (9, ["request"])])
def test_one_rebalance_begins_once(passes: int, asked: list[str]) -> None:
    calls: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda: calls.append(name)

    once = OneRebalance(Recorder(), 3)  # type: ignore[arg-type]
    for _ in range(passes):
        once.step()
    assert calls.count("step") == passes
    assert [name for name in calls if name != "step"] == asked
    if asked:
        assert calls.index("request") == 2  # before the third step
    once.finish()  # what has not begun begins then
    assert calls.count("request") == 1
