"""Transports that layers share: buffers then grow with the number of transports, not with the number of layers.

Letters: K top-k, E experts of all ranks.
"""

import atexit
import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport


def with_topk(config: TransportConfig, num_topk: int | None) -> TransportConfig:
    """The config with `max_topk` raised to at least K, if it is known. Local."""
    return dataclasses.replace(config, max_topk=max(config.max_topk, num_topk or 0))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedTransport:
    """One transport for all layers over one process group."""

    process_group: dist.ProcessGroup
    group: EPGroup
    transport: Transport

    def close(self) -> None:
        """Destroy transport and group, not the process group. Local, calling it twice is fine."""
        self.transport.destroy()
        self.group.destroy()


class SharedTransports:
    """Transports that are shared by all layers with the same sizes, also by those of later models.

    A transport lives until the process ends or another process group takes the name of its process group. It cannot be
    closed with its last layer: ranks garbage-collect a model at different times, so that one rank would use the old
    transport and another a new one.

    Args:
        transport: name of their implementation.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._open: dict[tuple[Any, ...], SharedTransport] = {}
        self._num_modules = 0

    def number_module(self) -> int:
        """Return the number of a new experts module, equal on ranks that build the same models in order. Local."""
        self._num_modules += 1
        return self._num_modules - 1

    def get(
        self, process_group: dist.ProcessGroup, num_experts: int, sizes: TransportConfig, device: torch.device
    ) -> SharedTransport:
        """The transport over a process group, for E experts placed linearly, with these sizes on this device.

        Collective for the first layer with these sizes; all ranks call it in the same order.
        """
        key = (process_group.group_name, num_experts, sizes, device)
        shared = self._open.get(key)
        if shared is not None and shared.process_group is not process_group:
            shared.close()
            shared = None
        if shared is None:
            store = dist.distributed_c10d._get_default_store()
            group = EPGroup.from_process_group(process_group, store, device=device)
            placement = Placement.linear(num_experts, group.num_ranks)
            transport = create_transport(self._transport, group, placement, sizes)
            shared = SharedTransport(process_group=process_group, group=group, transport=transport)
            self._open[key] = shared
            atexit.register(shared.close)
        return shared
