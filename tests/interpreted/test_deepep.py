"""Rounds over the stand-in for DeepEP of a rank whose tokens are packed by kernels, as on every GPU."""

import sys
from typing import Any

from helpers import fake_deepep

import ep_moe.layout
from ep_moe.config import GroupConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layout import triton
from ep_moe.testing import check_round, transport_cases
from ep_moe.testing.transports import CHECKS
from ep_moe.transport import TRANSPORTS
from ep_moe.transport.deepep import low_latency, per_rank
from interpreted.common import DEVICE, INTERPRETING

CASES = (
    "mixed-layouts",
    "flat-repeats",
    "round-robin",
    "compact-zero-tokens-on-one-rank",
    "compact-nvfp4-hidden-48",
    "batched-fp8_token",
    *(() if INTERPRETING else ("nvfp4-hidden-2880", "flat-fp8_block", "compact-fp8_tensor")),
    *(() if INTERPRETING else ("mxfp8-mixed-layouts", "many-tokens")),
)
EXCHANGES = {"low_latency": low_latency.LowLatency, "v2": per_rank.Elastic}  # those that serve one rank


def check_on_rank(group: EPGroup) -> dict[str, str]:
    """What went wrong in the cases and checks, with the stand-in's tensors on the CPU and the transport's on the GPU.

    A transport's tensors are copies of the stand-in's, in the interpreter too.
    """
    if INTERPRETING:
        from quick_interpreter import hurry  # imports Triton, which not every machine has

        hurry()
    sys.modules["deep_ep"] = fake_deepep
    ep_moe.layout._implementation = lambda _: triton
    wrong = {}
    for mode, kind in EXCHANGES.items():
        create = kind.__init__

        def init(self: Any, *args: Any, create: Any = create, **options: Any) -> None:
            create(self, *args, **options)
            self._buffer = fake_deepep.OnDevice(self._buffer, group.device)

        kind.__init__ = init
        make = TRANSPORTS[f"deepep_{mode}"]
        for case in transport_cases(group.num_ranks):
            if case.name in CASES:
                transport = make(group, case.make_placement(), case.config)
                try:
                    check_round(transport, case, group.device, halves=(True, True))
                except (AssertionError, ValueError) as error:
                    wrong[f"{mode}, {case.name}"] = str(error)
                transport.destroy()
        for name in ("num_tokens", *(() if INTERPRETING else ("slots", "abandon", "sit_out", "refusals"))):
            try:
                CHECKS[name](make, group)
            except (AssertionError, ValueError) as error:
                wrong[f"{mode}, {name}"] = str(error)
    return wrong


def test_carries_a_sample() -> None:
    config = GroupConfig(timeout_secs=120)
    assert launch(check_on_rank, num_ranks=1, config=config, device=DEVICE.type) == [{}]
