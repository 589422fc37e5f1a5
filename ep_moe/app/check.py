"""The check of a model before ranks start, while the server that forks them starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from ep_moe.app.start import PRELOAD, num_local_ranks, open_model
from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv

if TYPE_CHECKING:
    from ep_moe.weights import Checkpoint

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, Windows Subsystem for Linux


def check_model(engine: EngineConfig) -> "Checkpoint":
    """Read the headers of the model's directory, and its placements, before ranks start.

    This process imports torch for it. The server that forks ranks, if they compute on CPUs, starts first and imports
    beside this process.

    Errors: ValueError as of `Checkpoint.open` and `placements_for`. Local.
    """
    no_gpu = engine.device == "auto" and not any(Path(each).exists() for each in GPU_DRIVERS)
    if (engine.device == "cpu" or no_gpu) and not engine.ray and LaunchEnv.from_environ() is None:
        from ep_moe.launch import start_server

        start_server(PRELOAD)
    from ep_moe.app.placements import placements_for

    checkpoint, env = open_model(engine), LaunchEnv.from_environ()
    num_nodes = engine.nodes if engine.ray else 1
    placements_for(engine, num_local_ranks(engine) * num_nodes if env is None else env.world_size)
    return checkpoint
