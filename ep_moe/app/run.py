"""`ep-moe run`: generate with the experts spread over ranks, and check that the whole model gives the same.

The whole model is that of transformers with eager experts, loaded in full by every rank for its own prompts. Schemes
that quantize are refused, since rounding makes logits differ: with "none", weights that are quantized on disk are
dequantized in both models.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ep_moe.app.check import check_model
from ep_moe.app.rebalancing import JobRebalanceConfig, RebalanceConfig
from ep_moe.app.start import on_ranks
from ep_moe.config import EngineConfig, config_dir, from_mapping, read_tables, read_toml
from ep_moe.fields import Field, check_fields

if TYPE_CHECKING:
    from ep_moe.weights import Checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Prompts and comparisons of `ep-moe run`.

    For the comparison every rank loads the whole model after freeing the expert-parallel one. If the whole model does
    not fit a rank's memory, use `ep-moe generate` or `ep-moe eval --no-whole`.

    Args:
        prompts: rank r takes prompt r modulo their number.
        new_tokens: tokens that each rank generates, rank r entry r modulo their number.
        teacher_tokens: held-out tokens, over all ranks, on which the logits are compared too.
        window: largest number of held-out tokens in one forward pass.
        max_logit_diff: the largest difference of a logit that counts as equal; positive and finite.
    """

    prompts: Annotated[tuple[str, ...], Field(help="Texts to continue")]
    new_tokens: Annotated[tuple[int, ...], Field(help="New tokens of each rank", at_least=1)]
    teacher_tokens: Annotated[int, Field(at_least=2)] = 2048
    window: Annotated[int, Field(at_least=2)] = 512
    max_logit_diff: Annotated[float, Field(positive=True)] = 1e-4

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not prompt for prompt in self.prompts):
            raise ValueError(f"prompts ({self.prompts}) must not contain an empty text")

    @classmethod
    def read(cls, path: str | Path | None = None) -> "RunConfig":
        """Read table [run] of a TOML file, in which values of options may stand too.

        The shipped configs/run.toml takes its place if no path is given or the table has none of these fields.
        """
        if path is not None:
            table = read_tables(path).get("run", {})
            own = {name: table[name] for name in table if name in cls.__dataclass_fields__}
            if own:
                return from_mapping(cls, own, f"{path} [run]")
        return read_toml(cls, config_dir() / "run.toml", "run")


def run(engine: EngineConfig, config: RunConfig, rebalance: RebalanceConfig | None = None) -> dict[str, Any]:
    """Run the job on all ranks and return its report; `ok` says whether all results are equal.

    Experts move as `rebalance` says, by default once.

    Errors: ValueError for an unreadable model directory or a scheme that quantizes, before ranks start.
    """
    _check_scheme(engine, check_model(engine))
    return on_ranks("ep_moe.app.run_rank:run_rank_main", engine, config, rebalance or JobRebalanceConfig())


def _check_scheme(engine: EngineConfig, checkpoint: "Checkpoint") -> None:
    """Raise if the experts would be computed in a scheme that quantizes, which the whole model does not."""
    from ep_moe.quant import get_scheme

    if engine.scheme == "auto":
        for layer in checkpoint.layers:
            checkpoint.check_layer(layer)
        schemes = [checkpoint.layer_scheme(layer) for layer in checkpoint.layers]
    else:
        schemes = [get_scheme(engine.scheme)]
    quantized = next((scheme for scheme in schemes if scheme.weight.quantized), None)
    if quantized is not None:
        what = "tokens that go to experts" if quantized.payload.quantized else "weights of experts"
        where = f" (of the experts in {checkpoint.directory})" if engine.scheme == "auto" else ""
        raise ValueError(
            f"scheme {quantized.name!r}{where} rounds the {what}, so no logit would equal that of the whole "
            f"model: use --quant none, which dequantizes, or ep-moe eval, which compares losses"
        )
