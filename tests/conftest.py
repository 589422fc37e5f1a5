"""Setup shared by all tests."""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import separate
from interpreted.common import CAN_RUN, DEVICE, INTERPRETING

from ep_moe.app.start import PRELOAD
from ep_moe.launch import start_server

# a shell starts background jobs with SIGINT ignored, which processes started by tests would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that wait for separate processes to the end."""
    items.sort(key=lambda item: item.get_closest_marker("separate") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that forks ranks, and the groups of files that run in separate processes."""
    if session.config.option.collectonly:
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # in a separate process, whose ranks import less
    if not interpreted and not torch.cuda.is_available():  # imports may initialize CUDA, which must not be forked
        start_server((*PRELOAD, "pytest", "ep_moe.testing"))
    marks = [item.get_closest_marker("separate") for item in session.items]
    separate.start([mark.args[0] for mark in marks if mark])


def pytest_sessionfinish() -> None:
    """End files that still run, after Ctrl-C for example."""
    separate.stop()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in a test, whatever ran before it in this process."""
    torch.manual_seed(0)


WRITTEN = ("output", "routing_replay_out")
BY_KERNELS = [pytest.mark.gpu, pytest.mark.skipif(not CAN_RUN, reason="needs a GPU or Triton's interpreter")]


def call_on_device(call: Callable[..., Any], **given: Any) -> Any:
    """A call on tensors moved to the device, with results and written arguments in the caller's memory."""
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    found = call(**moved)
    for name in WRITTEN:
        if isinstance(given.get(name), torch.Tensor):
            given[name].copy_(moved[name])

    def back(result: torch.Tensor) -> torch.Tensor:
        return next((given[name] for name in WRITTEN if moved.get(name) is result), result.cpu())

    return back(found) if isinstance(found, torch.Tensor) else [back(result) for result in found]


@pytest.fixture(params=["torch", pytest.param("kernels", marks=BY_KERNELS)])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a call with tensors in CPU memory, by torch or by kernels."""
    if request.param == "torch":
        yield lambda call, **given: call(**given)
        return
    from ep_moe.experts import create_experts  # other tests do without these imports
    from ep_moe.functional import common, plans
    from ep_moe.functional.sglang import gemm
    from ep_moe.local_moe.row_gemm import gemm_rows

    if INTERPRETING:  # "auto" means torch there
        monkeypatch.setattr(
            common, "create_experts", lambda name, *given, **more: create_experts("triton", *given, **more)
        )
        monkeypatch.setattr(gemm, "gemm_rows", functools.partial(gemm_rows, kernels=True))
    plans.plan_cache.cache_clear()
    yield call_on_device
    plans.plan_cache.cache_clear()
