"""`ep-moe bench experts --beside deepgemm`: each GEMM alone, ours and DeepGEMM's for masked rows, on the same batch.

DeepGEMM is no dependency: a package `deep_gemm` is used if it is there.
Letters: N tokens of one expert each, L local experts, C rows of an expert, H hidden.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable

import torch

from ep_moe.bench import harness
from ep_moe.bench.presets import LayerPreset
from ep_moe.config import ActivationConfig, EngineConfig, Layout
from ep_moe.experts import KERNELS, apply_activation, create_experts
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.prepared import batch_tensors, weight_tensors
from ep_moe.group import EPGroup
from ep_moe.layout import ExpertBatch, pack_routed
from ep_moe.profiling.timing import capture
from ep_moe.quant import quantize
from ep_moe.report.records import OURS
from ep_moe.weights import ExpertWeights

MASKED = "m_grouped_fp8_fp4_gemm_nt_masked"
_BLOCK = 128  # columns that share a scale, and rows of the tiles that DeepGEMM fills
GEMMS = ("first", "second")


class DeepGemmBaseline:
    """DeepGEMM's module. Errors: RuntimeError if it is not there, ValueError for a layer that it does not compute."""

    def __init__(self, engine: EngineConfig, preset: LayerPreset, device: torch.device) -> None:
        moe = preset.moe(engine)
        odd = bool(moe.hidden % _BLOCK or moe.intermediate % _BLOCK)
        if (engine.scheme, engine.dtype, preset.bias, odd) != ("fp8_block", "bfloat16", False, False):
            raise ValueError(
                f"beside (deepgemm) needs --quant fp8_block, --dtype bfloat16, no biases and sizes that are multiples "
                f"of {_BLOCK}; these are {engine.scheme}, {engine.dtype}, {'' if preset.bias else 'no '}biases, hidden "
                f"({moe.hidden}) and intermediate ({moe.intermediate})"
            )
        if not isinstance(create_experts(engine.experts, moe.activation, device), KernelExperts):
            raise ValueError(
                f"beside (deepgemm) needs experts that are kernels ({', '.join(KERNELS)}), not '{engine.experts}' on "
                f"{device}"
            )
        try:
            module = importlib.import_module("deep_gemm")
        except ImportError as error:
            raise RuntimeError(f"beside (deepgemm) needs the package deep_gemm: {error}") from None
        if not callable(getattr(module, MASKED, None)):
            raise RuntimeError(f"beside (deepgemm) needs {MASKED}, which deep_gemm in {module.__file__} has not")
        self._module, self._activation = module, moe.activation

    def prepare(
        self, rows: int, x: torch.Tensor, ids: torch.Tensor, experts: KernelExperts, weights: ExpertWeights
    ) -> "DeepGemmWork":
        """Both on tokens [N, H] of one expert each, `rows` of each on average. Local, host sync."""
        packed = pack_routed(
            quantize(x, weights.scheme),
            ids.unsqueeze(1),
            torch.ones(len(ids), 1, device=x.device),
            Layout.BATCHED,
            scheme=weights.scheme,
            dtype=x.dtype,
            first=0,
            num_local_experts=weights.num_local_experts,
            capacity=len(ids),  # packing asks for no less, since it reads no counts back
        )
        capacity = math.ceil(int(ids.bincount().max()) / _BLOCK) * _BLOCK
        batch = dataclasses.replace(with_capacity(packed.batch, capacity), expected_rows=rows)
        places = packed.token_to_row[:, 0].long()
        version = str(getattr(self._module, "__version__", "unknown"))
        return DeepGemmWork(
            ours=SeparateGemms(_without_overlap(experts), batch, weights),
            theirs=DeepGemm(getattr(self._module, MASKED), batch, weights, self._activation),
            places=places // len(ids) * capacity + places % len(ids),
            setup={"gemm_backend": experts.backend_of(batch, weights), "deepgemm": version},
        )


def _without_overlap(experts: KernelExperts) -> KernelExperts:
    """The same experts, whose GEMMs do not overlap, so that each can be timed by itself."""
    if experts.name != "hopper":
        return experts
    from ep_moe.experts.hopper.gemms import HopperGemms  # not every Triton has Gluon

    backends = [HopperGemms(overlap=False), *experts.backends[1:]]
    return KernelExperts(experts.activation, backends, tiles=experts.tiles)


