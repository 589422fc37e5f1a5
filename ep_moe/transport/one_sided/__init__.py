"""The one-sided exchange: stores into peers' memory, from kernels. Users choose it by the name "peer", or "nvlink"."""

from ep_moe.transport.one_sided.transport import NvlinkTransport, NvshmemTransport

__all__ = ["NvlinkTransport", "NvshmemTransport"]
