"""Contract tests of the plug-ins: real releases of serving engines, on a CPU, without their compiled parts.

    python tests/engines/run.py [--only vllm-0.33.0 | --only signatures] [CASE ...]

At the end `signatures.py` compares the calls of `ep_moe.functional` with the releases whose calls they are.

Wheels and dependencies are kept in EP_MOE_ENGINE_CACHE, by default ~/.cache/ep_moe_engines. An engine that cannot be
had is named in the last lines; with EP_MOE_REQUIRE_ENGINES=1 that is a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENGINES = (("vllm", "0.26.0"), ("vllm", "0.33.0"), ("sglang", "0.5.17"), ("sglang", "0.5.23"))
COMPARED = (("flashinfer_python", "0.7.2"), ("vllm", "0.9.2"), *ENGINES[1::2])  # for `signatures.py`
COMPILED = (".so", ".hpp", ".h", ".cuh", ".cu", ".inl", ".js", ".css", ".jpg", "vllm-rs")
WORLDS = (1, 2)
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
SHOWN_CHARS = 30_000  # of the output of a rank that failed


class Unavailable(Exception):
    """An engine that cannot be had on this machine, and why."""


def cache_folder() -> Path:
    """Where wheels and dependencies are kept."""
    folder = Path(os.environ.get("EP_MOE_ENGINE_CACHE") or Path.home() / ".cache" / "ep_moe_engines")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pip(*arguments: str) -> None:
    """Run pip. Errors: Unavailable with its last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise Unavailable(lines[-1])


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
        if not wheels:
            raise Unavailable("pip downloaded no wheel")
        parts = Path(work) / "parts"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(parts, [entry for entry in wheel.namelist() if not entry.endswith(COMPILED)])
        parts.rename(folder)
    return folder


def dependencies(name: str, version: str, cache: Path) -> Path:
    """A folder with what a release imports, which only its processes see."""
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


def entry_points(folder: Path) -> None:
    """A distribution with the entry points of this tree, and a plug-in that chooses vLLM's CPU."""
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    plugins = {**plugins, "vllm.platform_plugins": {"ep_moe_tests": "vllm_twins:platform"}}
    information = folder / "ep_moe_engine_tests-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ep-moe-engine-tests\nVersion: 0\n")
    lines = [
        line
        for group, entries in plugins.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def start(
    name: str, paths: list[Path], work: Path, world: int, rank: int, options: argparse.Namespace
) -> subprocess.Popen[str]:
    """Start one rank of an engine."""
    on_gpu = {"EP_MOE_ENGINE_DEVICE": "cuda", "EP_MOE_SHARED_GPU": "1"}
    environ = {
        **os.environ,
        "PYTHONPATH": ":".join(str(path) for path in paths),
        **VARIABLES[name],
        **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else on_gpu),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "EP_MOE_ENGINE_SECS": str(max(1.0, options.timeout_secs - 20)),  # then a rank shows where it is, and ends
    }
    port = 20000 + os.getpid() % 60 * 200 + world * 100 - 100  # below those that the system gives away
    arguments = [str(world), str(rank), str(port), str(work / "checkpoints"), *options.cases]
    log = (work / f"{world}-{rank}.log").open("w")
    return subprocess.Popen(
        [sys.executable, str(HERE / f"{name}_process.py"), *arguments],
        env=environ,
        cwd=work,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(name: str, version: str, cache: Path, work: Path, options: argparse.Namespace) -> bool:
    """Run the cases of a release on 1 and 2 ranks at the same time; True if all passed."""
    paths = [unpacked(name, version, cache), dependencies(name, version, cache), work / "entries", ROOT, HERE]
    ranks = [(world, rank) for world in WORLDS for rank in range(world)]
    running = {(world, rank): start(name, paths, work, world, rank, options) for world, rank in ranks}
    deadline, passed = time.monotonic() + options.timeout_secs, True
    for (world, rank), process in running.items():
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        text = (work / f"{world}-{rank}.log").read_text()
        lines = [line for line in text.splitlines() if line.startswith("rank ")]
        print("\n".join(f"{name} {version}, {line}" for line in (lines if options.verbose else lines[-1:])))
        if code != 0 or "all cases passed" not in text:
            passed = False
            shown = "\n".join(line for line in text.splitlines() if "Loading" not in line and "WARNING" not in line)
            print(f"{name} {version}, rank {rank} of {world} FAILED (exit code {code}):\n{shown[-SHOWN_CHARS:]}")
    return passed


def main() -> int:
    """Run the engines; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one engine, such as vllm-0.33.0, or signatures")
    on_gpu = "cuda: vLLM's models on one GPU, which its ranks share; its platform and the twins stay those of a CPU"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=on_gpu)
    parser.add_argument("--timeout-secs", type=float, default=300, help="for the cases of a release")
    parser.add_argument("--verbose", action="store_true", help="show the line of each case, with its largest error")
    parser.add_argument("cases", nargs="*", help="cases to run; all by default")
    options = parser.parse_args()
    cache = cache_folder()
    missing, failed, compares = [], [], options.only in (None, "signatures") and not options.cases
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as downloads:  # while engines run
        others = [downloads.submit(unpacked, *release, cache) for release in COMPARED[:2] if compares]
        work = Path(folder)
        entry_points(work / "entries")
        paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(HERE / "checkpoints.py"), str(work / "checkpoints")]
        subprocess.run(command, env=paths, check=True, stderr=subprocess.DEVNULL)
        for name, version in ENGINES:
            if options.only not in (None, f"{name}-{version}"):
                continue
            if options.device == "cuda" and name == "sglang":
                missing.append(f"engine NOT tested: {name} {version}, on a GPU it calls compiled kernels of its own")
                continue
            began = time.monotonic()
            try:
                if not run(name, version, cache, work, options):
                    failed.append(f"{name} {version}")
                print(f"{name} {version}: {time.monotonic() - began:.0f} s", flush=True)
            except (Unavailable, subprocess.TimeoutExpired, OSError) as error:
                missing.append(f"engine NOT tested: {name} {version}, {error}")
        if compares:
            try:
                for download in others:
                    download.result()
                for release in COMPARED:
                    unpacked(*release, cache)
                command = [sys.executable, str(HERE / "signatures.py"), str(cache)]
                if subprocess.run(command, env=paths, check=False).returncode:
                    failed.append("signatures")
            except (Unavailable, subprocess.TimeoutExpired, OSError) as error:
                missing.append(f"engine NOT tested: signatures, {error}")
    for line in failed:
        print(f"engine FAILED: {line}")
    for line in missing:
        print(line)
    return int(bool(failed) or (bool(missing) and os.environ.get("EP_MOE_REQUIRE_ENGINES") == "1"))


if __name__ == "__main__":
    sys.exit(main())
