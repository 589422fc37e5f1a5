"""The transport over DeepEP, in all modes, on the stand-in `fake_deepep`, which checks what the library would.

Plain pytest runs every third check of the low-latency kernels on 2 ranks, and some of every mode on 4;
`pytest -m matrix` all of them, on 1 to 4.
"""

import dataclasses
import functools
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import fake_deepep, layers
from helpers.lost import be_lost, record, recorded

from ep_moe.config import GroupConfig, Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import (
    ROW_ERROR_LIMITS,
    TransportCase,
    check_round,
    check_transport,
    transport_cases,
    worst_row_error,
)
from ep_moe.testing.rounds import compute_experts
from ep_moe.testing.transports import CHECKS
from ep_moe.transport import TRANSPORTS, create_transport
from ep_moe.transport.deepep import DeepEPTransport, library
from ep_moe.transport.deepep.low_latency import low_latency_width

MODES = ("low_latency", "normal", "v2")
SERVED = {mode: (2, 4) if mode == "normal" else (1, 2, 3, 4) for mode in MODES}
SAMPLE = ("mixed-layouts", "flat-repeats", "round-robin", "compact-zero-tokens-on-one-rank", "nvfp4-hidden-2880")
CONFIG = GroupConfig(timeout_secs=2, heartbeat_secs=0.1)


def make_on_fake(mode: str) -> Any:
    """The transport's factory, with the stand-in as `deep_ep`."""
    sys.modules["deep_ep"] = fake_deepep
    return TRANSPORTS[f"deepep_{mode}"]


def check_on_rank(group: EPGroup, mode: str, every: int) -> dict[str, str]:
    """Every `every`-th check on this rank."""
    return check_transport(make_on_fake(mode), group, share=(0, every))


def expected_outcome(case: TransportCase | None) -> str:
    """The error of a dtype that DeepEP does not sum; none for the others."""
    if case is None or case.dtype is torch.bfloat16:
        return ""
    return f"ValueError: dtype ({case.dtype}): DeepEP's combine sums torch.bfloat16 alone"


@pytest.mark.parametrize(
    ("mode", "num_ranks", "every"),
    [
        pytest.param("low_latency", 2, 3, id="a-third"),
        *(
            pytest.param(mode, number, 1, marks=pytest.mark.matrix, id=f"{mode}-{number}-ranks")
            for mode in MODES
            for number in SERVED[mode]
        ),
    ],
)
def test_carries_every_case(mode: str, num_ranks: int, every: int) -> None:
    cases = {case.name: case for case in transport_cases(num_ranks)}
    expected = {name: expected_outcome(cases.get(name)) for name in [*cases, *CHECKS][::every]}
    config = GroupConfig(timeout_secs=60)
    found = launch(check_on_rank, mode, every, num_ranks=num_ranks, config=config, device="cpu")
    assert found == [expected] * num_ranks


NUM_GPUS = num_gpu_ranks()


def check_the_library(group: EPGroup, mode: str) -> dict[str, str]:
    """All checks over the installed DeepEP."""
    return check_transport(TRANSPORTS[f"deepep_{mode}"], group)


@pytest.mark.multigpu
@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, there are {NUM_GPUS}")
@pytest.mark.timeout(900)  # kernels of packing and of quantization compile
@pytest.mark.parametrize("mode", MODES)
def test_the_library_carries_every_case(mode: str) -> None:
    if importlib.util.find_spec(library.MODULE) is None:
        pytest.skip(f"DeepEP is not installed; {library.SOURCES}")
    missing = library.missing_parts(library._import(), mode)
    if missing:
        pytest.skip(f"the installed DeepEP lacks {', '.join(missing)}")
    cases = {case.name: case for case in transport_cases(2)}
    expected = {name: expected_outcome(cases.get(name)) for name in [*cases, *CHECKS]}
    config = GroupConfig(timeout_secs=120)
    assert launch(check_the_library, mode, num_ranks=2, config=config, device="cuda") == [expected] * 2


