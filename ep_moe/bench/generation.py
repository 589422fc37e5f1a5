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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A model and this rank's prompts for it, [rows, P]."""

    model: Any  # a transformers model; its mixins are more than a type checker can follow
    prompts: torch.Tensor
    decode_graphs: bool | None = None  # of a model of ours


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSecs:
    """Seconds of a generation: all of it, until the first new token, and after it."""

    whole: float
    first_token: float
    other_tokens: float


class _FirstToken(StoppingCriteria):
    """Never stops the generation; records when the first token was complete."""

    def __init__(self, device: torch.device) -> None:
        self.when = 0.0
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after each token."""
        del scores, kwargs
        if not self.when:
            _synchronize(self._device)
            self.when = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def time_generation(system: System, group: EPGroup, *, new_tokens: int, repeats: int) -> GenerationSecs:
    """Time `repeats` generations by the wall clock, after one warm-up; all ranks start together.

    Returns: the median of each part over the repeats, on the slowest rank. Collective, host sync.
    """
    samples = []
    for _ in range(repeats + 1):
        group.barrier()
        with group.guard("time generation"):
            first = _FirstToken(group.device)
            start = time.perf_counter()
            generate(system, new_tokens, first)
            _synchronize(group.device)
            end = time.perf_counter()
        samples.append((end - start, first.when - start, end - first.when))
    medians = [statistics.median(values) for values in zip(*samples[1:], strict=True)]
    whole, first_token, other_tokens = max(group.all_gather_object(medians))  # the whole comes first
    return GenerationSecs(whole=whole, first_token=first_token, other_tokens=other_tokens)
