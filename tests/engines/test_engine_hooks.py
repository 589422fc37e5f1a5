"""What plug-ins do without their engine: checks of it, calls that fail, which rows a rank sends.

Their contract tests with real engines are in tests/engines; here modules of an engine hold mocks.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import ep_moe.engines.vllm
from ep_moe.config import Layout, MoEConfig, TransportConfig
from ep_moe.engines.common.plugin import Needs
from ep_moe.engines.common.rows import RowShare, rows_to_send, whole_output
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix, get_scheme
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

TESTED = ("1.0", "2.0")
EXPERTS, HIDDEN, ROWS, TOPK = 6, 32, 5, 2


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("json.nowhere: dumps", "engine 3.0 has no json.nowhere.dumps"),
        ("json.decoder: JSONDecoder json: JSONEncoder.paint", "engine 3.0 has no json.JSONEncoder.paint"),
        ("json: dumps(obj,\n  colour)", r"json.dumps takes \(obj, .*\(obj, colour\)"),
        ("json:\n  dump(fp, obj)", r"json.dump takes \(obj, fp, "),
    ],
)
def test_a_missing_hook_is_named(hook: str, words: str) -> None:
    good, log = "json: dump(obj, fp) JSONEncoder.encode ", mock.Mock(spec=logging.Logger)
    Needs("engine", TESTED, good).check("2.0", log)
    log.warning.assert_not_called()
    with pytest.raises(RuntimeError, match=words + ".*1.0 and 2.0"):
        Needs("engine", TESTED, good + hook).check("3.0", log)
    log.warning.assert_called_once()


def test_without_the_switch_no_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_MOE_VLLM", raising=False)
    ep_moe.engines.vllm.register()  # vLLM is not installed here: importing it would fail
    monkeypatch.setenv("EP_MOE_VLLM", "1")
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        ep_moe.engines.vllm.register()


class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of an engine's modules, whose attributes are mocks but for the classes that ours derive from."""

    bases: dict[str, Any] = {
        **dict.fromkeys(("BaseDispatcher", "FusedMoEPrepareAndFinalizeModular", "FusedMoEExpertsModular"), object),
        "ExpertTokensMetadata": dataclasses.make_dataclass(
            "ExpertTokensMetadata", ("expert_num_tokens", "expert_num_tokens_cpu")
        ),
    }

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        engine = name.partition(".")[0] in ("sglang", "vllm")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if engine else None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self.bases.get(name) or mock.MagicMock(name=name)

        module.__dict__["__getattr__"] = attribute


@contextlib.contextmanager
def plug_in(name: str) -> Iterator[types.ModuleType]:
    """A module of `ep_moe.engines`, imported beside mocks of its engine."""
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "meta_path", [Mocks(), *sys.meta_path]):
        yield importlib.import_module(f"ep_moe.engines.{name}")


def one_layer() -> ExpertParallelMoE:
    """A layer on one rank."""
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, generator=generator) / 6
    weights = ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w13[:, :HIDDEN].mT.contiguous()))
    group = EPGroup.single(torch.device("cpu"))
    sizes = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=8, dtype=torch.float32, num_slots=2)
    transport = create_transport("local", group, Placement.linear(EXPERTS, 1), sizes)
    config = MoEConfig(hidden=HIDDEN, intermediate=HIDDEN, num_experts=EXPERTS, layout=Layout.COMPACT)
    return ExpertParallelMoE(config, weights, transport)


