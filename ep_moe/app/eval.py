"""`ep-moe eval`: the loss of a model on held-out text, expert-parallel and whole.

The text is cut into windows that do not overlap; every token but a window's first is predicted. Nats per byte are
nats per predicted token over the mean bytes of a token, so models with different tokenizers can be compared.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ep_moe.app.start import on_ranks, open_model
from ep_moe.config import EngineConfig
from ep_moe.fields import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Text and batches of `ep-moe eval`.

    Args:
        text: a UTF-8 file; "" is the held-out text that ships with the package.
        max_bytes: of the text that are used; 0 uses all.
        window: tokens that the model sees at once.
        batch: windows in one forward pass.
        whole: also evaluate transformers' whole model with its eager experts, unquantized, in the same dtype, and
            if the scheme quantizes once more, with experts rounded as it says; every rank loads it in full.
    """

    text: str = ""
    max_bytes: int = 0
    window: int = 512
    batch: int = 4
    whole: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.text and not Path(self.text).is_file():
            raise ValueError(f"text ({self.text!r}) is not a file")
        for name, least in (("max_bytes", 0), ("window", 2), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}")


def evaluate(engine: EngineConfig, config: EvalConfig) -> dict[str, Any]:
    """Evaluate on all ranks and return the report: losses in nats per byte, times, expert load.

    Errors: ValueError for too large a batch or an unreadable model directory, before ranks start.
    """
    if config.window * config.batch > engine.max_tokens_per_rank:
        raise ValueError(
            f"window ({config.window}) * batch ({config.batch}) exceeds max_tokens_per_rank "
            f"({engine.max_tokens_per_rank})"
        )
    open_model(engine)
    return on_ranks("ep_moe.app.eval_rank:evaluate_rank_main", engine, config)
