"""Exchange by an installed DeepEP: its low-latency and normal kernels (V1) or its ElasticBuffer (V2)."""

from ep_moe.transport.deepep.transport import DeepEPTransport

__all__ = ["DeepEPTransport"]
