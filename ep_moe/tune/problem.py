"""The experts of one rank and their tokens, on which candidates are compared; an oracle judges every candidate.

Letters: N rows of all experts, L local experts, H hidden, n rows that are checked.
"""

import dataclasses
import functools
from pathlib import Path

import torch

from ep_moe.config import EngineConfig, Layout, MoEConfig
from ep_moe.experts import KERNELS, kernel_backends
from ep_moe.experts.grouped_gemm import Backend, CallShape
from ep_moe.experts.hopper.shapes import CAPABILITY, has_gluon, is_hopper
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.group import EPGroup
from ep_moe.layout import pack_routed
from ep_moe.profiling.timing import capture, time_calls
from ep_moe.quant import get_scheme, quantize
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.random_experts import SEED_STRIDE, RandomExperts

_SAMPLED_ROWS = 128  # of the first and the last expert each, which the oracle computes
_WARMUP = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the weights of a problem are made of; compiling processes get it too.

    Args:
        moe: the layer. num_experts: L. bias: True if both GEMMs add one. seed: of experts, tokens and counts.
    """

    moe: MoEConfig
    engine: EngineConfig
    num_experts: int
    bias: bool
    seed: int


def tuned_backends(name: str, device: torch.device) -> list[Backend]:
    """The backends of the experts of this name, whose kernels are tuned; "auto" chooses.

    Errors: ValueError for others, RuntimeError if "hopper" cannot run here. Local.
    """
    if name not in ("auto", *KERNELS):
        raise ValueError(f"experts ({name!r}) is not one of auto, {', '.join(KERNELS)}, whose kernels have tiles")
    both = has_gluon() and is_hopper(device)
    if name == "hopper" and not both:
        raise RuntimeError(
            f"experts 'hopper' need a GPU of compute capability {CAPABILITY} and a Triton with Gluon, "
            f"which {device} has not; 'triton' is tuned without"
        )
    return kernel_backends("hopper" if name != "triton" and both else "triton")


def named(backend: Backend, tiles: ExpertTiles) -> ExpertTiles:
    """The tiles, with the name of the backend that they are for. Local."""
    return dataclasses.replace(tiles, backend=backend.name)


class Problem:
    """Random experts on one device, and for each number of rows the tokens that they compute.

    Args:
        device: a GPU, or the CPU under Triton's interpreter.
    Errors: as of `tuned_backends`.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._group = sizes, EPGroup.single(device)
        self._backends = tuned_backends(sizes.engine.experts, device)
        self._dtype, self._scheme = sizes.engine.torch_dtype, get_scheme(sizes.engine.scheme)
        self._random = RandomExperts(sizes.moe, self._dtype, device, bias=sizes.bias, seed=sizes.seed)
        self._weights = self._random.local(range(sizes.num_experts), self._scheme)
        quantized = self._scheme.weight.quantized
        self.limit = ROW_ERROR_LIMITS["fp8" if quantized else str(self._dtype).removeprefix("torch.")]

    def set_rows(self, rows: int) -> None:
        """Make tokens for `rows` rows per expert, 0.7 to 1.3 times as many for each, and what some should become.

        Host sync.
        """
        sizes, device = self._sizes, self._group.device
        generator = torch.Generator().manual_seed(sizes.seed * SEED_STRIDE + rows)
        shares = torch.rand(sizes.num_experts, generator=generator) * 0.6 + 0.7
        counts = (shares * rows).round().clamp(min=1).long()
        ids = torch.arange(sizes.num_experts, dtype=torch.int32).repeat_interleave(counts)
        ids = ids[torch.randperm(len(ids), generator=generator)].to(device).unsqueeze(1)
        on_device = torch.Generator(device).manual_seed(sizes.seed * SEED_STRIDE - 1 + SEED_STRIDE)  # no expert's seed
        x = torch.randn(len(ids), sizes.moe.hidden, generator=on_device, device=device).to(self._dtype)
        ones = torch.ones(len(ids), 1, device=device)
        packed = pack_routed(
            quantize(x, self._scheme, static_scale=self._weights.w13_input_scale)
            if self._scheme.payload.quantized
            else x,
            ids,
            ones,
            Layout.COMPACT,
            scheme=self._scheme,
            dtype=self._dtype,
            first=0,
            num_local_experts=sizes.num_experts,
            capacity=len(ids),
        )
        self._batch = dataclasses.replace(packed.batch, expected_rows=rows)
        ends = (torch.nonzero(ids[:, 0] == expert)[:_SAMPLED_ROWS, 0] for expert in (0, sizes.num_experts - 1))
        sample = torch.cat(tuple(ends)).unique()
        self._checked = packed.token_to_row[sample, 0].long()
        self._expected = self._random.expected_output(x[sample], ids[sample], ones[sample], self._scheme)

    @property
    def shape(self) -> CallShape:
        """What determines the launches of a call with the present rows."""
        return CallShape.of(self._batch, self._weights, self._sizes.moe.activation)

    def experts(self, tiles: ExpertTiles | Path | None) -> KernelExperts:
        """The experts with these tiles or tables, or those of the package."""
        return KernelExperts(self._sizes.moe.activation, self._backends, tiles=tiles)

    @property
    def backends(self) -> list[str]:
        """The names of the backends that are tuned."""
        return [backend.name for backend in reversed(self._backends)]

    def used(self, folder: Path | None) -> ExpertTiles:
        """The tiles for the present rows with the tables of a folder and of the package."""
        return named(*self.experts(folder).choose_backend(self.shape))

    def choices(self) -> list[ExpertTiles]:
        """What the package has for the present rows: the tiles that would be used, then each backend's own."""
        shape = self.shape
        own = (named(each, each.default_tiles(shape)) for each in reversed(self._backends) if not each.obstacle(shape))
        return list(dict.fromkeys((self.used(None), *own)))

    def default(self) -> ExpertTiles:
        """The tiles for the present rows without a table."""
        found = ((backend, backend.tiles(self.shape)) for backend in self._backends)
        return next(named(backend, tiles) for backend, tiles in found if tiles is not None)

    def run(self, tiles: ExpertTiles) -> None:
        """One call, which compiles. Errors: those of Triton and CUDA. Host sync."""
        self.experts(tiles)(self._batch, self._weights)
        self._wait()

    def error(self, tiles: ExpertTiles) -> float:
        """The worst relative error of the checked rows; NaN for rows that are not written. Host sync."""
        out = torch.full(self._batch.output_shape, float("nan"), dtype=self._dtype, device=self._group.device)
        return worst_row_error(self.experts(tiles)(self._batch, self._weights, out=out)[self._checked], self._expected)

    def times(self, tiles: ExpertTiles, repeats: int) -> list[float]:
        """Microseconds of calls from a cold L2, on a GPU of the replays of one's graph. Host sync."""
        call = functools.partial(self.experts(tiles), self._batch, self._weights)
        replay = capture(call, self._group.device).replay if self._group.device.type == "cuda" else call
        return time_calls(replay, self._group, warmup=_WARMUP, repeats=repeats)

    def _wait(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)
