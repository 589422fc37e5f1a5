"""One thread for these tests, and their calls by torch or by kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls import moved
from helpers.threads import one_thread  # noqa: F401 - a fixture
from interpreted.common import CAN_RUN, DEVICE, INTERPRETING, use_kernels

WRITTEN = ("output", "routing_replay_out", "C")
BY_KERNELS = [pytest.mark.gpu, pytest.mark.skipif(not CAN_RUN, reason="needs a GPU or Triton's interpreter")]


def call_on_device(call: Callable[..., Any], **given: Any) -> Any:
    """A call on arguments moved to the device, with results and written arguments in the caller's memory."""
    there = moved(given, DEVICE)
    found = call(**there)
    for name in WRITTEN:
        if isinstance(given.get(name), torch.Tensor):
            given[name].copy_(there[name])

    def back(result: torch.Tensor) -> torch.Tensor:
        return next((given[name] for name in WRITTEN if there.get(name) is result), result.cpu())

    if found is None or isinstance(found, torch.Tensor):
        return None if found is None else back(found)
    return [back(result) for result in found]


@pytest.fixture(params=["torch", pytest.param("kernels", marks=BY_KERNELS)])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a call with tensors in CPU memory, by torch or by kernels."""
    if request.param == "torch":
        yield lambda call, **given: call(**given)
        return
    from ep_moe.functional import plans  # other tests do without these imports

    if INTERPRETING:
        use_kernels(monkeypatch)
    plans.plan_cache.cache_clear()
    yield call_on_device
    plans.plan_cache.cache_clear()
