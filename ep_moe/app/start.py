"""Steps of `run`, `generate`, `eval` and `serve` before ranks start: check the model, pick a device, start the ranks.

This module imports torch in its functions only, since wrong arguments and `--help` need none, and never transformers:
the server that forks the ranks imports it, once.
"""

import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_moe import logs
from ep_moe.app.interrupts import raise_on_interrupt
from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv

if TYPE_CHECKING:
    from ep_moe.group import EPGroup
    from ep_moe.launch import Front, Target
    from ep_moe.launch.ray_cluster import NodeRanks
    from ep_moe.weights import Checkpoint

SHIPPED_MODEL = Path(__file__).parent / "model"
SHIPPED_TEXT = Path(__file__).parent / "heldout.txt"  # the first 64 KiB of the text that its training did not see
CPU_RANKS = 4  # by default
# modules of the worker entry points, which import transformers
PRELOAD = ("ep_moe.app.run_rank", "ep_moe.app.generate_rank", "ep_moe.app.eval_rank", "ep_moe.app.serve_rank")


def model_dir(engine: EngineConfig) -> Path:
    """The directory of the model; the shipped one if the config names none."""
    return Path(engine.model) if engine.model else SHIPPED_MODEL


def open_model(engine: EngineConfig) -> "Checkpoint":
    """Read the headers of the model's directory before ranks start, so that its errors come at once.

    Errors: ValueError as of `Checkpoint.open`. Local.
    """
    from ep_moe.weights import Checkpoint

    return Checkpoint.open(model_dir(engine))


def num_local_ranks(engine: EngineConfig) -> int:
    """The number of ranks of this machine, or of each node of a Ray cluster.

    It is that of the launcher; else `nproc`; else one for each GPU that is visible here, 4 on a CPU and with `ray`.
    """
    env = LaunchEnv.from_environ()
    if env is not None:
        return env.local_world_size
    if engine.nproc is not None:
        return engine.nproc
    return CPU_RANKS if engine.device == "cpu" or engine.ray else _num_gpus() or CPU_RANKS


def pick_device(engine: EngineConfig) -> str:
    """Return "cuda" or "cpu" for the ranks of this machine.

    Errors: RuntimeError if CUDA is requested and this machine has fewer GPUs than ranks.
    """
    if engine.device == "cpu":
        return "cpu"
    from ep_moe.group.joining import num_gpu_ranks

    num_ranks, num_gpus = num_local_ranks(engine), num_gpu_ranks()
    if num_gpus >= num_ranks:
        return "cuda"
    if engine.device == "cuda":
        raise RuntimeError(f"device cuda needs a GPU for each of {num_ranks} ranks, this machine has {num_gpus}")
    return "cpu"


def on_ranks(target: "Target", engine: EngineConfig, *args: Any, front: "Front | None" = None) -> dict[str, Any]:
    """Run `target(group, engine, *args)` on every rank and return rank 0's report.

    Starts `num_local_ranks` ranks on this machine, or on each of `engine.nodes` nodes of a Ray cluster; under torchrun
    this process is a rank and returns its own report, which is the same on all ranks. A line on standard error warns if
    GPUs of this machine are left unused, unless the device is "cpu".

    Args:
        front: as in `launch`; None under torchrun.
    """
    env = LaunchEnv.from_environ()
    if engine.ray:
        if env is not None:
            raise ValueError(f"ray ({engine.ray!r}) starts ranks, and this process is one already: RANK is set")
        from ep_moe.launch.on_ray import launch_on_ray

        raise_on_interrupt()
        nodes = nodes_of(engine)
        return launch_on_ray(logging_rank, target, engine, *args, nodes=nodes, config=engine.group, front=front)[0]
    from ep_moe.launch import launch, run_rank

    device, num_ranks = pick_device(engine), num_local_ranks(engine)
    if engine.device != "cpu" and speaks():
        _warn_of_unused_gpus(num_ranks if device == "cuda" else 0, num_ranks)
    raise_on_interrupt()
    if env is not None:
        try:
            return run_rank(logging_rank, target, engine, *args, config=engine.group, device=device)
        except (OSError, RuntimeError, ValueError):
            raise SystemExit(1) from None  # it has written this rank's line
    preload = PRELOAD if device == "cpu" else ()  # an import may initialize CUDA, which does not survive a fork
    options: dict[str, Any] = {"num_ranks": num_ranks, "config": engine.group, "device": device, "preload": preload}
    return launch(logging_rank, target, engine, *args, **options, front=front)[0]


def _warn_of_unused_gpus(used: int, num_ranks: int) -> None:
    found = _num_gpus()
    if used < found:
        why = f"nproc {num_ranks}" if used else f"{num_ranks} ranks compute on the CPU, as each would need its own"
        sys.stderr.write(f"warning: {found - used} of {found} GPUs are not used: {why}\n")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()  # by NVML: CUDA, which a fork does not survive, is not initialized


def nodes_of(engine: EngineConfig) -> "NodeRanks":
    """The nodes of a job on a Ray cluster."""
    from ep_moe.launch.ray_cluster import NodeRanks

    gpus = None if engine.device == "auto" else engine.device == "cuda"
    ranks = num_local_ranks(engine)
    return NodeRanks(address=engine.ray, num_nodes=engine.nodes, ranks_per_node=ranks, gpus=gpus)


def start_logs(level: str) -> None:
    """Write log lines of this process, which starts ranks or is one of a launcher. Local."""
    env = LaunchEnv.from_environ()
    logs.configure(level, "main" if env is None else f"rank {env.rank}")


def logging_rank(group: "EPGroup", target: "Target", engine: EngineConfig, *args: Any) -> Any:
    """A rank's part of a job, with its log lines. Collective."""
    logs.configure(engine.log_level, f"rank {group.seat}")
    function = pkgutil.resolve_name(target) if isinstance(target, str) else target
    return function(group, engine, *args)


def is_first_rank() -> bool:
    """True in the one process that prints results: not under torchrun, or rank 0 of it."""
    env = LaunchEnv.from_environ()
    return env is None or env.rank == 0


def speaks() -> bool:
    """True in the one process of each machine that reports wrong arguments, which all of its ranks have."""
    try:
        env = LaunchEnv.from_environ()
    except ValueError:  # which may be what there is to report
        return True
    return env is None or env.local_rank == 0
