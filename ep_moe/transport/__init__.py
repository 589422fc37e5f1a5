"""Token exchange. `base` is the interface; `TRANSPORTS` holds the implementations by name."""

import functools
import logging
from collections.abc import Callable

from ep_moe.config import TransportConfig
from ep_moe.fields import shown
from ep_moe.group import EPGroup
from ep_moe.group.symmetric import why_unreachable
from ep_moe.placement import Placement
from ep_moe.transport.base import Dispatched, Handle, Transport
from ep_moe.transport.collective import GATHERED_TOKENS, CollectiveTransport, GatheredTransport
from ep_moe.transport.hierarchical import HierarchicalTransport, NodesGatheredTransport
from ep_moe.transport.local import LocalTransport

GATHERED_RANKS = 8  # of which each gets all tokens: with more, a token's experts are on a part of them

_log = logging.getLogger(__name__)


def _one_sided_transport(group: EPGroup, placement: Placement, config: TransportConfig, name: str) -> Transport:
    """Build a one-sided transport. Triton is imported here because it exists only on Linux."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"transport {name!r} needs Triton, which is not installed: {error}") from None
    if group.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"transport {name!r} on a CPU needs TRITON_INTERPRET=1 in the environment; 'collective' does not"
        )
    from ep_moe.transport.one_sided import NvlinkTransport, NvshmemTransport

    return (NvshmemTransport if name == "nvshmem" else NvlinkTransport)(group, placement, config)


def _deepep_transport(group: EPGroup, placement: Placement, config: TransportConfig, mode: str = "auto") -> Transport:
    """Build a transport over an installed DeepEP, in one of its modes."""
    from ep_moe.transport.deepep import DeepEPTransport

    return DeepEPTransport(group, placement, config, mode=mode)


TRANSPORTS: dict[str, Callable[[EPGroup, Placement, TransportConfig], Transport]] = {
    "local": LocalTransport,
    "collective": CollectiveTransport,
    "gathered": GatheredTransport,
    "peer": functools.partial(_one_sided_transport, name="peer"),
    "nvlink": functools.partial(_one_sided_transport, name="peer"),  # its older name
    "hierarchical": HierarchicalTransport,
    "deepep": _deepep_transport,
    **{f"deepep_{mode}": functools.partial(_deepep_transport, mode=mode) for mode in ("low_latency", "normal", "v2")},
    "nvshmem": functools.partial(_one_sided_transport, name="nvshmem"),
}


def create_transport(name: str, group: EPGroup, placement: Placement, config: TransportConfig) -> Transport:
    """Build a transport by name.

    "auto" is "peer" on GPUs that all reach each other's memory, also on a single one, where "local" would read counts
    back to the host; "local" for one rank on a CPU; "gathered" over NCCL for up to GATHERED_RANKS ranks that together
    have up to GATHERED_TOKENS tokens in a round; else "collective". Rank 0 logs the choice, and the reason if it is
    not "peer", at level INFO.

    "peer", whose older name is "nvlink", needs GPUs that map each other's memory, over NVLink or PCIe. On a CPU it is
    for tests and needs TRITON_INTERPRET=1 in the environment before Triton is imported.

    "deepep" and "deepep_<mode>" need an installed DeepEP (docs/exchange.md).

    Errors: ValueError lists the names; RuntimeError for "peer" without peer memory or Triton, for "deepep" without
    the DeepEP that it needs. Collective.
    """
    for argument, value, kind in (
        ("group", group, EPGroup),
        ("placement", placement, Placement),
        ("config", config, TransportConfig),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{argument} ({shown(value)}) is no {kind.__name__}")
    if name == "auto":
        name = _choose(group, config)
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ValueError(f"transport ({name!r}) is not one of auto, {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](group, placement, config)


def _choose(group: EPGroup, config: TransportConfig) -> str:
    """The name of the transport that "auto" selects for a group. Collective."""
    if group.device.type != "cuda":
        one = group.num_ranks == 1
        name, reason = ("local", "there is one rank") if one else ("collective", f"ranks are on {group.device.type}")
    else:
        reason = why_unreachable(group)
        few = group.num_ranks * config.max_tokens_per_rank <= GATHERED_TOKENS and group.num_ranks <= GATHERED_RANKS
        few = few and group.backend == "nccl"
        name = "peer" if not reason else "gathered" if few else "collective"
    if group.rank == 0:
        _log.info("transport 'auto' is '%s'%s", name, f": {reason}" if reason else "")
    return name


__all__ = [
    "TRANSPORTS",
    "CollectiveTransport",
    "Dispatched",
    "GatheredTransport",
    "Handle",
    "HierarchicalTransport",
    "LocalTransport",
    "NodesGatheredTransport",
    "Transport",
    "create_transport",
]
