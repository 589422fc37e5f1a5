"""The key of a round's compiled kernels, for a transport that compiles them in `warmup`."""

import dataclasses

import torch

from ep_moe.config import Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundKind:
    """The parameters of a round that select its compiled kernels; the number of tokens is not among them.

    Layers make them in `warmup`; no user does.
    """

    num_topk: int  # K
    scheme: str = "none"  # of the payload
    layout: Layout = Layout.BATCHED  # of the batch
    ids_dtype: torch.dtype = torch.int32  # of topk_ids, or int64
    counted: bool = False  # `num_tokens` is not None
    quantized: bool = False  # x is `Quantized` already
    shared_dtype: torch.dtype | None = None  # of `shared` in the combine, None if there is none
    split_dispatch: bool = False  # dispatch_send and dispatch_recv are called separately
    split_combine: bool = False  # combine_send and combine_recv are called separately
