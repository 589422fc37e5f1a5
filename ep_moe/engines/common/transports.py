"""Transports that layers share, whose buffers so do not grow with the number of layers. Letters: K top-k, E experts."""

import atexit
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport


def with_topk(config: TransportConfig, num_topk: int | None) -> TransportConfig:
    """The config with `max_topk` raised to at least K, if it is known. Local."""
    return dataclasses.replace(config, max_topk=max(config.max_topk, num_topk or 0))


class SharedTransports:
    """Transports that are shared by all layers with the same sizes, also by those of later models.

    A transport lives until the process ends or another process group takes the name of its own, and not until its last
    layer goes: ranks garbage-collect a model at different times.

    Args:
        transport: name of their implementation. config: deadlines of their ranks.
    """

    def __init__(self, transport: str, config: GroupConfig | None = None) -> None:
        self._transport = transport
        self._config = GroupConfig() if config is None else config
        self._joined: dict[str, tuple[dist.ProcessGroup, EPGroup]] = {}
        self._open: dict[tuple[Any, ...], tuple[dist.ProcessGroup | None, Transport, Callable[[], None]]] = {}
        self._num_modules = 0

    def number_module(self) -> int:
        """Return the number of a new experts module, equal on ranks that build the same models in order. Local."""
        self._num_modules += 1
        return self._num_modules - 1

    def join(self, process_group: dist.ProcessGroup | None, device: torch.device) -> EPGroup:
        """The group that transports over a process group share; None is this rank alone.

        An engine joins while its ranks keep step, and lets them wait for each other (`EPGroup.wait_for_all`, which has
        no deadline) before `get`. Collective at its first call for a process group, with a deadline.
        """
        if process_group is None:
            return EPGroup.single(device, self._config)
        known = self._joined.get(process_group.group_name)
        if known is None or known[0] is not process_group or known[1].destroyed:
            store = dist.distributed_c10d._get_default_store()
            group = EPGroup.from_process_group(process_group, store, self._config, device=device)
            self._joined[process_group.group_name] = known = (process_group, group)
        return known[1]

    def get(
        self, process_group: dist.ProcessGroup | None, num_experts: int, sizes: TransportConfig, device: torch.device
    ) -> Transport:
        """The transport over a process group (None is this rank alone) for E experts placed linearly.

        Collective for the first layer with these sizes; all ranks call it in the same order.
        """
        key = ("" if process_group is None else process_group.group_name, num_experts, sizes, device)
        known = self._open.get(key)
        if known is None or known[0] is not process_group:
            if known is not None:
                known[2]()
            group = self.join(process_group, device)
            transport = create_transport(self._transport, group, Placement.linear(num_experts, group.num_ranks), sizes)

            def close() -> None:
                transport.destroy()
                group.destroy()

            self._open[key] = known = (process_group, transport, close)
            atexit.register(close)
        return known[1]