def some_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights."""
    generator = torch.Generator().manual_seed(1)
    weights, ids = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOPK)
    return torch.randn(ROWS, HIDDEN, generator=generator), ids.to(torch.int32), weights


def failures(
    made: ExpertParallelMoE, call: Callable[[], torch.Tensor], faults: dict[str, tuple[Any, str]]
) -> list[str]:
    """Fail at each place. A failing call is one round, as it is on the other ranks, and ends it; the next is right."""
    x, ids, weights = some_rows()
    expected, transport, wrong = made.forward_routed(x, ids, weights), made.transport, []
    assert torch.equal(call(), expected)
    for name, (target, attribute) in faults.items():
        begun, once = transport.num_rounds, itertools.chain([MemoryError(name)], itertools.repeat(mock.DEFAULT))
        fault = mock.patch.object(target, attribute, side_effect=once, wraps=getattr(target, attribute))
        with fault, pytest.raises(MemoryError, match=name):
            call()
        if transport.num_rounds != begun + 1 or transport.open_slots:
            wrong.append(f"{name}: {transport.num_rounds - begun} rounds, open {transport.open_slots}")
            transport.abandon()
        assert torch.equal(call(), expected), name
    transport.dispatch_send(x, made.prepare(x, (ids, weights))[1], layout=Layout.COMPACT, scheme=made.scheme)
    begun = transport.num_rounds
    with pytest.raises(RuntimeError, match="slot 0"):  # which code of the engine left open
        call()
    if transport.num_rounds != begun + 1 or transport.open_slots:
        wrong.append(f"left open: {transport.num_rounds - begun} rounds, open {transport.open_slots}")
        return wrong
    assert torch.equal(call(), expected)
    return wrong


@pytest.mark.parametrize("halves", [False, True])
def test_a_failing_call_of_sglang_ends_its_round(halves: bool) -> None:
    made, (x, ids, weights) = one_layer(), some_rows()
    with plug_in("sglang.dispatcher") as dispatchers:
        method, between = sys.modules["ep_moe.engines.sglang.method"], mock.Mock(hook_dict={})
        state = types.SimpleNamespace(
            of_step=lambda: made,
            kind=types.SimpleNamespace(num_topk=TOPK),
            weights_on_input=False,
            experts=functools.partial(method.LayerMethod.experts, None),
        )
        dispatcher = dispatchers.EpMoeDispatcher(state)
        dispatcher._between = between
        topk = types.SimpleNamespace(topk_ids=ids, topk_weights=weights)

        def call() -> torch.Tensor:
            if not halves:
                return dispatcher.combine(dispatcher.dispatch(x, topk).compute())
            dispatcher.dispatch_a(x, topk)
            dispatcher.combine_a(dispatcher.dispatch_b().compute())
            return dispatcher.combine_b()

        faults = {
            "rows": (dispatchers, "rows_to_send"),
            "send": (made.transport, "dispatch_send"),
            "recv": (made.transport, "dispatch_recv"),
            "record": (dispatchers, "get_global_expert_distribution_recorder"),
            "experts": (made, "experts"),
            "combine send": (made.transport, "combine_send"),
            "combine recv": (made.transport, "combine_recv"),
        }
        wrong = failures(made, call, faults)
        if not halves:
            between.hook_dict, between.side_effect = {0: None}, None
            wrong += failures(made, call, {"hook": (dispatcher, "_between")})
        assert wrong == []


def test_a_failing_call_of_vllm_ends_its_round() -> None:
    made, (x, ids, weights) = one_layer(), some_rows()
    with plug_in("vllm.method") as method:
        module = sys.modules["ep_moe.engines.vllm.prepare_finalize"]
        module.current_slot, module.without_padding = lambda: 0, lambda ids, share: ids
        options = module.RoundOptions(layout=Layout.COMPACT, scheme=made.scheme, layer=made.tag, sized=True)
        exchange = module.EpMoePrepareAndFinalize(made.transport, options)

        def apply(hidden_states: torch.Tensor, topk_weights: Any, topk_ids: Any, **_: Any) -> torch.Tensor:
            metadata = exchange.prepare(hidden_states, topk_weights, topk_ids, EXPERTS, None, False, None)[2]
            y, output = made.experts(metadata.batch, made.weights), torch.empty_like(hidden_states)
            exchange.finalize(output, y, topk_weights, topk_ids, False, None)
            return output

        kernel = types.SimpleNamespace(prepare_finalize=exchange, apply=apply)
        state = mock.Mock(_local=None, _kernels={None: kernel}, _layout=mock.Mock(return_value=None))
        given = {"x": x, "topk_ids": ids, "topk_weights": weights, "shared_experts": None, "shared_experts_input": None}
        call = functools.partial(method.LayerMethod.apply, state, mock.Mock(), **given)
        faults = {
            "rows": (module, "rows_to_send"),
            "send": (made.transport, "dispatch_send"),
            "recv": (made.transport, "dispatch_recv"),
            "experts": (made, "experts"),
            "combine send": (made.transport, "combine_send"),
            "combine recv": (made.transport, "combine_recv"),
            "share": (module, "whole_output"),
        }
        assert failures(made, call, faults) == []
        begun = made.transport.num_rounds
        broken = mock.patch.object(made.transport, "dispatch_send", side_effect=MemoryError)
        with broken, pytest.raises(MemoryError):  # without `begin`, as in a kernel made by hand
            exchange.prepare(x, weights, ids, EXPERTS, None, False, None)
        exchange.fail(ROWS, TOPK)
        assert made.transport.num_rounds == begun + 1
        quantized = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="quant_dtype is torch.float8_e4m3fn, scheme 'none' sends"):
            exchange.prepare(x, weights, ids, EXPERTS, None, False, quantized)
        with pytest.raises(ValueError, match="topk_ids"):  # and not one of what ends the round
            call(topk_ids=ids[:, 0])
        assert made.transport.open_slots == ()


@pytest.mark.parametrize(("num_rows", "ranks"), [(0, 3), (1, 3), (7, 3), (9, 3), (10, 4)])
def test_shares_of_ranks_are_all_rows_once(num_rows: int, ranks: int) -> None:
    """Of ranks with equal rows; and no rank of a group over which the engine has spread them has more than the most."""
    x, whole = torch.arange(float(num_rows * 4)).view(num_rows, 4), torch.zeros(num_rows, 4)
    ids, weights = torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, 1)
    sent = []
    for rank in range(ranks):
        share = RowShare(sharers=ranks, rank=rank)
        rows, routing = rows_to_send(x, ids, weights, share=share, scheme=get_scheme("none"))
        assert isinstance(rows, torch.Tensor)
        assert len(rows) == len(routing.topk_ids) <= share.most(num_rows)
        output = torch.full_like(x, torch.nan)
        whole_output(share, rows, output)
        whole += output
        sent.append(rows)
    assert torch.equal(torch.cat(sent), x)
    assert torch.equal(whole, x)
    most = max(map(len, sent))
    assert RowShare(sharers=ranks).most(num_rows) == RowShare(chunks=ranks).most(num_rows) == most
    assert RowShare(chunks=ranks, rank=1).own(most) == slice(0, most)
    assert RowShare(sharers=2, chunks=ranks).most(2 * num_rows) == most
