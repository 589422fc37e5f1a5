"""Exchange by all-to-all collectives of torch.distributed, on NCCL or gloo."""

from ep_moe.transport.collective.transport import CollectiveTransport

__all__ = ["CollectiveTransport"]
