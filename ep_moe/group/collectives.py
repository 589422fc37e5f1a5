"""Collectives of a group that its caller waits for later, and torch's names for them.

Letters: R ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.group.base import EPGroup

# torch 2.13 renamed both collectives and warns about the old names
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def begin(group: EPGroup, start: Callable[[], dist.Work]) -> dist.Work:
    """Call `start`, which begins an operation of torch.distributed, and return it for `EPGroup.wait`.

    Errors: PeerLostError if the group has failed, or if the connection is already broken: then the call fails and not
    the wait. Collective, no wait.
    """
    group.check()
    with group.explained():
        group.connect_backend()
        return start()


def begin_all_to_all(
    group: EPGroup,
    incoming: torch.Tensor,
    outgoing: torch.Tensor,
    recv_counts: Sequence[int],
    send_counts: Sequence[int],
) -> dist.Work | None:
    """Begin to exchange rows with every rank; None, and copies, in a group that is alone.

    Args:
        incoming: written, [sum of recv_counts, ...]. outgoing: [sum of send_counts, ...]; both contiguous, by rank.
        recv_counts, send_counts: [R], rows.
    Errors: PeerLostError. Collective, no wait.
    """
    if group.alone:
        group.check()
        own = outgoing.split(list(send_counts))[group.rank]
        for part in incoming.split(list(recv_counts)):  # as far as it sends itself as many rows as the others
            part[len(own) :].zero_()
            part[: len(own)] = own[: len(part)]
        return None
    counts = list(recv_counts), list(send_counts)
    return begin(
        group,
        lambda: dist.all_to_all_single(incoming, outgoing, *counts, group=group.process_group, async_op=True),
    )


def begin_all_gather(group: EPGroup, everyone: torch.Tensor, mine: torch.Tensor) -> dist.Work | None:
    """Begin to gather a tensor of every rank; None, and copies, in a group that is alone.

    Args:
        everyone: written, [R * n, ...]. mine: [n, ...], of this shape and dtype on every rank; both contiguous.
    Errors: PeerLostError. Collective, no wait.
    """
    if group.alone:
        group.check()
        everyone.view(group.num_ranks, *mine.shape).copy_(mine)
        return None
    return begin(group, lambda: all_gather_single(everyone, mine, group=group.process_group, async_op=True))
