"""Archives of engines for machines without a network: whose device code stays, which packages come along."""

import struct
import sys
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


def test_a_wrong_size_of_parts_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pack.py", "--out", "x", "--have", "y", "--part-mb", "0"])
    with pytest.raises(SystemExit):
        pack.main()
    assert "--part-mb (0) is not positive" in capsys.readouterr().err
