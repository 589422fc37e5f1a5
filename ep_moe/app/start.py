"""Steps of `run`, `generate`, `eval` and `serve` before ranks start: check the model, pick a device, start the ranks.

This module does not import transformers, which takes seconds: the server that forks the ranks imports it, once.
"""

from pathlib import Path
from typing import Any

from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import Target, launch, run_rank
from ep_moe.launch.on_ray import launch_on_ray
from ep_moe.launch.ray_cluster import NodeRanks
from ep_moe.weights import Checkpoint

SHIPPED_MODEL = Path(__file__).parent / "model"
# modules of the worker entry points, which import transformers
PRELOAD = ("ep_moe.app.run_rank", "ep_moe.app.generate_rank", "ep_moe.app.eval_rank", "ep_moe.app.serve_rank")


def model_dir(engine: EngineConfig) -> Path:
    """The directory of the model; the shipped one if the config names none."""
    return Path(engine.model) if engine.model else SHIPPED_MODEL


def open_model(engine: EngineConfig) -> Checkpoint:
    """Read the headers of the model's directory before ranks start, so that its errors come at once.

    Errors: ValueError as of `Checkpoint.open`. Local.
    """
    return Checkpoint.open(model_dir(engine))


def pick_device(engine: EngineConfig, num_local_ranks: int) -> str:
    """Return "cuda" or "cpu" for the ranks of this machine.

    Errors: RuntimeError if CUDA is requested and this machine has fewer GPUs than ranks.
    """
    num_gpus = num_gpu_ranks()
    if engine.device == "auto":
        return "cuda" if num_gpus >= num_local_ranks else "cpu"
    if engine.device == "cuda" and num_gpus < num_local_ranks:
        raise RuntimeError(f"device cuda needs a GPU for each of {num_local_ranks} ranks, this machine has {num_gpus}")
    return engine.device


def on_ranks(target: Target, engine: EngineConfig, *args: Any) -> dict[str, Any]:
    """Run `target(group, engine, *args)` on every rank and return rank 0's report.

    Starts `engine.nproc` ranks on this machine, or on each of `engine.nodes` nodes of a Ray cluster; under torchrun
    this process is a rank and returns its own report, which is the same on all ranks.
    """
    env = LaunchEnv.from_environ()
    if engine.ray:
        if env is not None:
            raise ValueError(f"ray ({engine.ray!r}) starts ranks, and this process is one already: RANK is set")
        return launch_on_ray(target, engine, *args, nodes=nodes_of(engine), config=engine.group)[0]
    if env is None:
        device = pick_device(engine, engine.nproc)
        preload = PRELOAD if device == "cpu" else ()  # an import may initialize CUDA, which does not survive a fork
        return launch(
            target, engine, *args, num_ranks=engine.nproc, config=engine.group, device=device, preload=preload
        )[0]
    device = pick_device(engine, env.local_world_size)
    return run_rank(target, engine, *args, config=engine.group, device=device)


def nodes_of(engine: EngineConfig) -> NodeRanks:
    """The nodes of a job on a Ray cluster."""
    gpus = None if engine.device == "auto" else engine.device == "cuda"
    return NodeRanks(address=engine.ray, num_nodes=engine.nodes, ranks_per_node=engine.nproc, gpus=gpus)


def is_first_rank() -> bool:
    """True in the one process that prints: not under torchrun, or rank 0 of it."""
    env = LaunchEnv.from_environ()
    return env is None or env.rank == 0
