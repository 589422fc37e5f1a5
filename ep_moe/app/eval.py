"""`ep-moe eval`: the loss of a model on held-out text, expert-parallel and whole.

The text is cut into windows that do not overlap; every token but a window's first is predicted. Nats per byte are
nats per predicted token over the mean bytes of a token, so models with different tokenizers can be compared.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from ep_moe.app.check import check_model
from ep_moe.app.start import on_ranks
from ep_moe.config import EngineConfig
from ep_moe.fields import Field, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Text and batches of `ep-moe eval`.

    The whole model is that of transformers with eager experts, unquantized, in the same dtype. If the scheme
    quantizes, a whole model with experts rounded to the scheme is evaluated too. Every rank loads these in full.
    """

    text: Annotated[str, Field(help="A UTF-8 file; empty is the held-out text that ships")] = ""
    max_bytes: Annotated[int, Field(help="Most bytes of the text that are used; 0 uses all", at_least=0)] = 0
    window: Annotated[int, Field(help="Tokens per window", at_least=2)] = 512
    batch: Annotated[int, Field(help="Windows in one forward pass", at_least=1)] = 4
    whole: Annotated[bool, Field(help="Evaluate the whole model on every rank too")] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.text and not Path(self.text).is_file():
            raise ValueError(f"text ({self.text!r}) is not a file")


def evaluate(engine: EngineConfig, config: EvalConfig) -> dict[str, Any]:
    """Evaluate on all ranks and return the report: losses in nats per byte, times, expert load.

    Errors: ValueError for too large a batch or an unreadable model directory, before ranks start.
    """
    if config.window * config.batch > engine.max_tokens_per_rank:
        raise ValueError(
            f"window ({config.window}) * batch ({config.batch}) exceeds max_tokens_per_rank "
            f"({engine.max_tokens_per_rank})"
        )
    check_model(engine)
    return on_ranks("ep_moe.app.eval_rank:evaluate_rank_main", engine, config)
