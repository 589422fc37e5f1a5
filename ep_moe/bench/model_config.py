"""Options of `ep-moe bench model`, apart from it so that the command line need not import transformers."""

import dataclasses

from ep_moe.bench.presets import MODEL_PRESETS
from ep_moe.fields import check_fields

CHECKED_TOKENS = 64  # per rank, input of each MoE block in the check
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelBenchConfig:
    """Measurements of `ep-moe bench model`.

    Args:
        preset: sizes, a name of MODEL_PRESETS. layers: their number, in place of the model's own.
        batch: B, sequences per rank. prompt_tokens: P. new_tokens: N of each sequence, at least 2.
        repeats: timed generations. seed: of weights and prompts.
        baseline_experts: transformers' implementation of the experts in its own expert parallelism.
        hook: also measure transformers' expert parallelism with ep_moe's exchange plugged into it.
    Errors: ValueError names the value and the limit.
    """

    preset: str = "qwen3-30b"
    layers: int = 8
    batch: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3
    seed: int = 0
    baseline_experts: str = "grouped_mm"
    hook: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.preset not in MODEL_PRESETS:
            raise ValueError(f"preset ({self.preset!r}) is not one of {', '.join(MODEL_PRESETS)}")
        if self.baseline_experts not in EXPERTS_IMPLEMENTATIONS:
            known = ", ".join(EXPERTS_IMPLEMENTATIONS)
            raise ValueError(f"baseline_experts ({self.baseline_experts!r}) is not one of {known}")
        least = {"layers": 1, "batch": 1, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1, "seed": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {limit}")

    @property
    def max_tokens_per_rank(self) -> int:
        """The most tokens of a rank in a forward pass."""
        return max(self.batch * self.prompt_tokens, CHECKED_TOKENS)
