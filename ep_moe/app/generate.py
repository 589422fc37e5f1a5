"""`ep-moe generate`: text from prompts, which are spread over the ranks."""

import dataclasses
from typing import Any

from ep_moe.app.start import on_ranks, open_model
from ep_moe.config import EngineConfig
from ep_moe.fields import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Prompts and sampling of `ep-moe generate`.

    Args:
        prompts: rank r takes prompts r, r + R, ... of R ranks, with decode graphs many at a time, else one.
        max_new_tokens: for each prompt; an end-of-text token of the model ends it earlier.
        temperature: 0 takes the most likely token; above 0 samples from logits / temperature.
        top_p: sample among the most likely tokens that together reach this probability.
        seed: prompt i samples with seed + i on any rank.
        decode_graphs: None captures decode passes as CUDA graphs on GPUs with transport "nvlink"; True says why if it
            cannot; False never does.
    """

    prompts: tuple[str, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    decode_graphs: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prompts or any(not prompt for prompt in self.prompts):
            raise ValueError(f"prompts ({self.prompts}) must be one or more texts, none empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens ({self.max_new_tokens}) must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature ({self.temperature}) must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) is not in (0, 1]")
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p ({self.top_p}) needs a temperature above 0")


def generate(engine: EngineConfig, config: GenerateConfig) -> dict[str, Any]:
    """Generate on all ranks and return the report: `text`, one for each prompt in order, and times.

    Errors: ValueError for an unreadable model directory, before ranks start.
    """
    open_model(engine)
    return on_ranks("ep_moe.app.generate_rank:generate_rank_main", engine, config)