def with_capacity(batch: ExpertBatch, capacity: int) -> ExpertBatch:
    """A copy of a BATCHED batch with room for `capacity` rows of each expert, of which none has more. Local."""
    experts, old = batch.x.shape[:2]
    rows = min(capacity, old)
    x = batch.x.new_zeros(experts, capacity, batch.x.shape[2])
    x[:, :rows] = batch.x[:, :rows]
    scale, given = None, batch.scale
    if given is not None:  # scales of an expert's rows lie together
        scale = given.new_zeros(experts, given.shape[2], capacity).transpose(1, 2)
        scale[:, :rows] = given[:, :rows]
    start = torch.arange(experts, dtype=torch.int32, device=x.device) * capacity
    return dataclasses.replace(batch, x=x, scale=scale, expert_row_start=start)


class SeparateGemms:
    """Our kernels for one batch, each GEMM by itself with the list of row tiles that it follows.

    The first one has the activation and the requantization in it. Errors: RuntimeError if they do not give the bits of
    a call.
    """

    def __init__(self, experts: KernelExperts, batch: ExpertBatch, weights: ExpertWeights) -> None:
        y = torch.zeros(batch.output_shape, dtype=batch.dtype, device=batch.x.device)
        tensors = batch_tensors(batch) | {"y": y} | weight_tensors(weights)
        self._steps = experts.prepare(batch, weights).separate(tensors)
        for step in self._steps.values():
            step()
        if not torch.equal(y, experts(batch, weights, out=torch.zeros_like(y))):
            raise RuntimeError("the GEMMs one by one do not give the bits of a call")

    def run(self, gemm: str) -> None:
        """The tile list, and the "first" or the "second" GEMM on what a call has left. Local, no host sync."""
        self._steps["tile_list"]()
        self._steps[gemm]()


class DeepGemm:
    """Experts by DeepGEMM's kernel for masked rows, with plain torch between its two GEMMs.

    Args: masked: the kernel. batch: BATCHED in fp8 blocks. weights: the same, without biases.
    """

    def __init__(
        self, masked: Callable[..., None], batch: ExpertBatch, weights: ExpertWeights, activation: ActivationConfig
    ) -> None:
        assert batch.scale is not None
        self._masked, self._batch, self._activation = masked, batch, activation
        rows = {"first": weights.w13.values.shape[1], "second": batch.hidden}
        self._weights = {"first": weights.w13, "second": weights.w2}
        self._given = {"first": (batch.x, batch.scale)}
        self._out = {name: batch.x.new_zeros(*batch.x.shape[:2], rows[name], dtype=torch.bfloat16) for name in GEMMS}

    def __call__(self) -> torch.Tensor:
        """Compute the batch; returns [L, C, H] bfloat16, rows without a token undefined. Local, no host sync."""
        self.run("first")
        wide, stacked = self._out["first"].flatten(0, 1), self._batch.x.shape[:2]
        inner = quantize(apply_activation(wide, self._activation).to(wide.dtype), self._batch.scheme)
        scale = wide.new_empty(stacked[0], inner.scale.shape[1], stacked[1], dtype=torch.float32).transpose(1, 2)
        scale.copy_(inner.scale.unflatten(0, stacked))  # scales of neighboring rows are neighbors
        self._given["second"] = inner.values.unflatten(0, stacked), scale
        self.run("second")
        return self._out["second"]

    def run(self, gemm: str) -> None:
        """The "first" or the "second" GEMM on what a call has left. Local, no host sync."""
        stored, counts, rows = self._weights[gemm], self._batch.expert_num_tokens, self._batch.expected_rows
        weight = stored.values, stored.scale
        self._masked(self._given[gemm], weight, self._out[gemm], counts, rows, disable_ue8m0_cast=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepGemmWork:
    """Both systems on one batch; `places` [N] are the tokens' rows in it, `setup` goes into the row of the report."""

    ours: SeparateGemms
    theirs: DeepGemm
    places: torch.Tensor
    setup: dict[str, str]

    def rows(self, y: torch.Tensor) -> torch.Tensor:
        """The rows [N, H] of the tokens in an output [L, C, H]. Local."""
        return y.flatten(0, 1)[self.places]

    def samples(self, group: EPGroup, *, warmup: int, repeats: int) -> dict[str, dict[str, list[float]]]:
        """Microseconds of each GEMM alone, on a GPU of its graph, by figure and system. Host sync."""

        def timed(system: SeparateGemms | DeepGemm, gemm: str) -> Callable[[], object]:
            def call() -> torch.Tensor:
                system.run(gemm)
                return self.places

            return capture(call, group.device).replay if group.device.type == "cuda" else call

        found = {}
        for gemm in GEMMS:
            calls = {OURS: timed(self.ours, gemm), "deepgemm": timed(self.theirs, gemm)}
            found[f"{gemm}_gemm_call"] = harness.time_in_turns(group, calls, warmup=warmup, repeats=repeats)
        return found
