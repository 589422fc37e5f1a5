"""What environment variables say: launchers' ranks, users' folders, keys, the switches of plug-ins, NVSHMEM's limits.

No other module reads the environment, but for `launch`, which writes that of its ranks.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from ep_moe.config import Layout
from ep_moe.fields import check_fields, require

SGLANG_BACKEND = "ep_moe"  # of SGLang's --moe-runner-backend


def server_key() -> str:
    """The key that clients of our server need, "" if the environment has none."""
    return os.environ.get("EP_MOE_API_KEY", "")


def admin_key() -> str:
    """The key of our server's administrators, "" if the environment has none."""
    return os.environ.get("EP_MOE_ADMIN_KEY", "")


def client_key() -> str:
    """The key that our clients bring to a server, "" if the environment has none."""
    return server_key() or os.environ.get("OPENAI_API_KEY", "")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NvshmemEnv:
    """The limit that NVSHMEM's own environment variables set to its symmetric heap (as in NVSHMEM 3.4.5).

    Args:
        variable: that sets the limit. heap_bytes: the most bytes of the heap on this rank.
    """

    variable: str
    heap_bytes: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "NvshmemEnv":
        """Read them. Errors: ValueError names a variable that is no size, such as 1073741824, 512M or 1.5G."""
        fixed = environ.get("NVSHMEM_DISABLE_CUDA_VMM", "0").strip().lower() in ("1", "true", "yes", "y", "on")
        variable = "NVSHMEM_SYMMETRIC_SIZE" if fixed else "NVSHMEM_MAX_MEMORY_PER_GPU"
        text = environ.get(variable, "1G" if fixed else "128G").strip()
        unit = {"K": 10, "M": 20, "G": 30, "T": 40}
        number, shift = (text[:-1], unit[text[-1].upper()]) if text[-1:].upper() in unit else (text, 0)
        try:
            return cls(variable=variable, heap_bytes=int(float(number) * 2**shift))
        except (ValueError, OverflowError):
            raise ValueError(f"environment variable {variable} ({text!r}) is not a number of bytes") from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnv:
    """This process' rank and rendezvous, as torchrun and similar launchers set them in the environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    store_is_hosted: bool  # True if the launcher itself serves the store, so that it outlives every rank
    restart_count: int = 0  # restarts share one store: keys written before this restart must not be read again
    standby: bool = False  # the ranks are running already: this one joins them later (`EPGroup.regroup`)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "LaunchEnv | None":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and torchrun's own variables.

        Returns: None if no launcher has set RANK or another of its variables.
        Errors: ValueError names the variable that is missing, not a number or out of range.
        """
        if "RANK" not in environ:
            for name in ("WORLD_SIZE", "LOCAL_RANK"):
                require(name not in environ, f"environment variable RANK is not set, although {name} is")
            tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
            require(
                tasks == "1",
                f"environment variable RANK is not set, although srun started {tasks} tasks: use launch/slurm.sbatch",
            )
            return None

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name)
            if text is None and default is not None:
                return default
            try:
                return int(text or "")
            except ValueError:
                raise ValueError(
                    f"environment variable {name} ({text!r}) is not a number, although RANK is set"
                ) from None

        world_size = number("WORLD_SIZE")
        rank = number("RANK")
        require(0 <= rank < world_size, f"RANK ({rank}) is not in [0, WORLD_SIZE ({world_size}))")
        local_world_size = number("LOCAL_WORLD_SIZE", world_size)
        require(
            1 <= local_world_size <= world_size,
            f"LOCAL_WORLD_SIZE ({local_world_size}) is not in [1, WORLD_SIZE ({world_size})]",
        )
        local_rank = number("LOCAL_RANK", rank % local_world_size)
        require(
            0 <= local_rank < local_world_size,
            f"LOCAL_RANK ({local_rank}) is not in [0, LOCAL_WORLD_SIZE ({local_world_size}))",
        )
        restart_count = number("TORCHELASTIC_RESTART_COUNT", 0)
        require(restart_count >= 0, f"TORCHELASTIC_RESTART_COUNT ({restart_count}) must not be negative")
        require(
            "MASTER_ADDR" in environ or local_world_size == world_size,
            f"environment variable MASTER_ADDR is not set, although LOCAL_WORLD_SIZE ({local_world_size}) is below "
            f"WORLD_SIZE ({world_size}): ranks are on several nodes",
        )
        master_port = number("MASTER_PORT")
        require(0 <= master_port <= 65535, f"MASTER_PORT ({master_port}) is not in [0, 65535]")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=master_port,
            store_is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=restart_count,
            standby=_switch(STANDBY, environ),
        )


