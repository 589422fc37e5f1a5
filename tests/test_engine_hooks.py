"""What plug-ins check of an engine; their contract tests with real engines are in tests/engines."""

import logging
from unittest import mock

import pytest

import ep_moe.engines.vllm
from ep_moe.engines.common.hooks import Hook, check_hooks, check_version

TESTED = ("1.0", "2.0")


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (Hook(module="json.nowhere", path="dumps"), "engine 3.0 has no json.nowhere.dumps"),
        (Hook(module="json", path="JSONEncoder.paint"), "engine 3.0 has no json.JSONEncoder.paint"),
        (Hook(module="json", path="dumps", parameters=("obj", "colour")), r"json.dumps takes \(obj, .*\(obj, colour\)"),
        (Hook(module="json", path="dump", parameters=("fp", "obj")), r"json.dump takes \(obj, fp, "),
    ],
)
def test_a_missing_hook_is_named(hook: Hook, words: str) -> None:
    good = Hook(module="json", path="dump", parameters=("obj", "fp"))
    check_hooks("engine", "3.0", TESTED, [good])
    with pytest.raises(RuntimeError, match=words + ".*1.0 and 2.0"):
        check_hooks("engine", "3.0", TESTED, [good, hook])


def test_another_version_is_one_warning() -> None:
    log = mock.Mock(spec=logging.Logger)
    check_version("engine", "2.0", TESTED, log)
    log.warning.assert_not_called()
    check_version("engine", "3.0", TESTED, log)
    log.warning.assert_called_once()


def test_without_the_switch_no_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_MOE_VLLM", raising=False)
    ep_moe.engines.vllm.register()  # vLLM is not installed here: importing it would fail
    monkeypatch.setenv("EP_MOE_VLLM", "1")
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        ep_moe.engines.vllm.register()
