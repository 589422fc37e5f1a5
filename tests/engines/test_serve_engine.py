"""The program that runs engines whole, with an engine that is a stand-in: what it asks, measures and compares."""

import asyncio
import importlib.metadata
import json
import os
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import releases
import serve_engine
import serve_models
import serve_sglang
import serve_vllm
import torch


class Echo:
    """Answers with the prompt's tokens, two at a time."""

    version = "1.0"

    def __init__(self, spoiled: bool = False, lost: int = 0) -> None:
        self._spoiled, self._lost = spoiled, lost
        self.ranks = list[int | None]()

    async def stream(self, prompt: list[int], new_tokens: int, rank: int | None) -> AsyncIterator[list[int]]:
        self.ranks.append(rank)
        tokens = prompt[: new_tokens - self._lost]
        if self._spoiled:
            tokens = [*tokens[:-1], -1]
        for at in range(0, len(tokens), 2):
            await asyncio.sleep(0)
            yield tokens[at : at + 2]

    def close(self) -> None:
        pass


def options(tmp_path: Path, *words: str) -> serve_engine.argparse.Namespace:
    return serve_engine.parse(["--engine", "vllm", "--logs", str(tmp_path / "logs"), *words])


def measured(tmp_path: Path, engine: Echo, *words: str) -> list[dict]:
    found = options(tmp_path, "--requests", "1", "3", "--prompt-tokens", "9", "--new-tokens", "5", *words)
    found.lines = tmp_path / "lines.jsonl"
    found.lines.unlink(missing_ok=True)
    asyncio.run(serve_engine.measure(engine, found))
    return [json.loads(line) for line in found.lines.read_text().splitlines()]


def test_every_setting_is_measured_and_prompts_do_not_change(tmp_path: Path) -> None:
    rows = measured(tmp_path, Echo(), "--max-tokens", "16")
    assert [(row["name"], row["requests"], row["prompt_tokens"], row["new_tokens"]) for row in rows] == [
        ("decode", 1, 9, 5),
        ("decode", 3, 9, 5),
        ("prefill", 8, 16, 1),
    ]
    for row in rows:
        assert 0 < row["ttft_ms"] <= row["ttft_max_ms"] <= 1e3 * row["secs"] + 1  # which are rounded
        assert row["output_tokens_per_s"] > 0
        assert ("tpot_ms" in row) == ("step_ms" in row) == (row["new_tokens"] > 1)
    again = measured(tmp_path, Echo(), "--max-tokens", "16")
    assert [row["tokens_sha256"] for row in again] == [row["tokens_sha256"] for row in rows]
    prompts = serve_engine.Setting("decode", 3, 9, 5).prompts()
    assert len({row[0] for row in prompts}) == 3
    assert rows[1]["tokens"] == [prompt[:5] for prompt in prompts]


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(["dp", "--nproc", "2"], [0, 1, 0]), (["tp", "--nproc", "2"], [None] * 3), (["dp"], [None] * 3)],
)
def test_requests_go_to_data_parallel_ranks_in_turn(words: list[str], ranks: list[int | None], tmp_path: Path) -> None:
    engine = Echo()
    measured(tmp_path, engine, "--no-prefill", "--ranks", *words)
    assert engine.ranks == [*ranks[:1] * serve_engine.PASSES, *ranks * serve_engine.PASSES]


def test_an_answer_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a request of 5 tokens ended after 4"):
        measured(tmp_path, Echo(lost=1), "--no-prefill")


def test_tokens_are_compared_with_the_first_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(tmp_path)
    found.logs.mkdir()
    first: dict = {}
    for turn, spoiled in enumerate((False, True)):
        serve_engine.report(found, turn, measured(tmp_path, Echo(spoiled), "--no-prefill"), first)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(row["plugin"], row["first_tokens_agree"], row["tokens_agree"]) for row in rows] == [
        *[("off", 1.0, 5.0)] * 2,
        *[("on", 1.0, 4.0)] * 2,
    ]
    assert all("tokens" not in row for row in rows)
    assert len((found.logs / "vllm-qwen3-30b-1.jsonl").read_text().splitlines()) == 4
    assert serve_engine.agreement([[1, 2], [3, 4]], [[1, 2], [4, 4]]) == {
        "first_tokens_agree": 0.5,
        "tokens_agree": 1.0,
    }


