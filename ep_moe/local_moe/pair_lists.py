"""Pairs of a token and an expert as lists by expert, in kernels: the counting sort that packs rows, without the rows.

Letters: P pairs, L experts.
"""

import torch

from ep_moe.config import Layout
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.rows.permute import Placed, Places
from ep_moe.layout.base import TokenRows
from ep_moe.layout.frame import make_frame
from ep_moe.layout.triton import CopyShape, block_tokens, copy_launch, place_launches

_ALIGNED_ROWS = 64  # int32 in the 256 bytes to which pieces of a workspace are aligned


class PairLists:
    """Sorts pairs by expert; pairs of no expert are left out. Pairs of an expert keep their order.

    Example: experts [1, -1, 0, 1] of two experts, numbers [[0, 0, 1, 1], [0, 1, 2, 3]] and weights [.1, .2, .3, .4]
    give expert_row_start [0, 1], expert_num_tokens [1, 2], source [1, 0, 1], target [2, 0, 3] and factor [.3, .1, .4].

    Args:
        num_pairs: P, at least 1. num_experts: L, at least 1. ids_dtype: int32 or int64.
        numbers_stride: between the two rows of "numbers".

    Attributes:
        sequence: the launches, over "ids" [P], experts, others than [0, L) are none; "weights" [P] float32; "numbers"
            [2, P] int32. Its workspace has "expert_row_start" and "expert_num_tokens" [L] int32 and, for each listed
            pair, "source" and "target", its two numbers, int32, and "factor", its weight, float32.
    Local; nothing is launched.
    """

    def __init__(
        self, num_pairs: int, num_experts: int, ids_dtype: torch.dtype, numbers_stride: int, device: torch.device
    ) -> None:
        rows = -(-num_pairs // _ALIGNED_ROWS) * _ALIGNED_ROWS
        shape, own = torch.Size((num_pairs, 1)), (0, num_experts)
        like = TokenRows(
            x=torch.empty(num_pairs, 1, dtype=torch.int32, device="meta"),
            scale=None,
            local_topk_ids=torch.empty(shape, dtype=torch.int32, device="meta"),
            topk_weights=torch.empty(shape, dtype=torch.float32, device="meta"),
        )
        frame = make_frame(like, Layout.COMPACT, num_local_experts=num_experts, capacity=num_pairs)
        blocks = -(-num_pairs // block_tokens(1))
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "local_ids": (shape, torch.int32),
            "local_weights": (shape, torch.float32),
            "token_to_row": (shape, torch.int32),
            "before": ((blocks, num_experts), torch.int32),
            "expert_num_tokens": ((num_experts,), torch.int32),
            "expert_row_start": ((num_experts,), torch.int32),
            "factor": ((rows,), torch.float32),
            # written as one matrix [2, rows], since they lie next to each other
            "source": ((rows,), torch.int32),
            "target": ((rows,), torch.int32),
        }
        counts = "expert_num_tokens", "expert_row_start"
        names = Placed("ids", "weights", "local_ids", "local_weights", "before", *counts)
        _, launches = place_launches(names, shape, own, (1, 1), frame, ids_dtype=ids_dtype, device=device)
        copied = CopyShape(
            num_tokens=num_pairs,
            num_topk=1,
            experts=num_experts,
            row_words=1,
            unit=1,
            groups=2,
            copied=True,
            indexed=True,
            strides=(1, 1, numbers_stride),
            height=rows,
            out_rows=rows,
        )
        places = Places("local_ids", "before", "expert_row_start")
        words = "weights:words", "numbers", "token_to_row", None, "factor:words", "source"
        launches.append((copy_launch(copied, torch.int32, device), (places, *words)))
        aliases = {f"{name}:words": (name, torch.int32) for name in ("weights", "factor")}
        self.sequence = LaunchSequence(launches, ("ids", "weights", "numbers"), pieces, device, aliases=aliases)
        offset_of = self.sequence.workspace.offset_of
        assert offset_of("target") - offset_of("source") == rows * torch.int32.itemsize
