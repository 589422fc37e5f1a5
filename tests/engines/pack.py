"""Packs the engines that `time_layers.py` times into archives for a GPU machine without a network.

    python tests/engines/pack.py --out DIR --have packages.txt [--python 3.12] [--part-mb 24]

The machine has torch, Triton and the packages that `--have` names (lines as of `pip list --format=freeze`; versions are
not read). DIR gets the parts of one archive and `run.sh`: there, with DIR in the tree of ep_moe,

    cat DIR/engines.* >/tmp/engines.tar.xz && bash DIR/run.sh vllm python3 tests/engines/time_layers.py --engine vllm

The engines are whole but for compiled parts: of those come the ones that a layer of experts calls, with the code of one
GPU architecture. Kernels that exist as PTX alone (Marlin's on Hopper) cannot run then.
"""

import argparse
import re
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

from releases import COMPILED, HERE, pip

ARCHITECTURE = 90
FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)  # magic, version and size of the header of a container of device code
PTX, CUBIN = 1, 2  # kinds of its entries
ENGINES = {"vllm": "0.26.0", "sglang": "0.5.17"}
WHEELS = {  # release and its compiled parts, as parts of their names
    "vllm-0.26.0": r"vllm/(_C|_moe_C)_stable_libtorch|vllm/(spinloop|_rust_tool_parser)|third_party/deep_gemm/",
    "sglang-0.5.17": r"\.(cuh?|hpp|h|inl)$",  # it compiles small kernels on first use
    "sglang-kernel-0.4.5": r"sgl_kernel/(sm90/common_ops|spatial_ops)",
}
RUN = """#!/bin/bash
# unpacks /tmp/engines.tar.xz once, and runs a command with an engine's paths: run.sh vllm|sglang COMMAND...
repo=$(pwd) all=/tmp/ep_moe_engines
if [ ! -e $all/done ]; then
    mkdir -p $all && tar -xJf /tmp/engines.tar.xz -C $all && touch $all/done || exit 9
fi
engine=$1; shift
export HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
case $engine in
vllm) paths=$all/vllm-0.26.0:$all/dependencies ;;
sglang) paths=$all/sglang-0.5.17:$all/sglang-kernel-0.4.5:$all/dependencies-sglang:$all/dependencies ;;
*) echo "engine $engine is not vllm or sglang" >&2; exit 2 ;;
esac
PYTHONPATH=$paths:$repo:$repo/tests/engines exec "$@"
"""


def without_other_architectures(code: bytes, architecture: int = ARCHITECTURE) -> bytes:
    """A library whose device code for other GPU architectures, and PTX, is zeros: its size stays, and it packs well.

    Errors: ValueError for a container whose entries do not fit it.
    """
    data, at = bytearray(code), 0
    while (at := data.find(FATBIN, at)) >= 0:
        end, entry = at + 16 + struct.unpack_from("<Q", data, at + 8)[0], at + 16
        while entry < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
            first = entry + header
            if kind not in (PTX, CUBIN) or header < 32 or first + payload > end:
                raise ValueError(f"the container of device code at byte {at} has an entry of kind {kind} at {entry}")
            if (kind, struct.unpack_from("<I", data, entry + 28)[0]) != (CUBIN, architecture):
                data[first : first + payload] = bytes(payload)
            entry = first + payload
        at = end
    return bytes(data)


def platform_options(python: str) -> list[str]:
    """Options of pip for wheels of that Python on x86-64 Linux."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64"]
    words = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return words + [word for name in platforms for word in ("--platform", name)]


def unpack_wheel(release: str, wanted: str, cache: Path, folder: Path, python: str) -> None:
    """Unpack a release without compiled parts but the wanted ones, these for one GPU architecture."""
    name, version = release.rsplit("-", 1)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        pip("download", "--quiet", "--dest", str(cache), *platform_options(python), f"{name}=={version}")
    tag = f"cpython-{python.replace('.', '')}-"
    with zipfile.ZipFile(next(cache.glob(pattern))) as wheel:
        for entry in wheel.namelist():
            compiled = entry.endswith(COMPILED)
            if entry.endswith("/") or (compiled and not re.search(wanted, entry)):
                continue
            if "cpython-" in entry and tag not in entry:
                continue
            path = folder / release / entry
            path.parent.mkdir(parents=True, exist_ok=True)
            content = wheel.read(entry)
            path.write_bytes(without_other_architectures(content) if entry.endswith(".so") else content)


def missing(lists: list[Path], have: set[str]) -> list[str]:
    """The requirements of these files that the machine does not have."""
    lines = {line.strip() for path in lists for line in path.read_text().splitlines()}
    return sorted(line for line in lines if line and line[0] != "#" and normal(line) not in have)


def normal(requirement: str) -> str:
    """The name of a requirement as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>!~ ;\[]", requirement)[0]).lower()


def main() -> int:
    """Write the archive; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts and run.sh")
    parser.add_argument("--have", type=Path, required=True, help="file that lists the machine's packages")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "ep_moe_engines", help="for wheels")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument("--part-mb", type=int, default=24, help="the size of a part")
    options = parser.parse_args()
    if options.part_mb < 1:
        parser.error(f"--part-mb ({options.part_mb}) is not positive")
    work = options.cache / f"packed-{options.python}"
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for release, wanted in WHEELS.items():
        if not (work / release).is_dir():
            unpack_wheel(release, wanted, options.cache, work, options.python)
        print(f"{release}: unpacked", flush=True)
    have = {normal(line) for line in options.have.read_text().splitlines() if line.strip()}
    own = HERE / f"requirements-sglang-{ENGINES['sglang']}.txt"
    shared = [HERE / f"requirements-{name}.txt" for name in ENGINES]
    for folder, lists, there in (("dependencies", shared, have), ("dependencies-sglang", [own], set[str]())):
        if not (work / folder).is_dir():
            target = ["--target", str(work / folder), "--no-compile", "--quiet"]
            pip("install", *target, *platform_options(options.python), *missing(lists, there))
        print(f"{folder}: {len(missing(lists, there))} packages", flush=True)
    archive = work / "engines.tar.xz"
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in (*WHEELS, "dependencies", "dependencies-sglang"):
            tar.add(work / name, name)
    packed, size = archive.read_bytes(), options.part_mb * 1_000_000
    for old in options.out.glob("engines.*"):
        old.unlink()
    for number, first in enumerate(range(0, len(packed), size)):
        (options.out / f"engines.{number:02}").write_bytes(packed[first : first + size])
    (options.out / "run.sh").write_text(RUN)
    print(f"{len(packed) / 1e6:.1f} MB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