async def stand_in_turn(found: serve_engine.argparse.Namespace) -> None:
    names = sorted(point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins"))
    row = {"switch": os.environ.get("EP_MOE_VLLM"), "names": names, "asked": dict(found.set)}
    found.lines.write_text(json.dumps(row) + "\n")
    if os.environ.get("EP_MOE_VLLM") == "1" and os.environ.get("IGNORED") != "1":
        print("ep_moe runs model.layers.0.mlp.experts and layers like it")


async def endless_turn(found: serve_engine.argparse.Namespace) -> None:
    await asyncio.sleep(600)


async def failing_turn(found: serve_engine.argparse.Namespace) -> None:
    raise ValueError("no such model")


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_vllm, "ENVIRON", {})
    monkeypatch.setattr(serve_vllm, "preload", lambda: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("ignored", ["0", "1"])
def test_turns_differ_by_the_plug_in_which_must_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ignored: str,
    without_engine: None,
) -> None:
    monkeypatch.setattr(serve_engine, "turn", stand_in_turn)
    monkeypatch.setenv("IGNORED", ignored)
    monkeypatch.setenv("EP_MOE_VLLM", "1")  # of the caller: turns without the plug-in do not see it
    words = ["--engine", "vllm", "--turns", "off", "on", "--logs", str(tmp_path / "logs")]
    assert serve_engine.main([*words, "--set", "x=1", "--set-on", "x=2"]) == int(ignored)
    out = capfd.readouterr().out
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(row["switch"], row["asked"]) for row in rows] == [(None, {"x": 1}), ("1", {"x": 2})]
    assert all({"ep_moe", "ep_moe_serve"} <= set(row["names"]) for row in rows)
    assert ("turn 1, plug-in on: the log names 0 kinds of layers of ep_moe" in out) == (ignored == "1")


@pytest.mark.parametrize(
    ("turn", "wrong"), [(endless_turn, "still ran after 1 s"), (failing_turn, "exit code 1"), (stand_in_turn, "")]
)
def test_a_turn_that_fails_or_does_not_end_is_the_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    without_engine: None,
    turn: Callable[..., Any],
    wrong: str,
) -> None:
    monkeypatch.setattr(serve_engine, "turn", turn)
    monkeypatch.setattr(serve_engine, "ENDS_AFTER_SECS", -0.5)
    words = ["--engine", "vllm", "--turns", "off", "off", "--timeout-secs", "1.5" if wrong else "20"]
    assert serve_engine.main([*words, "--logs", str(tmp_path / "logs")]) == int(bool(wrong))
    out = capfd.readouterr().out
    assert (f"turn 0, plug-in off: {wrong}" in out) == bool(wrong)
    assert ("no such model" in out) == (turn is failing_turn)
    assert len(list((tmp_path / "logs").glob("*.log"))) == (1 if wrong else 2)


def test_logprobs_are_asked_for_around_the_settings_and_after_sleep(tmp_path: Path) -> None:
    class Sleeper(Echo):
        """Its tokens' probabilities say how often it has slept."""

        slept = 0

        async def sleep(self) -> None:
            self.slept += 1

        async def first_logprobs(self, prompt: list[int], count: int, rank: int | None) -> dict[int, float]:
            return {prompt[0]: -float(self.slept)}

    rows = measured(tmp_path, Sleeper(), "--no-prefill", "--sleep")
    assert [row.get("when", row["name"]) for row in rows] == ["before", "decode", "decode", "behind", "after sleep"]
    found = [{value for of_prompt in row["logprobs"] for value in of_prompt.values()} for row in rows if "when" in row]
    assert found == [{0.0}, {0.0}, {-1.0}]


