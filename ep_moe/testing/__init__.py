"""Checks and comparisons for ep_moe's own tests, and for authors of transports and expert implementations."""

from ep_moe.testing.cases import CaseInputs, TransportCase, transport_cases
from ep_moe.testing.compare import ROW_ERROR_LIMITS, assert_same_bits, worst_row_error
from ep_moe.testing.rounds import check_round, poisoned_memory
from ep_moe.testing.transports import check_transport

__all__ = [
    "ROW_ERROR_LIMITS",
    "CaseInputs",
    "TransportCase",
    "assert_same_bits",
    "check_round",
    "check_transport",
    "poisoned_memory",
    "transport_cases",
    "worst_row_error",
]
