"""Builds the transport over NVSHMEM, which is in `one_sided`; imports Triton only if it is asked for."""

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport.base import Transport


def nvshmem_transport(group: EPGroup, placement: Placement, config: TransportConfig) -> Transport:
    """Build the transport `nvshmem`. Errors: RuntimeError without Triton; see `NvshmemTransport`. Collective."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"transport 'nvshmem' needs Triton, which is not installed: {error}") from None
    if group.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "transport 'nvshmem' on a CPU needs TRITON_INTERPRET=1 in the environment; 'collective' does not"
        )
    from ep_moe.transport.one_sided.nvshmem import NvshmemTransport

    return NvshmemTransport(group, placement, config)
