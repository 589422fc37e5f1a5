"""Exchange by collectives of torch.distributed, on NCCL or gloo."""

from ep_moe.transport.collective.gathered import GatheredTransport
from ep_moe.transport.collective.transport import CollectiveTransport

__all__ = ["CollectiveTransport", "GatheredTransport"]
