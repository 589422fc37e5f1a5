"""What the ranks of a model tell each other outside of its layers."""

import torch

from ep_moe.group import EPGroup, PeerLostError


class Agreement:
    """A context in which an error on one rank is an error on all: those without one raise what the first other says.

    Ranks leave the context together, and come to its end at their own pace: only a rank that dies or leaves ends the
    wait. Others raise ValueError for a ValueError, else RuntimeError.

    Args:
        group: the ranks. phase: what they do in the context, for the message if one is lost.
    Collective, at its end.
    """

    def __init__(self, group: EPGroup, phase: str) -> None:
        self._group, self._phase = group, phase

    def __enter__(self) -> None:
        """Nothing is done before the end."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLostError) or not isinstance(error, Exception | None):
            return
        self._group.wait_for_all(self._phase)
        mine = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        for rank, found in enumerate(self._group.all_gather_object(mine)):
            if error is None and found is not None:
                raise (ValueError if found[0] else RuntimeError)(f"rank {rank} raised {found[1]}")


def any_rank_unfinished(group: EPGroup, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
    """What `generate` asks before each step: its own answer with `synced_gpus` needs torch's default process group,
    which may be wider than ours or not there. Collective with `synced_gpus`, host sync."""
    if not synced_gpus:
        return not this_peer_finished
    unfinished = torch.tensor([0 if this_peer_finished else 1], dtype=torch.int64, device=device)
    return bool(group.all_reduce_sum(unfinished).item())
