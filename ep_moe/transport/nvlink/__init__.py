"""One-sided exchange by stores into peers' memory: `memory`, `launches` of the kernels, `faults`, `transport`."""

from ep_moe.transport.nvlink.transport import NvlinkTransport

__all__ = ["NvlinkTransport"]