def check_sample(group: EPGroup) -> list[str]:
    """Some rounds on 4 ranks in every mode, and one of two open rounds; returns what went wrong."""
    wrong = []
    for mode in MODES:
        for case in transport_cases(group.num_ranks):
            if case.name in SAMPLE:
                transport = make_on_fake(mode)(group, case.make_placement(), case.config)
                try:
                    check_round(transport, case, group.device, halves=(True, True))
                except AssertionError as error:
                    wrong.append(f"{mode}: {error}")
                transport.destroy()
        try:
            CHECKS["slots"](make_on_fake(mode), group)
        except AssertionError as error:
            wrong.append(f"{mode}: {error}")
    return wrong


def test_four_ranks_carry_a_sample() -> None:
    assert launch(check_sample, num_ranks=4, config=GroupConfig(timeout_secs=60), device="cpu") == [[]] * 4


def layers_on_rank(group: EPGroup) -> dict[str, float]:
    """A layer with shared experts over each mode: the worst row's error against the same over `collective`."""
    outputs = {}
    for mode in ("collective", *MODES):
        make = TRANSPORTS[mode] if mode in TRANSPORTS else make_on_fake(mode)
        layers.create_transport = lambda _, *made_of, make=make: make(*made_of)
        for layout in (Layout.COMPACT, Layout.FLAT):
            outputs[mode, layout] = layers.run_layer(group, "linear", "fp8_block", layout, torch.bfloat16)
    return {
        f"{mode} {layout.value}": worst_row_error(outputs[mode, layout], outputs["collective", layout])
        for mode in MODES
        for layout in (Layout.COMPACT, Layout.FLAT)
    }


def test_a_layer_runs_over_it() -> None:
    for errors in launch(layers_on_rank, num_ranks=2, device="cpu"):
        assert len(errors) == 6
        assert max(errors.values()) < ROW_ERROR_LIMITS["bfloat16"], errors


