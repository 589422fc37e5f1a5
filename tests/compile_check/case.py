"""A case: a call of launchers, and its excuses."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

Rule = Literal[
    "case",
    "spill",
    "loop_spill",
    "many_spills",
    "shared",
    "tensor_core",
    "in_flight",
    "narrow",
    "order",
    "loaded_again",
    "weak",
    "excuse",
]


Target = int | str  # compute capability, such as 90, or AMD's name of an architecture
CUDA_TARGETS: tuple[Target, ...] = (80, 86, 89, 90, 100, 120)
HIP_TARGETS: tuple[Target, ...] = ("gfx942", "gfx950")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call of launchers.

    Args:
        name: in the table.
        launch: calls launchers, in a process where every launch only compiles.
        payload_width_bytes: kernel -> least width of its widest load and of its widest store, for kernels that copy
            payload as words, which the rule "narrow" does not see.
        targets: that the launchers are called for; None is all.
        excuses: (kernel, rule) -> why this kernel may break that rule here; kernels by name, without the module.
    """

    name: str
    launch: Callable[[], object]
    payload_width_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    targets: tuple[Target, ...] | None = None
    excuses: Mapping[tuple[str, Rule], str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, reason in self.excuses.items():
            if not reason.strip():
                raise ValueError(f"excuse {key} of case {self.name!r} has no reason")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A broken rule, where and how; `reason` is a case's excuse."""

    rule: Rule
    kernel: str
    text: str
    reason: str = ""
