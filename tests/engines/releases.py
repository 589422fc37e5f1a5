"""Releases of serving engines: downloaded, unpacked without their compiled parts, and started rank by rank."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENGINES = (("vllm", "0.26.0"), ("vllm", "0.33.0"), ("sglang", "0.5.17"), ("sglang", "0.5.23"))
# cases of releases whose newer ones run all: what those load, or hand over, in another way
SOME = {
    ("vllm", "0.26.0"): "qwen3_moe qwen3_moe_fp8_block qwen3_moe_nvfp4_w4a16 qwen3_moe_gptq_rows qwen3_moe_gptq_static"
    " deepseek_v3 gpt_oss_mxfp4 dead_rank",
    ("sglang", "0.5.17"): "qwen3_moe qwen3_moe_fp8_block int4_group_format deepseek_v3 gpt_oss_mxfp4 dead_rank",
}
COMPARED = (("flashinfer_python", "0.7.4"), ("vllm", "0.9.2"), *ENGINES[1::2])  # for `signatures.py`
COMPILED = (".so", ".hpp", ".h", ".cuh", ".cu", ".inl", ".js", ".css", ".jpg", "vllm-rs")
WORLDS = (1, 2)
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{HERE}", "CUDA_VISIBLE_DEVICES": ""}
VARIABLES = {
    "vllm": {
        "EP_MOE_VLLM": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_MLA_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
    "sglang": {"EP_MOE_SGLANG": "1", "TORCHDYNAMO_DISABLE": "1"},  # SGLang compiles routers, for 20 seconds
}
CPU_PLATFORM = {"vllm.platform_plugins": {"ep_moe_tests": "vllm_twins:platform"}}  # chooses vLLM's CPU
SHOWN_CHARS = 30_000  # of the output of a rank that failed
DEVICE, CASES = os.environ.get("EP_MOE_ENGINE_DEVICE", "cpu"), os.environ.get("EP_MOE_ENGINE_CASES", "").split()
TIMEOUT_SECS = float(os.environ.get("EP_MOE_ENGINE_TIMEOUT_SECS", "300"))


class Unavailable(Exception):
    """A release that cannot be had on this machine, and why."""


def cache_folder() -> Path:
    """Where wheels and dependencies are kept."""
    folder = Path(os.environ.get("EP_MOE_ENGINE_CACHE") or Path.home() / ".cache" / "ep_moe_engines")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pip(*arguments: str) -> str:
    """Run pip; what it prints. Errors: Unavailable with its last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Unavailable(str(error)) from error
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise Unavailable(lines[-1])
    return found.stdout


def unpacked(name: str, version: str, cache: Path) -> Path:
    """The folder of a release without compiled parts, downloaded if it is not there yet."""
    folder = cache / f"{name}-{version}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache) as work:
        wheels = sorted(cache.glob(f"{name}-{version}-*.whl"))
        if not wheels:
            pip("download", "--quiet", "--no-deps", "--ignore-requires-python", "--dest", work, f"{name}=={version}")
            wheels = sorted(Path(work).glob("*.whl"))
        parts = Path(work) / "parts"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(parts, [entry for entry in wheel.namelist() if not entry.endswith(COMPILED)])
        parts.rename(folder)
    return folder


def dependencies(name: str, version: str, cache: Path) -> Path:
    """A folder with what a release of `ENGINES` imports, which only its processes see."""
    lists = [HERE / f"requirements-{key}.txt" for key in (name, f"{name}-{version}")]
    lists = [path for path in lists if path.is_file()]
    wanted = "".join(path.read_text() for path in lists)
    folder, done = cache / f"{name}-{version}-dependencies", cache / f"{name}-{version}-dependencies.txt"
    if done.is_file() and done.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    options = [word for path in lists for word in ("--requirement", str(path))]
    pip("install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder), *options)
    done.write_text(wanted)
    return folder


def entry_points(folder: Path, added: Mapping[str, Mapping[str, str]] = CPU_PLATFORM) -> None:
    """A distribution with the entry points of this tree, and others by group and name."""
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    plugins = {group: {**plugins.get(group, {}), **added.get(group, {})} for group in {**plugins, **added}}
    information = folder / "ep_moe_engine_tests-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ep-moe-engine-tests\nVersion: 0\n")
    lines = [
        line
        for group, entries in plugins.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def fetch() -> None:
    """Download every release, and what it imports; those that cannot be had are left out."""
    for name, version in dict.fromkeys((*ENGINES, *COMPARED)):
        with contextlib.suppress(Unavailable):
            unpacked(name, version, cache_folder())
            if (name, version) in ENGINES:
                dependencies(name, version, cache_folder())


def start(name: str, version: str, paths: list[Path], work: Path, world: int, rank: int) -> subprocess.Popen[str]:
    """Start one rank of an engine."""
    cases = [] if CASES == ["all"] else CASES or SOME.get((name, version), "").split()
    environ = {
        **os.environ,
        "PYTHONPATH": ":".join(str(path) for path in paths),
        **VARIABLES[name],
        **({"CUDA_VISIBLE_DEVICES": ""} if DEVICE == "cpu" else {"EP_MOE_SHARED_GPU": "1"}),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "EP_MOE_ENGINE_SECS": str(max(1.0, TIMEOUT_SECS - 20)),  # then a rank shows where it is, and ends
    }
    port = 20000 + os.getpid() % 60 * 200 + world * 100 - 100  # below those that the system gives away
    arguments = [str(world), str(rank), str(port), str(work / "checkpoints"), *cases]
    log = (work / f"{world}-{rank}.log").open("w")
    return subprocess.Popen(
        [sys.executable, str(HERE / f"{name}_process.py"), *arguments],
        env=environ,
        cwd=work,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )


def prepare(folder: Path) -> Path:
    """Write checkpoints and entry points to a folder, which is returned."""
    entry_points(folder / "entries")
    command = [sys.executable, str(HERE / "checkpoints.py"), str(folder / "checkpoints")]
    subprocess.run(command, env=ENVIRON, check=True, stderr=subprocess.DEVNULL)
    return folder


def run(name: str, version: str, work: Path, like: str | None = None) -> list[str]:
    """Run the cases of a release on 1 and 2 ranks at the same time, and print their lines; returns what has failed.

    Args:
        work: of `prepare`. like: the release of `ENGINES` with the same dependencies.
    Errors: Unavailable.
    """
    cache = cache_folder()
    paths = [unpacked(name, version, cache), dependencies(name, like or version, cache), work / "entries", ROOT, HERE]
    ranks = [(world, rank) for world in WORLDS for rank in range(world)]
    running = {(world, rank): start(name, version, paths, work, world, rank) for world, rank in ranks}
    deadline, failed = time.monotonic() + TIMEOUT_SECS, []
    for (world, rank), process in running.items():
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        text = (work / f"{world}-{rank}.log").read_text()
        lines = [line for line in text.splitlines() if line.startswith("rank ")]
        print("\n".join(f"{name} {version}, {line}" for line in lines), flush=True)
        if code != 0 or "all cases passed" not in text:
            shown = "\n".join(line for line in text.splitlines() if "Loading" not in line and "WARNING" not in line)
            failed.append(f"rank {rank} of {world} (exit code {code}):\n{shown[-SHOWN_CHARS:]}")
    return failed


if __name__ == "__main__":
    fetch()
