"""Packs the engines that `time_layers.py` times and `serve_engine.py` runs for a GPU machine without a network.

    python tests/engines/pack.py --out DIR --have packages.txt [--whole] [--python 3.12] [--part-mb 40]

The machine has torch, Triton and the packages that `--have` names (lines as of `pip list --format=freeze`; versions are
not read). DIR gets one archive for each engine, in parts, their sums, and `run.sh`. SGLang needs vLLM's archive too,
which has the packages that both import. There, once as many transfers as it takes have put the parts into /tmp:

    bash DIR/run.sh vllm python3 tests/engines/time_layers.py --engine vllm

The engines are whole but for compiled parts: of those come the ones that a layer of experts calls and, with --whole,
those of attention and the packages that servers import, with the code of one GPU architecture. Kernels that exist as
PTX alone (Marlin's on Hopper) cannot run then.
"""

import argparse
import hashlib
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
WHOLE = {  # what a server needs beyond them: FlashAttention 3, which is Hopper's, FlashMLA, and memory that sleeps
    "vllm-0.26.0": r"_vllm_fa3_C|_flashmla_|cumem_allocator|fs_io_C",
}
ARCHIVES = {  # folders of each
    "vllm": ("vllm-0.26.0", "dependencies"),
    "sglang": ("sglang-0.5.17", "sglang-kernel-0.4.5", "dependencies-sglang"),
}
PRESET = 3  # of xz
RUN = """#!/bin/bash
# unpacks the parts of archives in /tmp once, and runs a command with an engine's paths: run.sh vllm|sglang COMMAND...
repo=$(pwd) all=/tmp/ep_moe_engines sums=$(cd "$(dirname "$0")" && pwd)
engine=$1; shift
mkdir -p $all
for name in vllm $engine; do
    if [ ! -e $all/$name.done ]; then
        (cd /tmp && sha256sum --quiet -c "$sums/$name.sha256") || exit 9
        cat /tmp/$name.tar.xz.* | tar -xJ -C $all && touch $all/$name.done || exit 9
    fi
done
export HOME=/tmp PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=/tmp/pycache HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
case $engine in
vllm) paths=$all/vllm-0.26.0:$all/dependencies ;;
sglang) # loads gpt-oss by the triton_kernels that vLLM has
    mkdir -p $all/triton && ln -sfn $all/vllm-0.26.0/vllm/third_party/triton_kernels $all/triton/triton_kernels
    paths=$all/sglang-0.5.17:$all/sglang-kernel-0.4.5:$all/dependencies-sglang:$all/dependencies:$all/triton ;;
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


def wanted_parts(release: str, whole: bool) -> str:
    """The pattern of a release's compiled parts that are packed."""
    return "|".join([WHEELS[release], *([WHOLE[release]] if whole and release in WHOLE else [])])


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


def write_parts(archive: Path, out: Path, size: int) -> list[int]:
    """Write an archive as parts of at most that many bytes, and their sums; returns their sizes. Old parts go."""
    for old in out.glob(f"{archive.name}.*"):
        old.unlink()
    packed, sums, sizes = archive.read_bytes(), [], []
    for number, first in enumerate(range(0, len(packed), size)):
        part, path = packed[first : first + size], out / f"{archive.name}.{number:02}"
        path.write_bytes(part)
        sums.append(f"{hashlib.sha256(part).hexdigest()}  {path.name}\n")
        sizes.append(len(part))
    (out / f"{archive.name.partition('.')[0]}.sha256").write_text("".join(sums))
    return sizes


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
    parser.add_argument("--part-mb", type=int, default=40, help="the size of a part")
    parser.add_argument("--whole", action="store_true", help="what `serve_engine.py` needs, too")
    options = parser.parse_args()
    if options.part_mb < 1:
        parser.error(f"--part-mb ({options.part_mb}) is not positive")
    work = options.cache / f"packed-{options.python}{'-whole' if options.whole else ''}"
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for release in WHEELS:
        if not (work / release).is_dir():
            unpack_wheel(release, wanted_parts(release, options.whole), options.cache, work, options.python)
        print(f"{release}: unpacked", flush=True)
    have = {normal(line) for line in options.have.read_text().splitlines() if line.strip()}
    own = HERE / f"requirements-sglang-{ENGINES['sglang']}.txt"
    shared = [HERE / f"requirements-{name}.txt" for name in (*ENGINES, *(["serve"] if options.whole else []))]
    for folder, lists, there in (("dependencies", shared, have), ("dependencies-sglang", [own], set[str]())):
        if not (work / folder).is_dir():
            target = ["--target", str(work / folder), "--no-compile", "--quiet"]
            pip("install", *target, *platform_options(options.python), *missing(lists, there))
        print(f"{folder}: {len(missing(lists, there))} packages", flush=True)
    for name, folders in ARCHIVES.items():
        archive = work / f"{name}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=PRESET) as tar:
            for folder in folders:
                tar.add(work / folder, folder)
        sizes = write_parts(archive, options.out, options.part_mb * 1_000_000)
        print(f"{archive.name}: {len(sizes)} parts, {sum(sizes) / 1e6:.1f} MB in {options.out}", flush=True)
    (options.out / "run.sh").write_text(RUN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
