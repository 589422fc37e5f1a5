"""Runs one rank in this process."""

import os
import pickle
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import GroupConfig
from ep_moe.fields import require, shown
from ep_moe.group import DEFAULT_CONFIG, EPGroup
from ep_moe.launch.outcomes import describe

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
    said: BaseException | None = None
    try:
        with EPGroup.from_env(config, device) as group:
            try:
                function = pkgutil.resolve_name(target) if isinstance(target, str) else target
                return function(group, *args)
            except BaseException as error:
                said = group.explain(error) if isinstance(error, Exception) else error
                _write(group.rank, said)  # before the others hear of it: their lines repeat it
                if said is error:
                    raise
                raise said from error
    except BaseException as error:
        if error is not said:  # making or leaving the group failed
            _write(os.environ.get("RANK", "0"), error)
        raise


def _write(rank: int | str, error: BaseException) -> None:
    sys.stderr.write(f"rank {rank}: {describe(error).what()}\n")  # one write, so that ranks' lines do not mix