SECRET = "EP_MOE_LAUNCH_SECRET"
STANDBY = "EP_MOE_STANDBY"


def launch_secret(environ: Mapping[str, str] = os.environ) -> str:
    """The secret that only the ranks of a launch share: EP_MOE_LAUNCH_SECRET, "" if it is not set."""
    return environ.get(SECRET, "")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PluginConfig:
    """Options of the plug-ins of serving engines, as the environment sets them.

    Args:
        vllm, sglang: EP_MOE_VLLM=1 and EP_MOE_SGLANG=1, the engine runs its MoE layers here.
        strict: EP_MOE_STRICT=1, a layer that cannot run here is an error instead of a warning.
        layout: EP_MOE_LAYOUT, of the expert batch; None ("auto") chooses by the step's tokens.
        transport, experts: EP_MOE_TRANSPORT and EP_MOE_EXPERTS, implementations by name.
        timeout_secs: EP_MOE_TIMEOUT_SECS, how long a rank waits for another before naming it lost.
    """

    vllm: bool = False
    sglang: bool = False
    strict: bool = False
    layout: Layout | None = None
    transport: str = "auto"
    experts: str = "auto"
    timeout_secs: float = 60.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "PluginConfig":
        """Read the variables. Errors: ValueError names the variable and its valid values."""
        layout, timeout = environ.get("EP_MOE_LAYOUT", "auto"), environ.get("EP_MOE_TIMEOUT_SECS", "60")
        layouts = [member.value for member in Layout]
        require(
            layout in ("auto", *layouts),
            f"environment variable EP_MOE_LAYOUT ({layout!r}) is not one of auto, {', '.join(layouts)}",
        )
        try:
            secs = float(timeout)
        except ValueError:
            raise ValueError(f"environment variable EP_MOE_TIMEOUT_SECS ({timeout!r}) is not a number") from None
        return cls(
            vllm=_switch("EP_MOE_VLLM", environ),
            sglang=_switch("EP_MOE_SGLANG", environ),
            strict=_switch("EP_MOE_STRICT", environ),
            layout=None if layout == "auto" else Layout(layout),
            transport=environ.get("EP_MOE_TRANSPORT", "auto"),
            experts=environ.get("EP_MOE_EXPERTS", "auto"),
            timeout_secs=secs,
        )


def shares_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks may share a GPU, by EP_MOE_SHARED_GPU=1: slow, to run several ranks' tests on one GPU.

    Errors: ValueError if it is not 0 or 1.
    """
    return _switch("EP_MOE_SHARED_GPU", environ)


def _switch(variable: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(variable, "")
    require(text in ("", "0", "1"), f"environment variable {variable} ({text!r}) is not 0 or 1")
    return text == "1"


def switch_on(name: str) -> None:
    """Set an environment variable that is a switch, for this process and those that it starts. Local."""
    os.environ[name] = "1"


def default_tiles_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a user's tables of tile sizes: EP_MOE_TILES_DIR, else ep_moe/tiles in XDG_CONFIG_HOME, ~/.config.

    It may be absent.
    """
    if named := environ.get("EP_MOE_TILES_DIR"):
        return Path(named)
    return Path(environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "ep_moe" / "tiles"


def tiles_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The `default_tiles_dir` if it exists, else None.

    Errors: ValueError if EP_MOE_TILES_DIR names no directory.
    """
    named, default = _folder("EP_MOE_TILES_DIR", environ), default_tiles_dir(environ)
    return named or (default if default.is_dir() else None)


def cache_folders(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The folders that fill up while models and kernels are used, by the variable that moves them. They may be absent.

    Triton's compiled kernels, and models of Hugging Face's hub.
    """
    home = Path(os.path.expanduser("~"))
    defaults = {"TRITON_CACHE_DIR": home / ".triton" / "cache", "HF_HOME": home / ".cache" / "huggingface"}
    return {name: Path(environ.get(name) or default) for name, default in defaults.items()}


def sglang_configs_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of tile sizes in SGLang's files: SGLANG_MOE_CONFIG_DIR, None if it is not set.

    Errors: ValueError if it names no directory.
    """
    return _folder("SGLANG_MOE_CONFIG_DIR", environ)


def _folder(variable: str, environ: Mapping[str, str]) -> Path | None:
    text = environ.get(variable, "")
    require(not text or Path(text).is_dir(), f"environment variable {variable} ({text!r}) is not a directory")
    return Path(text) if text else None
