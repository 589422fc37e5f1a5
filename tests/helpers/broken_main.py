"""The main job with a fault in it."""

from typing import Any

import torch

from ep_moe.app.rebalancing import RebalanceConfig
from ep_moe.app.run import RunConfig
from ep_moe.app.run_rank import run_rank_main
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.transport import CollectiveTransport
from ep_moe.weights import ExpertWeights


def swap_two_experts() -> None:
    """Swap experts 0 and 1 of this rank's first layer."""
    read = ExpertWeights.from_pretrained.__func__

    def swapped(cls: type, *args: Any, **options: Any) -> dict[int, ExpertWeights]:
        layers = read(cls, *args, **options)
        first = layers[0]
        for tensor in (first.w13.values, first.w2.values):
            tensor[[0, 1]] = tensor[[1, 0]]
        return layers

    ExpertWeights.from_pretrained = classmethod(swapped)


def lose_one_token() -> None:
    """Zero the result of one token in one round."""
    receive = CollectiveTransport.combine_recv

    def losing(self: CollectiveTransport, dispatched: Any, **options: Any) -> torch.Tensor:
        out = receive(self, dispatched, **options)
        if dispatched.handle.round == 2:
            out[-1] = 0
        return out

    CollectiveTransport.combine_recv = losing


def fail() -> None:
    """Raise an error on this rank."""
    raise ArithmeticError("six times nine is not 42")


FAULTS = {"none": lambda: None, "swap": swap_two_experts, "lose": lose_one_token, "fail": fail}


def broken_main(
    group: EPGroup, engine: EngineConfig, config: RunConfig, rebalance: RebalanceConfig, fault: str
) -> dict[str, Any]:
    """The rank's part of the job; rank 1 has the fault."""
    if group.rank == 1:
        FAULTS[fault]()
    return run_rank_main(group, engine, config, rebalance)
