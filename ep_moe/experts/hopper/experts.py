"""`HopperExperts`: Hopper's kernels for the calls that they take, Triton's for the others."""

from pathlib import Path

from ep_moe.config import ActivationConfig
from ep_moe.experts.hopper.gemms import HopperGemms
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.triton import TritonGemms
from ep_moe.experts.tuning import ExpertTiles


class HopperExperts(KernelExperts):
    """`KernelExperts` whose GEMMs are Gluon's from 64 expected rows of an expert on, in 16 bits from 96, if they take
    the call.

    Args: `gemms`: in place of the default; `tiles`: of Triton's GEMMs.
    """

    def __init__(
        self, activation: ActivationConfig, *, gemms: HopperGemms | None = None, tiles: ExpertTiles | Path | None = None
    ) -> None:
        super().__init__(activation, TritonGemms(), preferred=gemms or HopperGemms(), tiles=tiles)