def test_logprobs_are_compared_with_the_first_turn() -> None:
    reference = [{"1": -1.0, "2": -1.5, "3": -9.0}, {"4": -2.0, "5": -2.25}]
    assert serve_engine.differences(reference, reference) == {
        "logprobs_found": 1.0,
        "logprob_difference_median": 0.0,
        "logprob_difference_max": 0.0,
    }
    moved = [{"1": -1.1, "2": -1.8, "3": -1.0}, {"4": -2.0, "6": -2.0}]
    assert serve_engine.differences(moved, reference) == {
        "logprobs_found": 0.75,
        "logprob_difference_median": 0.175,
        "logprob_difference_max": 0.3,
    }


def test_rows_are_means_of_the_turns_of_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--requests", "2", "--turns", "off", "on", "off", "on", "--append", str(tmp_path / "rows.jsonl")]
    words += ["--set", "x=1", "--set-on", "x=2", 'y="a"']
    found, first, lines = options(tmp_path, *words, "--commit", "d18acff"), dict[str, Any](), list[dict[str, Any]]()
    found.logs.mkdir()
    seconds = iter((4.0, 1.0, 2.0, 3.0))
    for turn in range(4):
        rows: list[dict[str, Any]] = []
        last = next(seconds)
        for setting in serve_engine.settings(found):
            answers = [
                serve_engine.Answer([turn] * setting.new_tokens, last / 2, last) for _ in range(setting.requests)
            ]
            rows.append({"version": "1.0", **serve_engine.figures(setting, answers), "passes_equal": True})
        rows.append({"name": "logprobs", "logprobs": [{"1": -1.0 - turn}]})
        lines += serve_engine.report(found, turn, rows, first)
    assert [line["set"] for line in lines[::3]] == [{"x": 1}, {"x": 2, "y": "a"}] * 2
    decode, prefill = serve_engine.records(found, lines, words, **serve_engine.machine())
    assert decode.setup["setting"] == "decode, 2 requests"
    assert (decode.setup["set"], decode.setup["set_on"]) == ('{"x": 1}', '{"x": 2, "y": "a"}')
    assert decode.figures["tokens_per_sec"] == pytest.approx(2 * 64 * (1 / 1 + 1 / 3) / 2, rel=1e-3)
    assert decode.figures["step_ms"] == pytest.approx(1e3 * (0.5 + 1.5) / 2 / 63, rel=1e-3)
    assert decode.baselines["own"]["tokens_per_sec"] == pytest.approx(2 * 64 * (1 / 4 + 1 / 2) / 2, rel=1e-3)
    assert prefill.figures["tokens_per_sec"] == pytest.approx(8 * 4096 * (2 / 1 + 2 / 3) / 2, rel=1e-3)
    assert (decode.figures["first_tokens_share"], decode.baselines["own"]["first_tokens_share"]) == (0, 0.5)
    assert (decode.figures["logprob_error"], prefill.shapes["layers"]) == (3, 48)
    assert decode.versions["torch"] == torch.__version__