def message_of(call: Callable[[], Any]) -> str:
    """The error's type and message."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


BASE = TransportConfig(hidden=2048, max_tokens_per_rank=8)
LIMITS: list[tuple[str, dict[str, Any], int, str]] = [
    ("low_latency", {"hidden": 8208}, 4, "hidden (8208) exceeds 8192, the widest row of DeepEP's low-latency kernels"),
    (
        "low_latency",
        {"max_tokens_per_rank": 600},
        4,
        "exceeds 508, which NVSHMEM_QP_DEPTH (1024) allows; set it to 1202",
    ),
    ("low_latency", {"num_sms": 8}, 4, "num_sms (8): DeepEP's low-latency kernels choose their SMs; use 0"),
    ("normal", {"hidden": 8192}, 4, "hidden (8192) exceeds 8184 in DeepEP's normal kernels"),
    ("normal", {}, 3000, "experts of a rank (1500) exceed 1024"),
    ("v2", {}, 600, "experts of a rank (300) exceed 256, the most of DeepEP's ElasticBuffer"),
    ("v2", {"dtype": torch.float32}, 4, "dtype (torch.float32): DeepEP's combine sums torch.bfloat16 alone"),
    ("v2", {"on_peer_loss": "mask"}, 4, "on_peer_loss ('mask') needs transport 'peer'"),
]


def meet_limits(group: EPGroup) -> tuple[list[str], list[str], str, int]:
    """The errors of LIMITS, of a K for each mode, of a cast, and the number of operations that were begun."""
    found, topk = [], []
    for mode, change, num_experts, _ in LIMITS:
        make, config = make_on_fake(mode), dataclasses.replace(BASE, **change)
        found.append(message_of(lambda m=make, c=config, e=num_experts: m(group, Placement.linear(e, 2), c)))
    for mode in MODES:
        with_k = make_on_fake(mode)(group, Placement.linear(64, 2), dataclasses.replace(BASE, max_topk=64))
        ids = torch.arange(33).expand(2, 33).contiguous()
        routing = Routing(topk_ids=ids, topk_weights=torch.ones(2, 33))
        x = torch.ones(2, 2048, dtype=torch.bfloat16)
        how: dict[str, Any] = {"layout": Layout.COMPACT, "scheme": get_scheme("none")}
        topk.append(message_of(lambda t=with_k, x=x, r=routing, h=how: t.dispatch(x, r, **h)))
        with_k.destroy()
    cast = message_of(lambda: DeepEPTransport(group, Placement.linear(4, 2), BASE, mode="v2", cast=True))
    return found, topk, cast, len(fake_deepep.calls)


def test_errors_name_the_limit_before_anything_is_sent() -> None:
    for found, topk, cast, num_calls in launch(meet_limits, num_ranks=2, device="cpu"):
        for message, (*_, words) in zip(found, LIMITS, strict=True):
            assert words in message, (message, words)
        for message, mode in zip(topk, MODES, strict=True):
            most = 11 if mode == "low_latency" else 32
            assert message == f"ValueError: num_topk (33) exceeds {most}, the most of DeepEP's {mode} kernels"
        assert cast == "ValueError: cast: DeepEP casts in mode 'low_latency' alone, the mode is 'v2'"
        assert num_calls == 0


def test_low_latency_rows_are_as_wide_as_kernels_of_the_version() -> None:
    widths = [low_latency_width(hidden, has_v2) for hidden in (16, 2880, 8192) for has_v2 in (False, True)]
    assert widths == [2048, 2048, 4096, 3072, 8192, 8192]


def meet_unserved(group: EPGroup) -> str:
    """The error of normal kernels on a number of ranks that they are not compiled for."""
    return message_of(lambda: make_on_fake("normal")(group, Placement.linear(3, 3), BASE))


def test_normal_kernels_name_the_numbers_of_ranks() -> None:
    words = "ValueError: num_ranks (3): DeepEP's normal kernels serve 2, 4, 8 and multiples of 8 ranks"
    assert launch(meet_unserved, num_ranks=3, device="cpu") == [words] * 3


def cast_on_rank(group: EPGroup) -> tuple[int, float, float, str]:
    """Rounds in which DeepEP casts: rows that differ from its cast, the largest errors, and a mixed round's error."""
    sys.modules["deep_ep"] = fake_deepep
    case = TransportCase(name="cast", tokens=(5, 7), hidden=2880, layout=Layout.BATCHED, scheme="fp8_block")
    placement, scheme = case.make_placement(), get_scheme(case.scheme)
    transport = DeepEPTransport(group, placement, case.config, mode="low_latency", cast=True)
    everyone = [case.inputs(rank) for rank in range(2)]
    wide = [torch.nn.functional.pad(inputs.x, (0, 3072 - 2880)) for inputs in everyone]
    casts = [fake_deepep._cast(x) for x in wide]
    mine = everyone[group.rank]
    dispatched = transport.dispatch(mine.x, mine.routing, layout=case.layout, scheme=scheme)
    batch, wrong = dispatched.batch, 0
    assert batch.scale is not None
    assert batch.scale.stride() == (batch.scale.shape[1] * batch.scale.shape[2], 1, batch.scale.shape[1])
    for local in range(placement.num_local_experts(group.rank)):
        expert = placement.starts[group.rank] + local
        sources = [
            (rank, token)
            for rank, inputs in enumerate(everyone)
            for token, ids in enumerate(inputs.routing.topk_ids.tolist())
            if expert in ids
        ]
        assert int(batch.expert_num_tokens[local]) == len(sources)
        for row, (rank, token) in enumerate(sources):
            values, scales = casts[rank][0][token, :2880], casts[rank][1][token, :23]
            same = torch.equal(batch.x[local, row].view(torch.uint8), values.view(torch.uint8))
            wrong += not (same and torch.equal(batch.scale[local, row], scales))
    result = transport.combine(compute_experts(batch, placement.starts[group.rank]), dispatched)
    weights, ids = mine.routing.topk_weights.unsqueeze(2), mine.routing.topk_ids.unsqueeze(2)
    real = (casts[group.rank][0].float().view(-1, 24, 128) * casts[group.rank][1].unsqueeze(2)).view(-1, 3072)
    exact = (weights * (real[:, None, :2880] * (ids + 1.5) - ids)).sum(1)
    error = ((result.float() - exact).norm(dim=1) / exact.norm(dim=1)).max()
    plain = DeepEPTransport(group, placement, case.config, mode="low_latency")
    check_round(plain, case, group.device)
    other = message_of(
        lambda: transport.dispatch(
            case.inputs(0).x if group.rank else dataclasses.replace(case, quantized_input=True).inputs(0).x,
            case.inputs(0).routing,
            layout=case.layout,
            scheme=scheme,
        )
    )
    return wrong, float(error), float((real[:, :2880] - mine.x.float()).abs().max()), other


