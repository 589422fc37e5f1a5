"""Runs one rank in this process."""

import os
import pickle
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import GroupConfig
from ep_moe.environment import STANDBY
from ep_moe.fields import require, shown
from ep_moe.group import DEFAULT_CONFIG, EPGroup
from ep_moe.launch.outcomes import Failure, describe

# The group aborts a hung NCCL communicator itself and names the rank; torch's watchdog would kill the process without
# naming one. After an error the watchdog sleeps for four times the last setting, and the process cannot end meanwhile.
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}

# a worker entry point: a function, or its dotted name "package.module:function", which only the ranks import
Target = Callable[..., Any] | str


def call_payload(
    target: Target, args: tuple[Any, ...], config: GroupConfig, device: torch.device | str | None
) -> bytes:
    """The arguments of `run_rank` as launchers send them to ranks: pickled. Local.

    Errors: ValueError for arguments of a launch that no rank could use, among them a target that ranks cannot import.
    """
    named = isinstance(target, str) and ":" in target
    require(callable(target) or named, f"target ({shown(target)}) is no function and no 'package.module:function'")
    require(isinstance(config, GroupConfig), f"config ({shown(config)}) is no GroupConfig")
    try:
        device is None or torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device ({shown(device)}) is no device of torch: {error}") from None
    try:
        return pickle.dumps((target, args, config, device))
    except Exception as error:  # noqa: BLE001 - whatever a foreign class raises
        raise ValueError(f"target and arguments cannot be sent to ranks, as a lambda cannot: {error}") from error


def rank_environ(
    rank: int, num_ranks: int, local_rank: int, local_num_ranks: int, *, standby: bool = False
) -> dict[str, str]:
    """The variables by which a rank of a launcher that serves the store reads its place (`LaunchEnv`). Local.

    standby: the rank joins ranks that are running already, by `EPGroup.regroup`.
    """
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_num_ranks}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, STANDBY: int(standby)}
    return {name: str(value) for name, value in place.items()}


def run_pickled(payload: bytes) -> bytes:
    """Run one rank with the arguments of `call_payload`; its result in a tuple, or its `Failure`, pickled. Collective.

    SystemExit is an outcome of this rank too.
    """
    try:
        target, args, config, device = pickle.loads(payload)
        return pickle.dumps((run_rank(target, *args, config=config, device=device),))
    except BaseException as error:  # noqa: BLE001
        return pickle.dumps(describe(error))


def read_outcome(data: bytes) -> Failure | tuple[Any]:
    """The outcome that `run_pickled` made these bytes of; a `Failure` if they cannot be unpickled. Local."""
    try:
        outcome: Failure | tuple[Any] = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - whatever unpickling a foreign class may raise
        return Failure(error_type=type(error).__name__, message=f"its result cannot be unpickled: {error}")
    return outcome


def run_rank(
    target: Target,
    *args: Any,
    config: GroupConfig = DEFAULT_CONFIG,
    device: torch.device | str | None = None,
) -> Any:
    """Run one rank in this process: make the group that the environment describes and call `target(group, *args)`.

    For ranks that torchrun, srun, Ray or the like has started; `launch` uses it for its own.

    Args:
        target: a function, or its dotted name "package.module:function".
        config, device: as in `EPGroup.from_env`.
    Returns: the result of `target`.
    Errors: those of `target`, after writing a line "rank 1: ValueError: ..." to stderr and reporting them to the other
    ranks; PeerLostError if a lost rank caused it. Collective.
    """
    for name, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    reported: BaseException | None = None
    try:
        with EPGroup.from_env(config, device) as group:
            try:
                function = pkgutil.resolve_name(target) if isinstance(target, str) else target
                return function(group, *args)
            except BaseException as error:
                reported = group.latest.explain(error) if isinstance(error, Exception) else error
                _write(group.seat, reported)  # before the others hear of it: their lines repeat it
                if reported is error:
                    raise
                raise reported from error
    except BaseException as error:
        if error is not reported:  # making or leaving the group failed
            _write(os.environ.get("RANK", "0"), error)
        raise


def _write(rank: int | str, error: BaseException) -> None:
    sys.stderr.write(f"rank {rank}: {describe(error).what()}\n")  # one write, so that ranks' lines do not mix
