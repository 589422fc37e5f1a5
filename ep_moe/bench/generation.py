"""Generates a fixed number of tokens with a transformers model, and times it on all ranks together."""

import dataclasses
import statistics
import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ep_moe.engines.transformers import GenerationOptions
from ep_moe.engines.transformers import generate as ours
from ep_moe.group import EPGroup
from ep_moe.profiling.timing import medians, slowest, time_calls

HOST_WARMUP, HOST_CALLS = 2, 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A model and this rank's prompts for it, [rows, P]."""

    model: Any  # a transformers model; its mixins are more than a type checker can follow
    prompts: torch.Tensor
    decode_graphs: bool | None = None  # of an ep_moe model: decode by CUDA graphs; None leaves the choice to it


class _FirstToken(StoppingCriteria):
    """Never stops the generation; records how many seconds after its start the first token was complete."""

    def __init__(self) -> None:
        self.secs, self._start = 0.0, time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after each token."""
        del scores, kwargs
        if not self.secs:
            if input_ids.device.type == "cuda":
                torch.cuda.synchronize(input_ids.device)
            self.secs = time.perf_counter() - self._start
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(system: System, new_tokens: int, *criteria: StoppingCriteria) -> torch.Tensor:
    """Continue the prompts greedily by exactly `new_tokens`; returns [rows, new_tokens]. Collective."""
    if hasattr(system.model, "ep_moe"):
        options = GenerationOptions(max_new_tokens=new_tokens)
        on_step: Any = lambda count: [criterion(system.prompts, system.prompts) for criterion in criteria]  # noqa: E731
        found = ours(system.model, system.prompts, options, decode_graphs=system.decode_graphs, on_step=on_step)
        return found.to(system.prompts.device)
    with torch.inference_mode():
        sequences = system.model.generate(
            system.prompts,
            attention_mask=torch.ones_like(system.prompts),
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList(criteria),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return sequences[:, system.prompts.shape[1] :]


def time_generation(system: System, group: EPGroup, *, tokens: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Figures of `repeats` generations by the wall clock, after one warm-up; all ranks start together.

    Args:
        tokens: that all ranks together generate. new_tokens: of each sequence, at least 2.
    Returns: tokens per second, and seconds of a generation, ms until its first new token and of each later one: the
    median of each over the repeats, on the slowest rank. Collective, host sync.
    """
    firsts: list[_FirstToken] = []

    def run() -> None:
        firsts.append(_FirstToken())
        generate(system, new_tokens, firsts[-1])

    wholes = [us / 1e6 for us in time_calls(run, group, warmup=1, repeats=repeats, by="wall")]
    samples = [(whole, first.secs, whole - first.secs) for whole, first in zip(wholes, firsts[1:], strict=True)]
    middle = tuple(statistics.median(values) for values in zip(*samples, strict=True))
    whole, first, others = max(group.all_gather_object(middle))  # the whole comes first
    figures = {"tokens_per_sec": tokens / whole, "generate_secs": whole, "prefill_ms": first * 1e3}
    return figures | {"decode_step_ms": others / (new_tokens - 1) * 1e3}


def host_time(system: System, group: EPGroup) -> dict[str, float]:
    """Figures: the host's time of one eager forward pass of one token per sequence, without a cache. Collective."""

    def run() -> None:
        system.model(system.prompts[:, :1], use_cache=False, logits_to_keep=1)

    with torch.inference_mode():
        samples = time_calls(run, group, warmup=HOST_WARMUP, repeats=HOST_CALLS, by="host")
    return medians(slowest(group, {"host": samples}, whole="host"))
