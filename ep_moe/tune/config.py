"""What `ep-moe tune` measures: a frozen config, whose fields are the options of the command."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, MoEConfig
from ep_moe.fields import Field, check_fields

STAGES = ("all", "compile", "measure", "check")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneConfig:
    """One shape, and the numbers of rows that are tuned. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes", choices=LAYER_PRESETS)] = "deepseek-v3"
    hidden: Annotated[int, Field(help="Overrides the preset's hidden size, if not 0", at_least=0)] = 0
    intermediate: Annotated[int, Field(help="Overrides the preset's intermediate size", at_least=0)] = 0
    num_experts: Annotated[int, Field(help="Overrides the preset's number of experts", at_least=0)] = 0
    ep_size: Annotated[int, Field(help="Ranks that share the experts; one rank's share is measured", at_least=1)] = 8
    rows: Annotated[tuple[int, ...], Field(help="Average rows per expert (repeatable)", at_least=1)] = (
        4,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
    )
    minutes: Annotated[float, Field(help="Time for all rows together")] = 10.0
    out: Annotated[
        Path | None, Field(help="Folder of the tables; by default EP_MOE_TILES_DIR, else ~/.config/ep_moe/tiles")
    ] = None
    stage: Annotated[
        str,
        Field(
            help="compile measures nothing, so that others may use the GPU; measure compiles nothing, it takes what an "
            "earlier run has compiled; check measures the tables that are in use beside the defaults",
            choices=STAGES,
        ),
    ] = "all"
    jobs: Annotated[
        int, Field(help="Processes that compile kernels; 0 is one for each core, at most 16", at_least=0)
    ] = 0
    seed: Annotated[int, Field(help="Seed of experts, tokens and rows per expert", at_least=0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 < self.minutes < math.inf):
            raise ValueError(f"minutes ({self.minutes}) is not above 0")
        if list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"rows ({', '.join(map(str, self.rows))}) do not ascend")
        experts = self.num_experts or LAYER_PRESETS[self.preset].sizes.num_experts
        if self.ep_size > experts:
            raise ValueError(f"ep_size ({self.ep_size}) exceeds the {experts} experts of {self.preset}")

    def moe(self, engine: EngineConfig) -> MoEConfig:
        """The layer. Errors: ValueError for sizes that do not fit each other. Local."""
        names = ("hidden", "intermediate", "num_experts")
        changes: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        return LAYER_PRESETS[self.preset].moe(engine, **changes)

    def num_local_experts(self, moe: MoEConfig) -> int:
        """L."""
        return math.ceil(moe.num_experts / self.ep_size)
