"""Attention of decode passes: one query of each sequence, the query heads grouped by the key head that they share.
Of prefills: kernels that take any shape.

transformers below 5.23 repeats all keys and values for each query head of a group if there is a mask: for 64 sequences
of 256 positions in Qwen3-30B, 268 MB are written and read in every layer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = "ep_moe_grouped"  # registered with transformers, in place of "sdpa"
_CHANGES = ("softcap", "position_bias", "s_aux")


@contextlib.contextmanager
def grouped_attention(config: PreTrainedConfig) -> Iterator[None]:
    """In the block, a text model with this config computes "sdpa" attention by `attend`, others as before. Local."""
    if config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(GROUPED, attend)
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query per sequence, as transformers calls it; inference alone.

    Args:
        query: [B, A, 1, D] of A attention heads. key, value: [B, KV, S, D] and [B, KV, S, V]; KV divides A.
        attention_mask: [B, 1, 1, S], added to the scores.
        scaling: of the scores, 1 / sqrt(D) by default. kwargs: those that change the scores are left to transformers.
    Returns: [B, 1, A, V] and None, for the attention's weights. Local, no host sync.
    """
    if any(kwargs.get(name) is not None for name in _CHANGES):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows, num_heads, _, width = query.shape
    num_groups = key.shape[1]
    grouped = query.reshape(rows, num_groups, num_heads // num_groups, width)
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, num_heads, value.shape[-1]), None


@contextlib.contextmanager
def any_shape() -> Iterator[None]:
    """In the block, torch's attention leaves out cuDNN, which it prefers on Hopper and Blackwell since 2.9.

    cuDNN builds a plan for each new shape, in 50 ms and up to 1 s, and hardly two prefills have the same. Local.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
