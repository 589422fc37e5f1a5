"""Starts ranks for these tests, and changes the launchers' tuning."""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ep_moe.config import GroupConfig
from ep_moe.group import EPGroup
from ep_moe.kernels.exchange.dispatch import Roles
from ep_moe.launch import launch
from ep_moe.transport.one_sided import combine_launcher, dispatch_launcher, memory, round_plan, transport, tuning

# what ranks import: their tests; the first launch of a process chooses for all
PRELOADED = ("pytest", "nvlink.common", "nvlink.ready", "ep_moe.layer", "ep_moe.testing")


def on_ranks(
    check: Callable[..., Any],
    *args: Any,
    num_ranks: int = 2,
    timeout_secs: float = 60.0,
    preload: tuple[str, ...] = PRELOADED,
) -> list[Any]:
    """Run `check(group, *args)` on CPU ranks; returns what each returns."""
    config = GroupConfig(timeout_secs=timeout_secs)
    return launch(hurried, check, *args, num_ranks=num_ranks, config=config, device="cpu", preload=preload)


def hurried(group: EPGroup, check: Callable[..., Any], *args: Any) -> Any:
    """Run a check on this rank, which `nvlink.ready` has prepared."""
    importlib.import_module("nvlink.ready")
    return check(group, *args)


@contextlib.contextmanager
def patched(**values: Any) -> Iterator[None]:
    """Replace names of the launchers wherever they have been imported; unknown names are an error.

    A transport reads them when it is made: make it inside.
    """
    modules = (tuning, memory, round_plan, dispatch_launcher, combine_launcher, transport)
    before = [(m, name, getattr(m, name)) for m in modules for name in values if hasattr(m, name)]
    assert {name for _, name, _ in before} == set(values), f"no launcher knows all of {sorted(values)}"
    for module, name, _ in before:
        setattr(module, name, values[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Numbers of programs by role in a launch; a single program with all roles is `fused`."""

    announcers: int = 1
    senders: int = 1
    receivers: int = 1
    fused: bool = False
    small_pieces: bool = False  # a program moves few tokens and rows at a time
    rows_in_flight: int = 0  # of a token, loaded at a time by the senders of a combine; 0: as usual


@contextlib.contextmanager
def with_programs(programs: Programs) -> Iterator[None]:
    """Launch the exchange kernels of transports that are made in the block with these numbers of programs."""
    kind = tuning.Tuning
    dispatch, combine = kind.dispatch, kind.combine
    shares = {"senders": programs.senders, "receivers": programs.receivers}

    def tuned_dispatch(self: tuning.Tuning, *args: Any, **kwargs: Any) -> tuning.DispatchTuning:
        pieces = {"word_block": 32, "taken_block": 128, "taken_tokens": 4} if programs.small_pieces else {}
        return dataclasses.replace(dispatch(self, *args, **kwargs), announcers=programs.announcers, **shares, **pieces)

    def tuned_combine(self: tuning.Tuning, *args: Any) -> tuning.CombineTuning:
        pieces = {"sent_block": 64, "summed_block": 128, "rows_in_flight": 1} if programs.small_pieces else {}
        pieces |= {"rows_in_flight": programs.rows_in_flight} if programs.rows_in_flight else {}
        return dataclasses.replace(combine(self, *args), **shares, **pieces)

    fused = {
        "_dispatch_kernel": _Fused(dispatch_launcher._dispatch_kernel),
        "_combine_kernel": _Fused(combine_launcher._combine_kernel),
    }
    kind.dispatch, kind.combine = tuned_dispatch, tuned_combine  # type: ignore[method-assign]
    try:
        with patched(**fused if programs.fused else {}):
            yield
    finally:
        kind.dispatch, kind.combine = dispatch, combine  # type: ignore[method-assign]


class _Fused:
    """A kernel whose launches of both halves have one program, which announces, sends and receives."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.fn = kernel, kernel.fn

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch_one(*args: Any, **options: Any) -> None:
            signature = inspect.signature(self._kernel.fn)
            extra = {name: options.pop(name) for name in list(options) if name not in signature.parameters}
            named = signature.bind(*args, **options).arguments
            if not (named["halves"].SEND and named["halves"].RECEIVE):
                self._kernel[grid](**named, **extra)
                return
            roles = Roles(announcers=1, senders=1, first_receiver=0)
            alone = {"roles": roles, "senders": roles.senders, "first_receiver": roles.first_receiver}
            self._kernel[(1,)](**named | {n: v for n, v in alone.items() if n in named}, **extra)

        return launch_one
