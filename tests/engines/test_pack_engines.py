"""Archives of engines for machines without a network: whose device code stays, which packages come along."""

import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pack
import pytest


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """One entry of a container: a header of 64 bytes, with the architecture at byte 28, and the code."""
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return header + bytes(64 - len(header)) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return pack.FATBIN + struct.pack("<Q", len(body)) + body


def test_only_the_code_of_one_architecture_stays() -> None:
    parts = [(pack.PTX, 90, b"p" * 24), (pack.CUBIN, 90, b"c" * 40), (pack.CUBIN, 80, b"o" * 8)]
    library = (
        b"head" + container(*(entry(*part) for part in parts)) + b"between" + container(entry(*parts[2])) + b"tail"
    )
    found = pack.without_other_architectures(library)
    assert found == library.replace(b"p" * 24, bytes(24)).replace(b"o" * 8, bytes(8))
    assert b"c" * 40 in found
    assert pack.without_other_architectures(library, 80) == library.replace(b"p" * 24, bytes(24)).replace(
        b"c" * 40, bytes(40)
    )


def test_a_container_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the container of device code at byte 0 has an entry of kind 7 at 16"):
        pack.without_other_architectures(container(entry(7, 90, b"code")))


def test_packages_that_the_machine_has_stay_behind(tmp_path: Path) -> None:
    lists = [tmp_path / "a.txt", tmp_path / "b.txt"]
    lists[0].write_text("# why\nPyYAML==6.0\nhuggingface_hub==1.15\nzmq>=3\n")
    lists[1].write_text("zmq>=3\nfastapi[all]==1\n")
    assert pack.missing(lists, {"pyyaml", "huggingface-hub"}) == ["fastapi[all]==1", "zmq>=3"]
    assert pack.normal("Fast_API[all]==1") == "fast-api"


def test_an_archive_is_written_in_parts_and_unpacked_once(tmp_path: Path) -> None:
    out, machine = tmp_path / "out", tmp_path / "machine"
    for folder in (out, machine):
        folder.mkdir()
    (out / "vllm.tar.xz.09").write_bytes(b"of an earlier time")
    for name, folders in pack.ARCHIVES.items():
        archive = tmp_path / f"{name}.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            for folder in folders:
                (tmp_path / folder).mkdir()
                (tmp_path / folder / "file").write_bytes(random.Random(folder).randbytes(700))
                tar.add(tmp_path / folder, folder)
        sizes = pack.write_parts(archive, out, 600)
        assert len(sizes) > 1
        assert max(sizes) <= 600
        parts = sorted(out.glob(f"{name}.tar.xz.*"))
        assert b"".join(path.read_bytes() for path in parts) == archive.read_bytes()
    run = out / "run.sh"
    run.write_text(pack.RUN.replace("/tmp", str(machine)))

    def shown(engine: str) -> "subprocess.CompletedProcess[str]":
        words = ["bash", str(run), engine, "bash", "-c", "echo $PYTHONPATH; cat ${PYTHONPATH%%:*}/file | wc -c"]
        return subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert shown("vllm").returncode == 9  # no parts are there yet
    for path in out.glob("*.tar.xz.*"):
        shutil.copy(path, machine)
    for engine, first in (("vllm", "vllm-0.26.0"), ("sglang", "sglang-0.5.17")):
        paths, count = shown(engine).stdout.split()
        assert paths.split(":")[0] == str(machine / "ep_moe_engines" / first)
        assert count == "700"
    for path in machine.glob("*.tar.xz.*"):
        path.unlink()
    assert shown("sglang").returncode == 0  # it is unpacked already


def test_a_part_that_came_over_wrong_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "vllm.tar.xz").write_bytes(b"an archive")
    pack.write_parts(tmp_path / "vllm.tar.xz", tmp_path, 100)
    (tmp_path / "vllm.tar.xz.00").write_bytes(b"an archiwe")
    (tmp_path / "run.sh").write_text(pack.RUN.replace("/tmp", str(tmp_path)))
    found = subprocess.run(
        ["bash", str(tmp_path / "run.sh"), "vllm", "true"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 9
    assert "vllm.tar.xz.00: FAILED" in found.stdout


def test_whole_engines_have_attention_too() -> None:
    fa3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    assert re.search(pack.wanted_parts("vllm-0.26.0", whole=True), fa3)
    assert not re.search(pack.wanted_parts("vllm-0.26.0", whole=False), fa3)
    assert pack.wanted_parts("sglang-0.5.17", whole=True) == pack.WHEELS["sglang-0.5.17"]


def test_a_wrong_size_of_parts_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pack.py", "--out", "x", "--have", "y", "--part-mb", "0"])
    with pytest.raises(SystemExit):
        pack.main()
    assert "--part-mb (0) is not positive" in capsys.readouterr().err