def test_configs_are_written_with_fewer_layers(tmp_path: Path) -> None:
    for name in serve_models.MODELS:
        config = json.loads((serve_models.write_model(name, tmp_path / name, 2) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        assert len(config.get("layer_types", "ab")) == 2
    with pytest.raises(ValueError, match=r"layers \(5\) are not from 2 to 4, which deepseek-v3-4-layers has"):
        serve_models.write_model("deepseek-v3-4-layers", tmp_path, 5)


class Model(torch.nn.Module):
    """One parameter of each kind that engines have."""

    def __init__(self) -> None:
        super().__init__()
        make = {
            "embed_tokens": torch.empty(64, 32),
            "norm": torch.empty(32),
            "proj": torch.empty(32, 32, dtype=torch.bfloat16),
            "k_scale": torch.tensor(-1.0),
            "proj_scale_inv": torch.empty(4, 4),
            "fp8": torch.empty(8, 64, dtype=torch.float8_e4m3fn),
            "packed": torch.zeros(8, 64, dtype=torch.uint8),
            "packed_scale": torch.zeros(8, 2, dtype=torch.uint8),
        }
        for name, values in make.items():
            setattr(self, name, torch.nn.Parameter(values, requires_grad=False))
        self.experts = torch.nn.Module()
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].experts = torch.nn.Module()
        self.layers[0].experts.w13_weight = torch.nn.Parameter(torch.empty(4, 16, 16))


def test_weights_are_of_a_trained_size_and_experts_differ_by_rank() -> None:
    model, again, other = Model(), Model(), Model()
    serve_models.fill(model)
    serve_models.fill(again)
    serve_models.fill(other, rank=1)
    values, repeated, others = (dict(found.named_parameters()) for found in (model, again, other))
    for name, value in values.items():
        assert torch.equal(value, repeated[name])
        assert torch.equal(value, others[name]) == (".experts." not in name)
    assert values["norm"].eq(1).all()
    assert values["k_scale"] == -1
    assert values["embed_tokens"].std() == pytest.approx(0.5, rel=0.1)
    assert values["proj"].float().std() == pytest.approx(0.02, rel=0.1)
    scales = values["proj_scale_inv"]
    assert scales.min() >= 2e-4
    assert scales.max() <= 4e-4
    assert values["fp8"].float().std() == pytest.approx(64, rel=0.2)
    assert len(values["packed"].unique()) > 100
    assert values["packed_scale"].eq(119).all()


def test_copies_of_experts_have_the_weights_of_those_that_they_copy() -> None:
    ranks = [Model(), Model()]
    for rank, model in enumerate(ranks):
        model.config = types.SimpleNamespace(n_routed_experts=6)  # and two copies, on the last rank
        serve_models.fill(model, rank)
    experts = torch.cat([model.layers[0].experts.w13_weight for model in ranks])
    assert torch.equal(experts[6:], experts[:2])
    assert len(experts.flatten(1).unique(dim=0)) == 6


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("ranks", ["dp", "tp"])
def test_ranks_become_options_of_engines(tmp_path: Path, nproc: int, ranks: str) -> None:
    found = options(tmp_path, "--nproc", str(nproc), "--ranks", ranks)
    asked = serve_vllm.arguments(tmp_path, found)
    sizes = {asked.get("data_parallel_size", 1), asked.get("tensor_parallel_size", 1)}
    assert sizes == ({1, nproc})
    assert asked["enable_expert_parallel"] == (nproc > 1)
    assert serve_vllm.arguments(tmp_path, options(tmp_path, "--set", "seed=7", "x=[1]"))["seed"] == 7
    asked = serve_sglang.arguments(tmp_path, found)
    assert (asked["tp_size"], asked["ep_size"]) == (nproc, nproc)
    assert asked.get("enable_dp_attention", False) == (ranks == "dp")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "0"], "--nproc (0) must be positive"),
        (["--requests", "0"], "--requests ([0]) or"),
        (["--set", "seed"], "argument --set: invalid assignment value: 'seed'"),
        (["--in-process", "--nproc", "2"], "--in-process is for vLLM on one GPU"),
        (["--in-process", "--sleep"], "--sleep is for vLLM in processes of its own"),
        (["--http", "--sleep"], "--sleep is for vLLM in processes of its own, without --http"),
        (["--http", "--in-process"], "--in-process is for vLLM on one GPU, without --http"),
        (["--append", "rows.jsonl"], "append needs --commit"),
        (["--append", "rows.jsonl", "--commit", "main"], "commit ('main') is not 7 to 40 hex digits"),
        (["--append", "rows.txt", "--commit", "d18acff"], "append ('rows.txt') must end in .jsonl"),
        (["--append", "/proc/rows.jsonl", "--commit", "d18acff"], "append ('/proc/rows.jsonl') cannot be written"),
        (
            ["--append", "rows.jsonl", "--commit", "d18acff", "--turns", "on"],
            "--append needs --turns (on) that begin with off",
        ),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        options(tmp_path, *words)
    assert text in capsys.readouterr().err


def test_entry_points_have_the_plug_in_of_this_tree(tmp_path: Path) -> None:
    releases.entry_points(tmp_path / "entries", serve_engine.PLUGINS)
    text = next((tmp_path / "entries").glob("*.dist-info/entry_points.txt")).read_text()
    assert "ep_moe = ep_moe.engines.vllm:register" in text
    assert "ep_moe_serve = serve_models:register_sglang" in text
    assert "platform" not in text
