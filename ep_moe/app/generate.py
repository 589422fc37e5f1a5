"""`ep-moe generate`: text from prompts, which are spread over the ranks."""

import dataclasses
from typing import Annotated, Any

from ep_moe.app.check import check_model
from ep_moe.app.rebalancing import RebalanceConfig
from ep_moe.app.start import on_ranks
from ep_moe.config import EngineConfig
from ep_moe.fields import Field, check_fields, shown


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Prompts and sampling of `ep-moe generate`.

    Rank r of R ranks takes prompts r, r + R, ..., up to 64 at a time, one by one for a model that generates by
    transformers' own loop. A sequence ends early at the model's end-of-text token. Above temperature 0 tokens are
    sampled from logits / temperature; prompt i samples with seed + i on any rank.
    """

    prompts: Annotated[tuple[str, ...], Field(help="Texts to continue; - reads one from standard input")]
    max_new_tokens: Annotated[int, Field(help="New tokens per prompt", at_least=1)] = 128
    temperature: Annotated[float, Field(help="Sampling temperature; 0 takes the likeliest token", at_least=0)] = 0.0
    top_p: Annotated[float, Field(help="Sample among the likeliest tokens that hold this share of the probability")] = (
        1.0
    )
    seed: Annotated[int, Field(help="Seed of the sampling")] = 0
    decode_graphs: Annotated[
        bool | None,
        Field(help="Decode by CUDA graphs, by default on GPUs where the transport allows it; a log line tells why not"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not prompt for prompt in self.prompts):
            raise ValueError(f"prompts ({self.prompts}) must be one or more texts, none empty")
        for prompt in self.prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"prompts ({shown(prompt)}) are not UTF-8: {error.reason}") from None
        most = 2**63 - len(self.prompts)
        if not -(2**63) <= self.seed <= most:
            raise ValueError(f"seed ({shown(self.seed)}) must be in [-2^63, {most}]: prompt i has seed + i, of 64 bits")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) is not in (0, 1]")
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p ({self.top_p}) needs a temperature above 0")


def generate(engine: EngineConfig, config: GenerateConfig, rebalance: RebalanceConfig | None = None) -> dict[str, Any]:
    """Generate on all ranks and return the report: `text`, one for each prompt in order, and times.

    Errors: ValueError for an unreadable model directory, before ranks start.
    """
    check_model(engine)
    return on_ranks("ep_moe.app.generate_rank:generate_rank_main", engine, config, rebalance or RebalanceConfig())
