"""`ep-moe doctor`: its report on this machine and on others, and the figures that it compares with."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import ROOT, environ
from typer.testing import CliRunner

from ep_moe.app import doctor
from ep_moe.app.doctor import EXPECTED, judged
from ep_moe.cli import app
from ep_moe.kernels.device import Device


def findings(*options: str) -> dict[str, dict[str, Any]]:
    """The report's findings by name."""
    done = CliRunner().invoke(app, ["doctor", "--json", *options])
    assert done.exit_code == 0, done.output
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_every_line_has_a_verdict_and_what_is_not_well_a_mend() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ep_moe", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=environ() | {"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], done.stderr) == (0, True, "")
    assert {finding["part"] for finding in report["findings"]} == {"software", "system", "gpus", "others", "speed"}
    for finding in report["findings"]:
        assert finding["found"]
        assert finding["verdict"] in ("ok", "note", "warning")
        assert bool(finding["mend"]) == (finding["verdict"] != "ok"), finding
    assert torch.__version__.startswith(report["findings"][2]["found"].split(",")[0])  # PyPI's leaves +cu132 out


def test_the_text_says_the_same() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--only", "system"])
    for name, finding in findings("--only", "system").items():
        [line] = [line for line in shown.stdout.splitlines() if line[10:].startswith(name)]
        assert line.startswith(f"  {finding['verdict']}")
    assert not any(line.endswith(" ") for line in shown.stdout.splitlines())


def test_what_a_machine_lacks_is_told_with_its_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {doctor.resource.RLIMIT_NOFILE: (1024, 1024), doctor.resource.RLIMIT_MEMLOCK: (2**16, 2**16)}
    monkeypatch.setattr(doctor.resource, "getrlimit", limits.__getitem__)
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=2**26)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    found = findings("--only", "system")
    assert (found["shared memory"]["verdict"], "--ipc=host" in found["shared memory"]["mend"]) == ("warning", True)
    assert found["shared memory"]["found"].startswith("64 MiB free")
    assert (found["open files"]["verdict"], "ulimit -n" in found["open files"]["mend"]) == ("warning", True)
    assert found["locked memory"]["verdict"] == "note"
    assert "cannot be written" in found["cache HF_HOME"]["found"]
    monkeypatch.setattr(doctor, "_version_of", lambda name: {"torch": "2.1", "triton": None}.get(name, "99"))
    done = CliRunner().invoke(app, ["doctor", "--json", "--only", "software"])
    report = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert report["torch"]["found"] == "2.1 is not tested, >=2.11,<2.16 is"
    assert (done.exit_code, report["triton"]["verdict"]) == (1, "failed")
    assert report["triton"]["mend"] == "pip install 'triton>=3.6,<3.10'"


def test_a_release_newer_than_what_is_tested_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.15.3+cpu", "triton": "3.10.0"}
    monkeypatch.setattr(doctor, "_version_of", lambda name: versions.get(name, "5.99"))
    report = findings("--only", "software")
    assert (report["torch"]["verdict"], report["triton"]["verdict"]) == ("ok", "note")
    assert report["triton"]["found"] == "3.10.0 is newer than what is tested, >=3.6,<3.10"
    assert report["triton"]["mend"] == "if it fails: pip install 'triton>=3.6,<3.10'"


def test_gpus_are_listed_with_links_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class H200:
        name, major, minor = "NVIDIA H200", 9, 0

    cuda = {
        "device_count": lambda: 2,
        "get_device_properties": lambda index: H200,
        "get_device_name": lambda index: H200.name,
        "mem_get_info": lambda index: (2**37, 2**37) if index == 0 else (2**20, 2**37),
        "can_device_access_peer": lambda a, b: False,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    interpreter = Device.of(torch.device("cpu"))
    limits = [
        dataclasses.replace(interpreter, capability=capability, shared_bytes=kib * 1024)
        for capability, kib in (((9, 0), 227), ((8, 6), 99))
    ]
    monkeypatch.setattr(Device, "of", lambda device: limits[device.index])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    times = {"transport": ("sum_us", 24.0), "experts": ("call_us", 700.0)}

    def on_ranks(target: str, engine: Any, config: Any) -> dict[str, Any]:
        figure, value = next(times[name] for name in times if name in target)
        return {"ok": True, "rows": [{"figures": {figure: value}}]}

    monkeypatch.setattr("ep_moe.app.start.on_ranks", on_ranks)
    found = findings("--only", "gpus", "--only", "speed")
    assert (found["GPU 0"]["verdict"], found["GPU 1"]["verdict"]) == ("ok", "warning")
    first, second = found["kernels on GPU 0"], found["kernels on GPU 1"]
    assert (first["verdict"], first["found"]) == ("ok", "tiles for 227 KiB of shared memory")
    assert (second["verdict"], "compiled, never run" in second["mend"]) == ("note", True)
    assert second["found"].endswith("for 99 KiB of shared memory, without fp8, early launch, wgmma or tcgen05")
    assert (found["peer access"]["verdict"], found["NCCL"]["found"]) == ("warning", "2.28.9")
    assert " shipped for NVIDIA H200" in found["tile tables"]["found"]
    assert found["exchange"]["verdict"] == "ok"
    assert (found["GEMMs"]["verdict"], "nvidia-smi -q" in found["GEMMs"]["mend"]) == ("warning", True)


def test_a_time_is_judged_by_the_rows_of_its_kind() -> None:
    known = json.loads(EXPECTED.read_text())["exchange"]["figures"]["2 NVIDIA H200"]
    assert judged("exchange", "NVIDIA H200", 2, known["us"] * 1.2, "mend").verdict == "ok"
    slow = judged("exchange", "NVIDIA H200", 2, known["us"] * 1.3, "mend")
    assert (slow.verdict, slow.mend, known["commit"] in slow.found) == ("warning", "mend", True)
    other = judged("exchange", "NVIDIA B300", 2, 1.0, "mend")
    assert (other.verdict, "NVIDIA H200" in other.mend) == ("note", True)


def test_the_expected_figures_are_those_of_the_rows() -> None:
    done = CliRunner().invoke(app, ["bench", "expected", "--check", "--dir", str(ROOT / "docs" / "benchmarks")])
    assert done.exit_code == 0, done.output
