"""The experts of one rank applied to tokens that it holds, without transport, group or placement."""

from ep_moe.local_moe.calls import ExpertRows, local_moe, local_rows, repeated_call

__all__ = ["ExpertRows", "local_moe", "local_rows", "repeated_call"]
