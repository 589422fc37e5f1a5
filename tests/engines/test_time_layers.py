"""The program that times engines' layers, without an engine: what it checks, and the rows that it writes."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import time_layers
import torch

from ep_moe.group import EPGroup
from ep_moe.report.page import render
from ep_moe.report.records import OURS, RowsFile, read_records

SMALL = time_layers.Case(
    preset="qwen3-30b", hidden=64, intermediate=32, num_experts={1: 8, 2: 8}, num_topk=2, scheme="none"
)
TOKENS = 5


class Stub:
    """An engine of one rank whose layers, ours too, are loops over experts in torch."""

    name, version, device, backends, equal_rows = "stub", "1.0", torch.device("cpu"), ("triton", "auto"), False
    words = {"ranks": "alone", "a2a": ""}

    def __init__(self, spoiled: str = "", how: Callable[[Any], None] = lambda layer: None) -> None:
        self._spoiled, self._how, self._ours = spoiled, how, False

    def build(self, case: Any, backend: str, label: str, fill: Callable[[Any], None]) -> Any:
        experts, (inner, hidden) = case.num_experts[1], (case.intermediate, case.hidden)
        layer = torch.nn.Module()
        layer.label, layer.lost = label.partition(".")[0], 0
        layer.kernel = backend
        layer.w13_weight = torch.nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16))
        layer.w2_weight = torch.nn.Parameter(torch.empty(experts, hidden, inner, dtype=torch.bfloat16))
        fill(layer)
        assert (layer.label == OURS) == self._ours
        if layer.label == self._spoiled:
            self._how(layer)
        return layer

    def switch_on(self) -> None:
        self._ours = True

    def kernel_of(self, layer: Any) -> str:
        return layer.kernel

    def group_of(self, layer: Any) -> EPGroup:
        assert layer.label == OURS
        return EPGroup.single(torch.device("cpu"))

    def route(self, layer: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.softmax(-1).topk(SMALL.num_topk, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def call_of(self, layer: Any, x: torch.Tensor, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        ids, weights = self.route(layer, logits)

        def call() -> torch.Tensor:
            output = torch.zeros(x.shape, dtype=torch.float32)
            for token in range(layer.lost, x.shape[0]):
                for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                    gate, up = (layer.w13_weight[expert].float() @ x[token].float()).chunk(2)
                    inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                    output[token] += weight * (layer.w2_weight[expert].float() @ inner)
            return output.bfloat16()

        return call


def swap(layer: Any) -> None:
    """Give two experts each other's weights."""
    layer.w2_weight.data[:] = layer.w2_weight.data.flip(0)


def lose(layer: Any) -> None:
    """Leave out a token."""
    layer.lost = 1


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setitem(time_layers.CASES, "bf16", SMALL)
    return argparse.Namespace(rank=0, nproc=1, case=["bf16"], tokens=[TOKENS], budget_secs=60.0, kernels=False)


def run(engine: Stub, options: argparse.Namespace, file: RowsFile | None = None) -> time_layers.Timer:
    timer = time_layers.Timer(engine, options, file or RowsFile())
    with torch.no_grad():
        timer.run()
    return timer


def test_rows_are_written_and_shown_by_the_report(options: argparse.Namespace, tmp_path: Path) -> None:
    file = RowsFile(append=tmp_path / "engines.jsonl", commit="0123abc")
    timer = run(Stub(), options, file)
    assert timer.failed == []
    (record,) = read_records(tmp_path)
    assert record == timer.records[0]
    assert record.bench == "engine"
    assert record.shapes["tokens_per_rank"] == TOKENS
    assert record.setup["engine_version"] == "1.0"
    assert record.setup["auto_kernel"] == "auto"
    for theirs in (record.baselines["triton"], record.baselines["auto"]):
        assert theirs["time_ratio"] == pytest.approx(record.figures["call_us"] / theirs["call_us"])
    assert record.figures["worst_row_error"] < 1e-2
    page = render([record], tmp_path / "rows")[tmp_path / "rows" / "results" / "engine.md"]
    for title in ("time / triton's", "time / auto's", "ours us"):
        assert f"| {title}" in page
    assert f"({record.baselines['triton']['time_ratio']:.2f}, error" in time_layers.line_of(record)


@pytest.mark.parametrize("how", [swap, lose])
def test_a_wrong_layer_is_not_timed(options: argparse.Namespace, how: Callable[[Any], None]) -> None:
    for label in (OURS, "triton"):
        timer = run(Stub(label, how), options)
        assert timer.records == []
        assert timer.failed == [f"qwen3-30b, {TOKENS} tokens"]
    timer = run(Stub("auto", how), options)  # the others are compared without it
    assert list(timer.records[0].baselines) == ["triton"]
    assert len(timer.failed) == 1


def test_no_measurement_begins_after_the_budget(options: argparse.Namespace) -> None:
    options.budget_secs = -1.0
    timer = run(Stub(), options)
    assert timer.records == []
    assert timer.failed == [f"qwen3-30b, {TOKENS} tokens: left out, the time ran out"]


def test_a_failing_case_does_not_end_the_others(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(time_layers.CASES, "fp8", dataclasses.replace(SMALL, scheme="fp8_block", hidden=128))
    options.case = ["fp8", "bf16"]  # the stub's layers have no parameters for scales
    timer = run(Stub(), options)
    assert timer.failed == ["build fp8"]
    assert len(timer.records) == 1


def test_no_work_buffer_grows_once_a_graph_has_its_address(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sharing(Stub):
        """Its layers share a work buffer, which grows; each takes more than the one before."""

        most = {"triton": 1, "auto": 2, OURS: 3}
        size = 0

        def call_of(self, layer: Any, x: torch.Tensor, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
            inner = super().call_of(layer, x, logits)

            def call() -> torch.Tensor:
                self.size = max(self.size, self.most[layer.label])
                return inner()

            return call

    def capture(engine: Sharing, call: Callable[[], torch.Tensor]) -> time_layers.Captured:
        output, size = call(), engine.size

        def replay() -> None:
            assert engine.size == size, "the graph's buffer is gone"
            output.copy_(call())

        return time_layers.Captured(replay, output)

    monkeypatch.setattr(time_layers, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(time_layers, "capture", capture)
    timer = run(Sharing(), options)
    assert timer.failed == []
    assert timer.records[0].figures["worst_graph_row_error"] == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--engine", "vllm", "--tokens", "0"], "--tokens ([0]) are not from 1 to 4096"),
        (["--engine", "vllm", "--tokens", "4097"], "--tokens ([4097]) are not from 1 to 4096"),
        (["--engine", "vllm", "--nproc", "2", "--gpus", "1"], "--gpus (1) are not 2 numbers with commas between"),
        (["--engine", "vllm", "--budget-secs", "0"], "--budget-secs (0.0) must be positive"),
        (["--engine", "vllm", "--append", "rows.jsonl"], "append needs --commit"),
        (["--engine", "tgi"], "invalid choice: 'tgi'"),
    ],
)
def test_bad_options(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        time_layers.parse(words)
    assert error in capsys.readouterr().err