def test_low_latency_kernels_may_cast() -> None:
    for wrong, error, rounding, other in launch(cast_on_rank, num_ranks=2, device="cpu"):
        assert wrong == 0
        assert error < 1e-2  # of bfloat16
        assert 0 < rounding < 0.2  # of e4m3
        assert other.startswith("ValueError: ranks disagree on the payload")


def lose_rank(group: EPGroup, mode: str, folder: Path, how: str, *, midway: bool) -> None:
    """Run rounds until rank 1 is lost, before its fourth dispatch or after it; record rank 0's error and its time."""
    case = TransportCase(name="lost", tokens=(4, 4))
    transport = make_on_fake(mode)(group, case.make_placement(), case.config)
    inputs, scheme = case.inputs(group.rank), get_scheme("none")
    start = time.monotonic()
    try:
        for round_ in range(1000):
            start = time.monotonic()
            if (group.rank, round_, midway) == (1, 3, False):
                be_lost(how)
            dispatched = transport.dispatch(inputs.x, inputs.routing, layout=case.layout, scheme=scheme)
            if (group.rank, round_) == (1, 3):
                be_lost(how)
            transport.combine(compute_experts(dispatched.batch, transport.placement.starts[group.rank]), dispatched)
    except PeerLostError as error:
        again = message_of(transport.check)
        record(folder, group.rank, (error.ranks, time.monotonic() - start < 8, again[:13]))
        raise


@pytest.mark.parametrize(
    ("mode", "how", "midway"),
    [
        pytest.param("low_latency", "SIGKILL", True, id="low_latency-killed-before-its-combine"),
        pytest.param("v2", "SIGKILL", False, id="v2-killed-before-its-dispatch"),
        pytest.param("normal", "SIGSTOP", False, id="normal-stopped-before-its-dispatch"),
    ],
)
def test_a_lost_rank_is_named_within_the_deadline(mode: str, how: str, midway: bool, tmp_path: Path) -> None:
    target = functools.partial(lose_rank, midway=midway)
    with pytest.raises(RankFailedError, match="rank 1"):
        launch(target, mode, tmp_path, how, num_ranks=2, config=CONFIG, device="cpu", grace_secs=10)
    assert recorded(tmp_path) == {0: ((1,), True, "PeerLostError")}


def a_module(**parts: Any) -> types.ModuleType:
    """A module `deep_ep` with these parts."""
    module = types.ModuleType("deep_ep")
    module.__file__, module.__spec__ = "/opt/deep_ep/__init__.py", fake_deepep.__spec__
    module.__dict__.update(parts)
    return module


class OldBuffer(fake_deepep.Buffer):
    """A V1 whose low-latency kernels have no hook."""

    def low_latency_dispatch(self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int, num_experts: int): ...  # noqa: ANN201, D102


def fail_to_import(name: str) -> types.ModuleType:
    """As DeepEP's own import does, if NCCL is another than it was built with."""
    raise AssertionError("Invalid NCCL versions")


