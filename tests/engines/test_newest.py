"""The job that tries newer releases, with other answers of pip."""

import sys
from pathlib import Path

import newest
import pytest
from releases import COMPARED, ENGINES, Unavailable


def test_what_has_moved_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (vllm, tested_vllm), (sglang, tested_sglang) = ENGINES[1], ENGINES[3]
    answers = {vllm: f"{vllm} ({tested_vllm})\nAvailable versions: {tested_vllm}, 0.1", sglang: f"{sglang} (99.0)\n"}

    def pip(*arguments: str) -> str:
        assert arguments[:2] == ("index", "versions")
        if arguments[2] not in answers:
            raise Unavailable("no network")
        return answers[arguments[2]]

    def compared(cache: Path, others: dict[str, str]) -> list[str]:
        assert others == {f"sglang {tested_sglang}": "99.0"}
        return ["topk adds x"]

    def run(name: str, version: str, work: Path, like: str) -> list[str]:
        assert (name, version, like) == ("sglang", "99.0", tested_sglang)
        return ["rank 0 of 1 (exit code 1):\nImportError"]

    monkeypatch.setattr(newest, "pip", pip)
    monkeypatch.setattr(newest, "unpacked", lambda name, version, cache: cache)
    monkeypatch.setattr(newest, "compared", compared)
    monkeypatch.setattr(newest, "prepare", lambda work: work)
    monkeypatch.setattr(newest, "run", run)
    monkeypatch.setattr(newest, "cache_folder", Path)
    monkeypatch.setattr(sys, "argv", ["newest.py"])
    assert newest.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert f"vllm {tested_vllm} is the newest, and is tested" in said
    assert f"{COMPARED[0][0]}: no network" in said
    place = said.index(f"sglang 99.0 in place of {tested_sglang}: 2 differences")
    assert said[place + 1 :] == ["topk adds x", "rank 0 of 1 (exit code 1):", "ImportError"]
    monkeypatch.setattr(sys, "argv", ["newest.py", "--only", "vllm"])
    assert newest.main() == 0
    assert capsys.readouterr().out == f"vllm {tested_vllm} is the newest, and is tested\n"
