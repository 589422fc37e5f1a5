"""`ep-moe doctor`: what this machine can do, a line for each part of it, with a verdict and what mends it."""

import dataclasses
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

from ep_moe.environment import cache_folders, tiles_dir
from ep_moe.fields import Field, check_fields

OK, NOTE, WARNING, FAILED = "ok", "note", "warning", "failed"
EXPECTED = Path(__file__).with_name("expected.json")  # `ep-moe bench expected` makes it from docs/benchmarks
SLOW = 1.25  # times the expected time, from which a measured one is slow
LEAST_SHM, LEAST_CACHE, LEAST_FILES = 2**30, 2**30, 4096  # bytes, bytes, open files
_TESTED = {"torch": "<2.16", "triton": "<3.10"}  # below which releases are tested; pyproject.toml has the oldest
_EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "matplotlib": "bench", "ray": "ray"}
_PARTS = ("software", "system", "gpus", "others", "speed", "server")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What `ep-moe doctor` looks at."""

    only: Annotated[tuple[str, ...], Field(help="Parts (repeatable)", choices=_PARTS)] = _PARTS[:-1]
    server: Annotated[str, Field(help="Address of a server, of which part server asks how it is")] = (
        "http://127.0.0.1:8000"
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the report.

    Args:
        verdict: OK; NOTE for what may be missing, or is newer than what is tested; WARNING for what makes something
            slow or fail later; FAILED.
        mend: what to do, "" if nothing.
    """

    part: str
    name: str
    verdict: str
    found: str
    mend: str = ""


def diagnose(config: DoctorConfig) -> dict[str, Any]:
    """Look at the machine. Returns: `ok`, False if a finding is FAILED; `findings`; `secs`. Local."""
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "software": _software,
        "system": _system,
        "gpus": _gpus,
        "others": _others,
        "speed": _speed,
        "server": lambda: _server(config.server),
    }
    start, findings = time.monotonic(), []
    for part in config.only:
        findings += [dataclasses.asdict(finding) for finding in looks[part]()]
    ok = all(finding["verdict"] != FAILED for finding in findings)
    return {"ok": ok, "findings": findings, "secs": round(time.monotonic() - start, 2)}


def _software() -> Iterator[Finding]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    def line(name: str, verdict: str, found: str, mend: str = "") -> Finding:
        return Finding(part="software", name=name, verdict=verdict, found=found, mend=mend)

    yield line("python", OK, f"{platform.python_version()}, {sys.executable}")
    try:
        needed = [Requirement(text) for text in metadata.requires("ep-moe") or ()]
        yield line("ep-moe", OK, f"{metadata.version('ep-moe')}, {Path(__file__).parents[1]}")
    except metadata.PackageNotFoundError:
        needed = []
        yield line("ep-moe", WARNING, f"{Path(__file__).parents[1]} is not installed", "pip install .")
    for each in needed:
        releases = each.specifier & SpecifierSet(_TESTED.get(each.name, ""))
        tested = ",".join(sorted(map(str, releases), reverse=True))
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        version, mend = _version_of(each.name), f"pip install '{each.name}{tested}'"
        if version is None:
            yield line(each.name, FAILED, "missing", mend)
        elif not each.specifier.contains(version, prereleases=True):
            yield line(each.name, WARNING, f"{version} is not tested, {tested} is", mend)
        elif not releases.contains(version, prereleases=True):
            yield line(each.name, NOTE, f"{version} is newer than what is tested, {tested}", f"if it fails: {mend}")
        else:
            yield line(each.name, OK, f"{version}{f', tested are {tested}' if tested else ''}")
    for name, extra in _EXTRAS.items():
        version = _version_of(name)
        mend = "" if version else f"for this part: pip install 'ep-moe[{extra}]'"
        yield line(name, OK if version else NOTE, version or f"missing, of the extra {extra}", mend)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [name for name, found in (("a C compiler", compiler), (str(header), header.is_file())) if not found]
    found = f"{compiler}, {header}" if not missing else f"missing: {', '.join(missing)}"
    mend = "on GPUs Triton makes its launchers with them: apt-get install gcc libc6-dev python3-dev"
    yield line("compiler", _if_gpus(WARNING) if missing else OK, found, mend if missing else "")


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _if_gpus(verdict: str) -> str:
    """The verdict on a machine with GPUs, else NOTE."""
    import torch

    return verdict if torch.cuda.device_count() else NOTE