@pytest.mark.parametrize(
    ("module", "mode", "chosen"),
    [
        (
            a_module(),
            "auto",
            "(version unknown; classes: none) lacks class Buffer; build it from github.com/deepseek-ai",
        ),
        (a_module(Buffer=fake_deepep.Buffer), "auto", "low_latency"),
        (a_module(Buffer=fake_deepep.Buffer), "v2", "classes: Buffer) lacks class ElasticBuffer"),
        (a_module(Buffer=OldBuffer, __version__="1.0"), "low_latency", "low_latency_dispatch(return_recv_hook=)"),
        (a_module(Buffer=OldBuffer), "normal", "normal"),
        (fake_deepep, "auto", "v2"),
        (fake_deepep, "fast", "mode ('fast') is not one of auto, low_latency, normal, v2"),
    ],
    ids=["nothing", "v1", "v1-as-v2", "old-v1", "old-v1-normal", "v2", "unknown"],
)
def test_says_which_library_is_found_and_what_it_lacks(
    module: types.ModuleType, mode: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    try:
        found = library.find_library(mode, 256).mode
    except (ValueError, RuntimeError) as error:
        found = str(error)
        assert mode == "fast" or "the deep_ep at /opt/deep_ep/__init__.py (version" in found
    assert found == chosen if chosen in MODES else chosen in found


def test_a_library_that_is_absent_or_broken_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(RuntimeError, match="there is no module deep_ep; build it from .*the package deep_ep on PyPI"):
        library.find_library("auto", 1)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deepep)
    monkeypatch.setattr(library.importlib, "import_module", fail_to_import)
    with pytest.raises(RuntimeError, match="fake_deepep.py cannot be imported: AssertionError: Invalid NCCL versions"):
        library.find_library("auto", 1)
    strange = mock.Mock(side_effect=TypeError("a stranger's module"))
    monkeypatch.setattr(library.importlib, "import_module", strange)
    with pytest.raises(RuntimeError, match="fake_deepep.py cannot be imported: TypeError: a stranger's module"):
        library.find_library("auto", 1)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    with pytest.raises(RuntimeError, match="there is no module deep_ep"):
        library.find_library("auto", 1)
    compiled = a_module(Buffer=type("Buffer", (), {**dict.fromkeys(library.NEEDED["normal"][1], dict.pop)}))
    assert library.missing_parts(compiled, "normal") == []
    with pytest.raises(RuntimeError, match="needs a process group"):
        create_transport("deepep", EPGroup.single("cpu"), Placement.linear(4, 1), BASE)


def break_the_library(group: EPGroup) -> list[str]:
    """What the stand-in says of calls that the library would not take."""
    buffer = fake_deepep.Buffer(group.process_group, 0, 1 << 30, True, 4, explicitly_destroy=True)
    x, ids, weights = torch.ones(2, 2048, dtype=torch.bfloat16), torch.tensor([[0, 1], [2, -1]]), torch.ones(2, 2)

    def combine(rows: torch.Tensor, weights: torch.Tensor) -> None:
        buffer._pending = False
        _, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False, return_recv_hook=True)
        hook()
        buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)

    rows = torch.zeros(4, 4, 2048, dtype=torch.bfloat16)
    elastic = fake_deepep.ElasticBuffer(group.process_group, num_max_tokens_per_rank=4, hidden=2048)
    calls = [
        lambda: buffer.low_latency_dispatch(x.float(), ids, 4, 4, use_fp8=False),
        lambda: buffer.low_latency_dispatch(x, ids.int(), 4, 4, use_fp8=False),
        lambda: combine(rows[:3], weights),
        lambda: combine(rows.transpose(0, 1), weights),
        lambda: combine(rows, weights.t()[::1].t().double()),
        lambda: buffer.low_latency_dispatch(x[:, :1024].contiguous(), ids, 4, 4, use_fp8=False),
        lambda: elastic.dispatch(
            x, torch.zeros(2, 2, dtype=torch.int64), weights, num_experts=4, num_max_tokens_per_rank=4
        ),
        lambda: elastic.dispatch(x, ids, weights, num_experts=4, num_max_tokens_per_rank=1),
    ]
    said = []
    for call in calls:
        buffer._pending = False
        said.append(message_of(call))
    buffer._pending = True
    said.append(message_of(lambda: buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)))
    return said


def test_the_stand_in_refuses_what_the_library_would() -> None:
    (said,) = launch(break_the_library, num_ranks=1, device="cpu")
    words = [
        "x is torch.float32, not torch.bfloat16",
        "topk_idx is torch.int32",
        "x.size(1) ==",
        "x must be 3-D, contiguous",
        "topk_weights is torch.float64",
        "laid out for (4, 2048, 4), not for (4, 1024, 4)",
        "an expert repeats",
        "too many tokens",
        "would be cleared",
    ]
    for message, expected in zip(said, words, strict=True):
        assert expected in message, (message, expected)
