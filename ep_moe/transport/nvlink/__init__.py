"""One-sided exchange by stores into the memory of peers: `memory`, `launches` of the kernels, `faults`, `transport`."""

from ep_moe.transport.nvlink.transport import NvlinkTransport

__all__ = ["NvlinkTransport"]