def _system() -> Iterator[Finding]:
    def line(name: str, bad: bool, found: str, mend: str, verdict: str = WARNING) -> Finding:
        return Finding(part="system", name=name, verdict=verdict if bad else OK, found=found, mend=mend if bad else "")

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield line("cores", False, f"{cores}, {platform.system()} {platform.machine()}", "")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        mend = "NCCL and gloo exchange there; in a container: docker run --ipc=host, or --shm-size=8g"
        yield line("shared memory", free < LEAST_SHM, f"{_size(free)} free in {shared}", mend)
    else:
        yield line("shared memory", False, f"{shared} is absent, {platform.system()} has other ways", "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mend = f"a server takes a connection for each two files: ulimit -n {max(LEAST_FILES, 65536)}"
    yield line("open files", 0 <= soft < LEAST_FILES, f"{_limit(soft)}, at most {_limit(hard)}", mend)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    mend = "RDMA between nodes pins memory: ulimit -l unlimited, or docker run --ulimit memlock=-1"
    yield line("locked memory", not unlimited, _limit(locked, _size), mend, NOTE)
    for name, folder in cache_folders().items():
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free
        wrong = "cannot be written" if not _writable(place) else f"{_size(free)} free" if free < LEAST_CACHE else ""
        mend = f"set {name} to a folder with room"
        yield line(f"cache {name}", bool(wrong), f"{folder}: {wrong or f'{_size(free)} free'}", mend)


def _writable(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _limit(count: int, show: Callable[[int], str] = str) -> str:
    return "unlimited" if count == resource.RLIM_INFINITY else show(count)


def _gpus() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from ep_moe.quant import KERNEL_CAPABILITY

    def line(name: str, verdict: str, found: str, mend: str = "") -> Finding:
        return Finding(part="gpus", name=name, verdict=verdict, found=found, mend=mend)

    count, hip = torch.cuda.device_count(), torch.version.hip
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    mend = "" if "gloo" in backends else "install a build of torch that has gloo"
    yield line("backends", FAILED if mend else OK, ", ".join(backends), mend)
    if not count:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else ""
        driver = shutil.which("nvidia-smi")
        mend = "every command runs on the CPU; "
        if not built:
            mend += "for GPUs install a CUDA build of torch"
        else:
            mend += "check nvidia-smi and CUDA_VISIBLE_DEVICES" if driver else "for GPUs install NVIDIA's driver"
        yield line("GPUs", NOTE, f"none visible to torch, built for {built or 'CPUs'}", mend)
        yield from _tiles(line, "")
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        kind = properties.gcnArchName if hip else f"{capability[0]}.{capability[1]}"
        found = f"{properties.name} {kind}, {_size(free)} of {_size(total)} free"
        mend = "" if capability >= KERNEL_CAPABILITY else "the kernels are compiled for 8.0 and later: --experts torch"
        mend = mend or ("" if free > total / 2 else "another process uses it: nvidia-smi")
        yield line(f"GPU {index}", WARNING if mend else OK, found, mend)
        if capability >= KERNEL_CAPABILITY and util.find_spec("triton") is not None:
            yield _kernels(line, index)
    yield line("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        links = _links()
        mend = "transport peer needs it; else `collective` exchanges. In a container share all GPUs; see IOMMU, ACS"
        found = f"all pairs{f', by {links}' if links else ''}" if not apart else f"not between {apart[0]}"
        yield line("peer access", WARNING if apart else OK, found, mend if apart else "")
    yield from _tiles(line, torch.cuda.get_device_name(0))


def _kernels(line: Callable[..., Finding], index: int) -> Finding:
    """What the kernels find on a GPU, and whether they have ever run on its kind."""
    import torch

    from ep_moe.experts.hopper.shapes import CAPABILITY
    from ep_moe.kernels.device import Device

    device = Device.of(torch.device("cuda", index))
    found = f"tiles for {device.shared_bytes // 1024} KiB of shared memory"
    found += f", without {', '.join(device.lacking)}" if device.lacking else ""
    ran = device.capability == CAPABILITY and not device.hip
    mend = "" if ran else "compiled, never run: compare with --experts torch, then ep-moe tune"
    mend += "; transports gathered and collective alone" if device.hip else ""
    return line(f"kernels on GPU {index}", OK if ran else NOTE, found, mend)


def _links() -> str:
    """The kinds of links in `nvidia-smi topo -m`, such as NV18."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    rows = [row.split() for row in done.stdout.splitlines() if row.startswith("GPU")]
    kinds = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
    return ", ".join(sorted({word for row in rows for word in row[1:] if word.startswith(kinds)}))


def _tiles(line: Callable[..., Finding], gpu: str) -> Iterator[Finding]:
    from ep_moe.config import config_dir

    shipped, own = config_dir() / "tuned", tiles_dir()
    if not gpu:
        kinds = ", ".join(sorted(path.name.replace("_", " ") for path in shipped.iterdir()))
        yield line("tile tables", OK, f"shipped for {kinds}; others and shapes without one take defaults")
        return
    word = gpu.replace(" ", "_")
    found = [len(list(folder.rglob(f"*device_name={word},*.json"))) for folder in (shipped, own) if folder is not None]
    own_text = f"{found[1]} in {own}" if own is not None else "none of your own"
    mend = "" if sum(found) else "shapes run with default tiles: ep-moe tune --preset ..."
    yield line("tile tables", OK if sum(found) else NOTE, f"{found[0]} shipped for {gpu}, {own_text}", mend)


def _others() -> Iterator[Finding]:
    """Libraries and engines that ep_moe works with, none of which it needs."""
    from ep_moe.engines.sglang.hooks import NEEDS as SGLANG
    from ep_moe.engines.vllm.hooks import NEEDS as VLLM

    cuda = "cu13" if _version_of("nvidia-cuda-runtime") else "cu12"
    known: dict[str, tuple[str, tuple[str, ...], str]] = {
        "NVSHMEM": ("nvshmem", (), f"for --transport nvshmem: pip install 'ep-moe[nvshmem-{cuda}]'"),
        "DeepEP": ("deep_ep", (), "for --transport deepep: see docs/exchange.md"),
        "Ray": ("ray", (), "for --ray: pip install 'ep-moe[ray]'"),
        "vLLM": ("vllm", VLLM.tested, "for the plug-in: see docs/engines/vllm.md"),
        "SGLang": ("sglang", SGLANG.tested, "for the plug-in: see docs/engines/sglang.md"),
    }
    packages = {"nvshmem": f"nvshmem4py-{cuda}"}
    for name, (module, tested, mend) in known.items():
        if util.find_spec(module) is None:
            yield Finding(part="others", name=name, verdict=NOTE, found="not installed", mend=mend)
            continue
        version = _version_of(packages.get(module, module)) or "of an unknown version"
        strange = bool(tested) and version not in tested
        yield Finding(
            part="others",
            name=name,
            verdict=WARNING if strange else OK,
            found=f"{version}{f', tested are {chr(44).join(tested)}' if tested else ''}",
            mend=f"pip install '{module}=={tested[-1]}', or watch for warnings of ep_moe in its log" if strange else "",
        )


def _speed() -> Iterator[Finding]:
    """On GPUs an exchange and the experts' GEMMs, a few seconds each, beside what this kind of GPU has shown."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        mend = "times are measured on GPUs only"
        yield Finding(part="speed", name="exchange and GEMMs", verdict=NOTE, found="not timed on a CPU", mend=mend)
        return
    from ep_moe.app.start import on_ranks
    from ep_moe.bench.configs import ExpertsBenchConfig, TransportBenchConfig
    from ep_moe.config import EngineConfig

    gpu = torch.cuda.get_device_name(0)
    engine = EngineConfig(device="cuda", dtype="bfloat16", scheme="none", timeout_secs=120.0, log_level="error")
    num_ranks = 4 if count >= 4 else 2 if count >= 2 else 0
    jobs: list[tuple[str, str, EngineConfig, Any, str, int, str]] = []
    if num_ranks:
        exchange = TransportBenchConfig(tokens=(128,), repeats=10)
        ranks = dataclasses.replace(engine, nproc=num_ranks)
        slow = "check the links (nvidia-smi nvlink -s, nvidia-smi topo -m), clocks, and other work on these GPUs"
        target = "ep_moe.bench.transport:transport_rank_main"
        jobs.append(("exchange", target, ranks, exchange, "sum_us", num_ranks, slow))
    experts = ExpertsBenchConfig(rows=(64,), repeats=10, sample_experts=2)
    one = dataclasses.replace(engine, nproc=1, scheme="fp8_block")
    slow = "check clocks and power (nvidia-smi -q -d CLOCK,POWER), other work on this GPU, and the tile tables above"
    jobs.append(("GEMMs", "ep_moe.bench.experts_alone:experts_rank_main", one, experts, "call_us", 1, slow))
    for name, target, ranks, config, figure, size, slow in jobs:
        try:
            report = on_ranks(target, ranks, config)
        except (RuntimeError, OSError, ValueError) as error:
            mend = "run ep-moe bench transport or ep-moe bench experts for the whole error"
            yield Finding(part="speed", name=name, verdict=FAILED, found=str(error), mend=mend)
            continue
        if not report["ok"]:
            found = "; ".join(text for row in report["rows"] for text in row["broken"])
            yield Finding(part="speed", name=name, verdict=FAILED, found=found, mend="report it: a result is wrong")
            continue
        yield judged(name, gpu, size, report["rows"][0]["figures"][figure], slow)


def judged(name: str, gpu: str, num_ranks: int, measured_us: float, mend: str) -> Finding:
    """The finding of a measured time beside the expected one of this kind of GPU. Local."""
    expected = json.loads(EXPECTED.read_text())[name]
    found = f"{measured_us:.1f} us on {num_ranks} {gpu} for {expected['of']}"
    known = expected["figures"].get(f"{num_ranks} {gpu}")
    if known is None:
        mend = f"nothing to compare with: figures are of {', '.join(expected['figures'])}"
        return Finding(part="speed", name=name, verdict=NOTE, found=found, mend=mend)
    found += f"; {known['us']:.1f} us at commit {known['commit']}"
    slow = measured_us > SLOW * known["us"]
    return Finding(part="speed", name=name, verdict=WARNING if slow else OK, found=found, mend=mend if slow else "")


def _server(address: str) -> Iterator[Finding]:
    url = f"{address.rstrip('/')}/health"
    mend = "look at its log; ep-moe serve starts one"
    try:
        with urllib.request.urlopen(url, timeout=4) as answer:
            found, verdict = json.dumps(json.load(answer)), OK
    except urllib.error.HTTPError as error:
        found, verdict = f"{error.code} {error.read(500).decode(errors='replace')}", FAILED
    except (OSError, ValueError) as error:
        found, verdict = str(error), FAILED
    yield Finding(part="server", name=url, verdict=verdict, found=found, mend="" if verdict == OK else mend)
