"""Exchange by collectives of torch.distributed, on NCCL or gloo."""

from ep_moe.transport.collective.gathered import GATHERED_TOKENS, GatheredTransport
from ep_moe.transport.collective.transport import CollectiveTransport

__all__ = ["GATHERED_TOKENS", "CollectiveTransport", "GatheredTransport"]
