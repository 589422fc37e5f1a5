"""The command line as users call it: the main job, faults, wrong arguments, Ctrl-C, torchrun."""

import dataclasses
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.broken_main import broken_main
from helpers.processes import EP_MOE, ROOT, environ, processes_with, ranks_of
from typer.testing import CliRunner, Result

from ep_moe import cli, logs, names
from ep_moe.app import run as job
from ep_moe.app import run_rank
from ep_moe.app.balance import RecordConfig
from ep_moe.app.chat import ChatConfig
from ep_moe.app.eval import EvalConfig
from ep_moe.app.generate import GenerateConfig
from ep_moe.app.rebalancing import JobRebalanceConfig, RebalanceConfig
from ep_moe.app.serve import ServeConfig
from ep_moe.app.session import with_dtype
from ep_moe.app.start import SHIPPED_MODEL, on_ranks
from ep_moe.bench.configs import (
    BalanceBenchConfig,
    CallsBenchConfig,
    ExpertsBenchConfig,
    FormatsBenchConfig,
    LayerBenchConfig,
    ModelBenchConfig,
    MovingBenchConfig,
    TransportBenchConfig,
)
from ep_moe.cli import app
from ep_moe.config import DTYPES, EngineConfig
from ep_moe.experts import KERNELS
from ep_moe.fields import described
from ep_moe.group import EPGroup
from ep_moe.placement import PLACEMENTS
from ep_moe.quant import SCHEMES
from ep_moe.report.records import RowsFile
from ep_moe.transport import TRANSPORTS
from ep_moe.tune.config import TuneConfig

LAUNCH = sys.modules["ep_moe.launch"]  # `ep_moe.launch` is the function
HELDOUT_LOSS = 0.7603  # nats per byte of the first 2 KB in float32
SHORT = """
[run]
prompts = ["In the beginning", "And it came to pass in those days, that", "The LORD is my shepherd; I shall", "Blessed"]
new_tokens = [16, 12, 14, 10]
teacher_tokens = 256
window = 64
"""
TINY = ("--preset", "tiny", "--tokens", "5", "--repeats", "1", "--warmup", "1")
SMALL = """
[run]
prompts = ["In the beginning", "Blessed"]
new_tokens = [6, 4]
teacher_tokens = 96
window = 32
"""


def call(*command: str, cwd: Path, timeout: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is not the repository."""
    return subprocess.run(
        [*command], capture_output=True, text=True, cwd=cwd, env=environ() | env, timeout=timeout, check=False
    )


def invoke(*arguments: str) -> Result:
    """Run a command in this process; its ranks are forked by the server, which has transformers loaded."""
    return CliRunner().invoke(app, arguments, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A config of a short run."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_main_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With fewer tokens than the shipped config has, which CI's last step runs from a wheel."""
    path = tmp_path / "short.toml"
    path.write_text(SHORT)
    done = invoke("run", "--json", "--device", "cpu", "--config", str(path))
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["world_size"] == 4
    assert report["tokens_equal"]
    assert report["max_logit_diff"] < 1e-4
    assert report["teacher_tokens"] == 256
    assert sorted(expert for rank in report["ranks"] for expert in rank["experts"]) == [*range(16)]
    moved = report["rebalancing"]
    assert (moved["state"], moved["rebalances"], moved["last_error"]) == ("idle", 1, "")
    assert moved["moved_experts"] > 0
    assert moved["moved_bytes"] == moved["moved_experts"] * 3 * 256 * 128 * 4
    assert moved["balancedness_before"] + 0.02 < moved["balancedness_after"] <= 1
    assert [rank["new_tokens"] for rank in report["ranks"]] == [16, 12, 14, 10]
    tokens = sum(len(rank["prompt"]) + rank["new_tokens"] - 1 for rank in report["ranks"]) + 256
    assert [sum(layer) for layer in report["expert_load"]] == [4 * tokens] * 4
    assert report["text"][2].startswith("The LORD is my shepherd")
    assert all(secs > 0 for secs in [*report["times"].values(), *report["layer_times"].values()])
    logged = r" rank 0 INFO ep_moe\.app\.session: layers of experts read: 4, [\d.]+ MB, "
    assert len(re.findall(logged, capfd.readouterr().err)) == 1


@pytest.mark.parametrize("nproc", ["1", "3"])  # two ranks: below, with and without a fault
def test_the_main_job_on_other_numbers_of_ranks(nproc: str, small: str) -> None:
    options = ["--nproc", nproc, "--config", small, "--placement", "round_robin", "--layout", "batched"]
    done = invoke("run", *options, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert f"ok: {nproc} ranks against the whole model" in " ".join(done.stdout.split())


def test_kernels_on_a_cpu_need_the_interpreter(small: str) -> None:
    options = ["--experts", "triton", "--nproc", "1", "--device", "cpu", "--config", small]
    done = invoke("run", *options)
    assert done.exit_code == 1
    assert "experts 'triton' on a CPU need TRITON_INTERPRET=1" in done.stderr.splitlines()[-1]


def run_with(fault: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """The main job with a fault on one rank."""
    monkeypatch.setattr(cli, "run", lambda *args: on_ranks(broken_main, *args, fault))
    return invoke("run", "--json", "--device", "cpu", *options)


@pytest.mark.parametrize("fault", ["none", "swap", "lose"])
def test_run_notices_a_fault(fault: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_with(fault, monkeypatch, "--nproc", "2", "--config", small)
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == {"none": (0, True), "swap": (1, False), "lose": (1, False)}[fault]


def test_a_failing_rank_is_named(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    done = run_with("fail", monkeypatch, "--nproc", "3", "--config", small)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "error: rank 1: ArithmeticError: six times nine is not 42" in done.stderr.splitlines()[-1]
    assert time.monotonic() - start < 60


def test_not_a_number_is_neither_equal_nor_invalid_json(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "on_ranks", lambda target, *args: run_rank.run_rank_main(EPGroup.single("cpu"), *args))
    monkeypatch.setattr(run_rank, "_largest_difference", lambda ours, whole: math.nan)
    done = CliRunner().invoke(app, ["run", "--json", "--config", small])
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (done.exit_code, report["ok"], report["tokens_equal"]) == (1, False, True)
    assert (report["max_logit_diff"], report["ranks"][0]["max_logit_diff"]) == (None, None)


def test_nproc_must_be_what_the_launcher_started() -> None:
    two_of_four = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    done = CliRunner().invoke(app, ["run", "--nproc", "4"], env=two_of_four)
    assert done.exit_code == 2
    assert "nproc (4) is not the number of ranks that run on this machine already (2, by" in done.stderr
    done = CliRunner().invoke(app, ["run", "--nproc", "2", "--config", "no.toml"], env=two_of_four)
    assert "config ('no.toml') is not a file" in done.stderr


WRONG_CONFIGS = {
    "prompts": ('prompts = "In the beginning"\nnew_tokens = [6]', "prompts ('In the beginning') is not a list"),
    "numbers": ("prompts = [1, 2]\nnew_tokens = [6]", "prompts[0] (1) is not a text"),
    "new_tokens": ('prompts = ["Blessed"]\nnew_tokens = 64', "new_tokens (64) is not a list"),
    "missing": ('prompts = ["Blessed"]', "missing key new_tokens"),
    "nan": ('prompts = ["a"]\nnew_tokens = [1]\nmax_logit_diff = nan', "max_logit_diff (nan) must be finite"),
    "inf": ('prompts = ["a"]\nnew_tokens = [1]\nmax_logit_diff = inf', "max_logit_diff (inf) must be finite"),
    "zero": ('prompts = ["a"]\nnew_tokens = [1]\nmax_logit_diff = 0', "max_logit_diff (0.0) must be positive"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_wrong_config_is_told_with_its_file_and_exit_code_2(name: str, tmp_path: Path) -> None:
    content, message = WRONG_CONFIGS[name]
    path = tmp_path / "wrong.toml"
    path.write_text(f"[run]\n{content}\n")
    done = CliRunner().invoke(app, ["run", "--config", str(path)])
    assert done.exit_code == 2
    assert message in done.stderr


WRONG = {
    "no-such-option": (["run", "--nprocs", "4"], "No such option"),
    "nproc": (["run", "--nproc", "0"], "nproc (0) must be at least 1"),
    "model": (["run", "--model", "no/such"], "model ('no/such') is not a directory"),
    "model-without-config": (["run", "--model", "/"], "model ('/') has no config.json"),
    "transport": (["eval", "--transport", "pigeon"], "transport ('pigeon') is not one of auto, local, collective"),
    "quant-of-weights": (["run", "--quant", "int4_w4a16"], "scheme 'int4_w4a16' rounds the weights of experts, so no"),
    "quant": (["eval", "--quant", "fp7"], "scheme ('fp7') is not one of none, fp8_tensor"),
    "config": (["run", "--config", "no.toml"], "config ('no.toml') is not a file"),
    "window": (["eval", "--window", "4096"], "window (4096) * batch (4) exceeds max_tokens_per_rank (2048)"),
    "top-p": (["generate", "x", "--top-p", "0.5"], "top_p (0.5) needs a temperature above 0"),
    "temperature": (["generate", "x", "--temperature", "nan"], "temperature (nan) must be finite"),
    "cold": (["generate", "x", "--temperature", "-1"], "temperature (-1.0) must be at least 0"),
    "seed": (["generate", "x", "y", "--seed", str(2**63 - 1)], f"seed ({2**63 - 1}) must be in [-2^63, {2**63 - 2}]"),
    "not-utf-8": (["generate", "a\udcffb"], r"prompts ('a\udcffb') are not UTF-8: surrogates not allowed"),
    "port": (["serve", "--port", "65536"], "port (65536) must be at most 65535"),
    "passes": (["serve", "--passes-per-plan", "17"], "passes_per_plan (17) must be at most 16"),
    "text": (["eval", "--text", "no.txt"], "text ('no.txt') is not a file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_told_with_exit_code_2(name: str) -> None:
    arguments, message = WRONG[name]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def commands(group: Any, name: str) -> dict[str, Any]:
    """Every command below a group, by its words."""
    found = {}
    for word, command in group.commands.items():
        path = f"{name} {word}".strip()
        found |= commands(command, path) if hasattr(command, "commands") else {path: command}
    return found


CONFIGS = {
    "run": (JobRebalanceConfig, EngineConfig),
    "generate": (GenerateConfig, RebalanceConfig, EngineConfig),
    "eval": (EvalConfig, EngineConfig),
    "serve": (ServeConfig, RebalanceConfig, EngineConfig),
    "chat": (ChatConfig, EngineConfig),
    "quantize": (),
    "plan": (),
    "balance record": (RecordConfig, EngineConfig),
    "balance plan": (),
    "formats": (),
    "doctor": (),
    "bench layer": (LayerBenchConfig, RowsFile, EngineConfig),
    "bench balance": (BalanceBenchConfig, RowsFile, EngineConfig),
    "bench transport": (TransportBenchConfig, RowsFile, EngineConfig),
    "bench moving": (MovingBenchConfig, RowsFile, EngineConfig),
    "bench model": (ModelBenchConfig, RowsFile, EngineConfig),
    "bench experts": (ExpertsBenchConfig, RowsFile, EngineConfig),
    "bench formats": (FormatsBenchConfig, RowsFile, EngineConfig),
    "bench calls": (CallsBenchConfig, RowsFile, EngineConfig),
    "bench report": (),
    "bench serve": (),
    "bench expected": (),
    "tune": (TuneConfig, EngineConfig),
}


COMMON = {"config_file", "log_level"}  # of every command


def test_options_are_the_fields_of_configs() -> None:
    found = commands(typer.main.get_command(app), "")
    assert set(found) == set(CONFIGS)
    for words, command in found.items():
        options = {option.name: option for option in command.params}
        assert all(option.help and option.help.endswith(".") for option in options.values()), words
        assert set(options) >= COMMON, words
        if not CONFIGS[words]:
            continue
        named = {name for config in CONFIGS[words] for name in described(config)}
        assert set(options) - {"as_json", *COMMON} == set(options) & named - COMMON, words
        for config in CONFIGS[words][:-1]:  # all fields; a command leaves out the engine's that it does not need
            assert set(described(config)) <= set(options), words
            for field in dataclasses.fields(config):
                default = options[field.name].default
                shown = tuple(default) if isinstance(default, list) else default
                assert shown == (None if field.default is dataclasses.MISSING else field.default), (words, field.name)
                assert options[field.name].help == described(config)[field.name][1].text


def test_help_is_short_at_80_columns_and_wide_at_160() -> None:
    for words in ("", *commands(typer.main.get_command(app), "")):
        for columns in (80, 160):
            shown = CliRunner().invoke(app, [*words.split(), "-h"], env={"COLUMNS": str(columns)})
            lines = shown.stdout.splitlines()
            assert (shown.exit_code, len(lines) <= 60) == (0, True), (words, len(lines))
            assert max(map(len, lines)) in range(80, min(columns, 120) + 1), words


def test_the_version_is_an_option() -> None:
    for name in ("--version", "-V"):
        assert re.fullmatch(r"ep-moe [\d.]+\n", CliRunner().invoke(app, [name]).stdout)


def test_a_shell_completes_commands_options_and_values(tmp_path: Path) -> None:
    for typed, expected in {
        "ep-moe ser": ["serve"],
        "ep-moe serve --max-w": ["--max-waiting"],
        "ep-moe bench layer --quant int4_w4a1": ["int4_w4a16"],
    }.items():
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
        done = call(*EP_MOE, cwd=tmp_path, _EP_MOE_COMPLETE="complete_bash", **words)
        assert done.stdout.split() == expected, done.stderr


SETTINGS = """
nproc = 3
log_level = "debug"
[serve]
max-rows = 4
port = 8123
layout = "flat"
[generate]
prompts = ["a", "b"]
"""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs that commands get."""
    found: list[Any] = []

    def take(*configs: Any) -> dict[str, Any]:
        found.extend(configs)
        raise RuntimeError("enough")

    monkeypatch.setattr(cli, "serve", take)
    monkeypatch.setattr(cli, "generate", take)
    return found


def test_options_come_from_arguments_then_variables_then_the_file(tmp_path: Path, seen: list[Any]) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(SETTINGS)
    variables = {"EP_MOE_CONFIG": str(path), "EP_MOE_SERVE_PORT": "8124", "EP_MOE_SERVE_MAX_ROWS": "5"}
    CliRunner().invoke(app, ["serve", "--max-rows", "6"], env=variables)
    engine, config, _ = seen
    assert (config.max_rows, config.port, config.max_waiting) == (6, 8124, 256)
    assert (engine.nproc, engine.layout.value, engine.log_level) == (3, "flat", "debug")
    seen.clear()
    CliRunner().invoke(app, ["generate", "--config", str(path), "--nproc", "2"])
    engine, config, _ = seen
    assert (engine.nproc, engine.layout.value, config.prompts) == (2, "compact", ("a", "b"))


WRONG_SETTINGS = {
    "top": ("nprocs = 1", "nprocs is no option of any command"),
    "table": ("[srve]\na = 1", "[srve] is no command; known: run, generate"),
    "key": ("[serve]\nprt = 1", "[serve]: prt is no option of ep-moe serve; known: host, port"),
    "other command": ("[bench.layer]\nx = 1", "[bench.layer]: x is no option of ep-moe bench layer; known: preset"),
    "group": ("[bench]\nx = 1", "bench.x is no table of a command"),
    "fraction": ("[serve]\nport = 1.5", "[serve]: port (1.5): "),
    "flag": ("[serve]\ndecode-graphs = 3", "[serve]: decode-graphs (3) is not true or false"),
    "number": ("[serve]\nport = true", "[serve]: port (True) is not a text or a number"),
    "choice": ('[serve]\nlayout = "odd"', "[serve]: layout ('odd'): "),
    "limit": ("[serve]\nport = 65536", "port (65536) must be at most 65535"),
    "no TOML": ("[[", "Invalid"),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_a_wrong_setting_is_named(name: str, tmp_path: Path, seen: list[Any]) -> None:
    content, message = WRONG_SETTINGS[name]
    path = tmp_path / "settings.toml"
    path.write_text(content)
    done = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert (done.exit_code, seen) == (2, [])
    assert message in done.stderr
    assert name == "limit" or str(path) in done.stderr


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ep-moe", "serve"])
    monkeypatch.setenv("EP_MOE_SERVE_PORT", "x")
    with pytest.raises(SystemExit):
        cli.main()
    assert "(variable EP_MOE_SERVE_PORT)" in capsys.readouterr().err


def test_a_row_repeats_options_that_no_argument_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(cli, "_measure", lambda *_: given.extend(cli._ELSEWHERE.get()) or {})
    path = tmp_path / "settings.toml"
    path.write_text('[bench.experts]\nrows = [4, 8]\nlayout = "flat"')
    CliRunner().invoke(app, ["bench", "experts", "--config", str(path)], env={"EP_MOE_BENCH_EXPERTS_SEED": "7"})
    assert sorted(zip(given[::2], given[1::2], strict=True)) == [
        ("--layout", "flat"),
        ("--rows", "4"),
        ("--rows", "8"),
        ("--seed", "7"),
    ]


def test_log_lines_have_time_process_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("ep_moe.of_a_test")
    logs.configure("warning", "rank 3")
    logger.warning("a")
    logger.info("b")
    logs.configure("info", "main")
    logger.info("c")
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    lines = rf"{stamp} rank 3 WARNING ep_moe.of_a_test: a\n{stamp} main INFO ep_moe.of_a_test: c\n"
    assert re.fullmatch(lines, capsys.readouterr().err)


QUICK = (
    *(["--help"], ["run", "--help"], ["serve", "--help"], ["bench", "transport", "--help"], ["plan", "--help"]),
    *(["run", "--nprocs", "4"], ["generate", "x", "--top-p", "0.5"]),
)


def test_nothing_slow_is_imported_for_help_and_wrong_arguments_and_before_the_server() -> None:
    """torch takes two seconds, transformers three more; the server that forks ranks imports them meanwhile."""
    code = f"""
import sys
from ep_moe.__main__ import main
for arguments in {QUICK}:
    sys.argv = ["ep-moe", *arguments]
    try:
        main()
    except SystemExit:
        pass
from ep_moe.app.check import check_model
from ep_moe.launch import start_server
print("loaded", [name for name in ("torch", "triton", "transformers", "numpy", "matplotlib") if name in sys.modules])
"""
    done = call(sys.executable, "-c", code, cwd=ROOT)
    assert done.stdout.endswith("loaded []\n"), done.stderr
    assert "Needs ep-moe[serve]." in done.stdout
    assert len(done.stderr.splitlines()) == 2


def test_options_name_what_there_is() -> None:
    assert tuple(DTYPES) == names.DTYPE_NAMES
    assert tuple(SCHEMES) == names.SCHEME_NAMES
    assert tuple(TRANSPORTS) == names.TRANSPORT_NAMES
    assert ("torch", *KERNELS) == names.EXPERTS_NAMES
    assert tuple(PLACEMENTS) == names.PLACEMENT_NAMES


def test_the_package_has_what_it_names() -> None:
    """Also after the package `launch`, of the function's name, was imported."""
    code = """
import ep_moe.launch.signals, ep_moe
assert callable(ep_moe.launch), ep_moe.launch
from ep_moe import *
assert set(ep_moe.__all__) <= set(globals())
assert all(getattr(ep_moe, name) is globals()[name] for name in ep_moe.__all__)
assert not hasattr(ep_moe, "Launch")
"""
    done = call(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


READ = (
    "float32, bfloat16, float16, fp8 e4m3 with weight_block_size [n, k] and dynamic activation scales, compressed-tens"
)
UNREADABLE = {"llama": ({"model_type": "llama"}, "model_type ('llama') is not one of qwen3_moe, ")} | {
    method: (
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": method}},
        f"weights are quantized on disk ({method!r}){reason}; {READ}",
    )
    for method, reason in (
        ("bitnet", ""),
        ("gptq", " with bits None"),
        ("compressed-tensors", " with config_groups None"),
    )
}


@pytest.mark.parametrize(
    "command", [["run"], ["generate", "Blessed"], ["eval"], ["serve"]], ids=lambda command: command[0]
)
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_model_that_is_not_read_is_told_before_ranks_start(
    name: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, message = UNREADABLE[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(LAUNCH, "launch", lambda *args, **options: pytest.fail("ranks were started"))
    done = CliRunner().invoke(app, [*command, "--model", str(tmp_path)])
    assert done.exit_code == 2
    assert f"error: {tmp_path / 'config.json'}: {message}" in done.stderr
    assert done.stdout == ""


def test_run_refuses_to_compare_what_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LAUNCH, "launch", lambda *args, **options: pytest.fail("ranks were started"))
    done = CliRunner().invoke(app, ["run", "--quant", "fp8_token"])
    assert done.exit_code == 2
    assert "error: scheme 'fp8_token' rounds the tokens" in done.stderr
    assert "use --quant none" in done.stderr


def test_too_many_tokens_is_told_with_the_limit(small: str) -> None:
    options = ["--nproc", "2", "--device", "cpu", "--config", small, "--max-tokens-per-rank", "8"]
    done = invoke("run", *options)
    assert done.exit_code == 1
    assert "num_tokens (16) exceeds max_tokens_per_rank (8) on rank 0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        pytest.param(["--max-bytes", "2048", "--dtype", "float32", "--nproc", "1"], 5e-6, id="float32-1"),
        pytest.param(
            ["--max-bytes", "4096", "--dtype", "bfloat16", "--nproc", "3"],
            5e-4,
            id="bfloat16-3",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ["--max-bytes", "2048", "--quant", "fp8_block", "--nproc", "2"], 0.003 * HELDOUT_LOSS, id="fp8_block-2"
        ),
        pytest.param(["--max-bytes", "2048", "--quant", "int4_w4a8_g32_zp", "--nproc", "1"], 5e-3, id="int4_w4a8-1"),
    ],
)
def test_held_out_loss(options: list[str], limit: float) -> None:
    done = invoke("eval", "--json", "--device", "cpu", *options)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    if "float32" in options:
        assert abs(report["whole_nats_per_byte"] - HELDOUT_LOSS) < 1e-3
    assert abs(report["nats_per_byte"] - report["whole_nats_per_byte"]) < limit
    assert math.isclose(report["difference"], report["nats_per_byte"] - report["whole_nats_per_byte"], abs_tol=1e-12)
    assert ("--quant" in options) == ("rounded_nats_per_byte" in report)
    if "--quant" in options:
        assert abs(report["nats_per_byte"] - report["rounded_nats_per_byte"]) < 5e-4
        assert report["rounded_nats_per_byte"] != report["whole_nats_per_byte"]


def test_too_many_new_tokens_are_told_before_the_model_is_loaded() -> None:
    done = invoke("generate", "ab", "--max-new-tokens", "1023", "--nproc", "1", "--device", "cpu")
    assert done.exit_code == 1
    wanted = "a prompt of 2 tokens and max_new_tokens (1023) exceed the model's max_position_embeddings (1024)"
    assert wanted in done.stderr.splitlines()[-1]


def test_generate_spreads_prompts_and_keeps_their_order() -> None:
    prompts = ["And God said", "Blessed", "In the beginning"]
    options = ["--max-new-tokens", "12", "--json", "--device", "cpu", "--nproc"]
    sampled = ["--temperature", "0.8", "--seed", "3"]
    greedy, one, two = (
        json.loads(invoke("generate", *prompts, *options, *more).stdout)
        for more in (["2"], ["1", *sampled], ["2", *sampled])
    )
    assert one["text"] == two["text"]
    assert one["text"] != greedy["text"]
    assert [len(text) for text in greedy["text"]] == [12, 12, 12]
    assert greedy["new_tokens"] == 36
    assert greedy["prompts"] == prompts


@pytest.mark.launchers
def test_under_torchrun_one_rank_prints(tmp_path: Path) -> None:
    """By a command that imports no transformers; the launchers' tests run the main job."""
    script = str(ROOT / "launch" / "torchrun.sh")
    done = subprocess.run(
        ["bash", script, "bench", "layer", "--json", "--device", "cpu", *TINY],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ() | {"NPROC": "2", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["world_size"] == 2
    logged = " rank 0 INFO ep_moe.transport: transport 'auto' is 'collective'"
    assert done.stderr.count(logged) == 1, done.stderr


def disturb(
    command: list[str], ready: bytes, num_processes: int, act: Callable[[subprocess.Popen[bytes], list[int]], None]
) -> tuple[int, str, float]:
    """Start a command and act on it and its processes once it has written `ready`; returns exit code, last error line,
    seconds until the end. Nothing may be left running.
    """
    name, value = "EP_MOE_TEST_MARK", f"{os.getpid()}.{time.time_ns()}"
    mark = f"{name}={value}"
    command = [*EP_MOE, *command, "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ() | {name: value}
    ) as process:
        assert process.stderr is not None
        errors = bytearray()
        while ready not in errors:
            chunk = process.stderr.read1()
            assert chunk, errors.decode()
            errors += chunk
        ranks = ranks_of(process.pid)
        assert len(ranks) == num_processes
        act(process, ranks)
        start = time.monotonic()
        errors += process.communicate(timeout=60)[1]
    secs = time.monotonic() - start
    deadline = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_with(mark) == []
    return process.returncode, errors.decode().splitlines()[-1], secs


def test_ctrl_c_ends_every_process() -> None:
    """Of a server: two ranks and the front end."""
    serve = ["serve", "--port", "0", "--nproc", "2"]
    code, line, secs = disturb(serve, b"serving", 3, lambda process, _: process.send_signal(signal.SIGINT))
    assert (code, line) == (130, "interrupted")
    assert secs < 15


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param(signal.SIGKILL, r"error: rank (\d) was killed by SIGKILL", id="SIGKILL"),
        pytest.param(signal.SIGSTOP, r"error: rank (\d) stopped answering in ", id="SIGSTOP", marks=pytest.mark.matrix),
    ],
)
def test_a_lost_rank_is_named(number: signal.Signals, words: str) -> None:
    generate = ["generate", "Blessed", "--max-new-tokens", "900", "--nproc", "3", "--timeout-secs", "5"]
    ready = b"generate"  # the progress of rank 0: all ranks have met and loaded
    code, line, secs = disturb(generate, ready, 3, lambda _, ranks: os.kill(ranks[1], number))
    assert code == 1
    assert re.match(words, line), line
    assert secs < 20


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_during_imports_is_no_traceback(module: str, tmp_path: Path) -> None:
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError\n"
    (tmp_path / f"{module}.py").write_text(source)
    path = f"{tmp_path}{os.pathsep}{environ()['PYTHONPATH']}"
    done = call(*EP_MOE, "generate", "Blessed", cwd=tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


SECOND_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--nprocs", "4"], "error: No such option: --nprocs"),
        (["rum"], "error: No such command 'rum'"),
        (["run", "--layout", "odd"], "error: Invalid value for '--layout': "),
        (["generate"], "error: Missing argument "),
        (["run", "--nproc", "0"], "error: nproc (0) must be at least 1"),
    ],
)
def test_a_wrong_argument_is_one_line_of_one_process(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ep-moe", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert (left.value.code, said.out) == (2, "")
    assert said.err.startswith(line)
    assert said.err.count("\n") == 1
    for name, value in SECOND_RANK.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code, capsys.readouterr()) == (2, ("", ""))


def test_a_wrong_environment_is_one_line() -> None:
    done = CliRunner().invoke(app, ["run"], env={"RANK": "a"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: environment variable WORLD_SIZE (None) is not a number, although RANK is set\n"


def test_what_fails_on_a_rank_of_torchrun_is_no_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_rank(*args: Any, **options: Any) -> None:
        raise ValueError("it has written this itself")

    monkeypatch.setattr(LAUNCH, "run_rank", run_rank)
    done = CliRunner().invoke(app, ["generate", "x", "--device", "cpu"], env=SECOND_RANK | {"RANK": "0"})
    assert (done.exit_code, done.output) == (1, "")


COMMANDS = (["run"], ["generate", "x"], ["eval"], ["serve"], ["bench", "layer"], ["bench", "transport"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_ranks_are_the_visible_gpus(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, str]] = []

    def launch(*args: Any, num_ranks: int, device: str, **options: Any) -> None:
        started.append((num_ranks, device))
        raise RuntimeError("enough")

    monkeypatch.setattr(LAUNCH, "launch", launch)
    warnings = []
    cases = [(2, []), (0, []), (2, ["--device", "cpu"])]
    cases += [(2, ["--nproc", "4"]), (2, ["--nproc", "1"]), (2, ["--nproc", "2"])]
    few = slice(None if command == ["run"] else 1)  # others, of which a server starts another process, do the same
    for num_gpus, options in cases[few]:
        monkeypatch.setattr("torch.cuda.device_count", lambda num_gpus=num_gpus: num_gpus)
        done = CliRunner().invoke(app, [*command, *options])
        [*warned, error] = done.stderr.splitlines()
        assert (done.exit_code, error) == (1, "error: enough")
        warnings.append(warned)
    assert started == [(2, "cuda"), (4, "cpu"), (4, "cpu"), (4, "cpu"), (1, "cuda"), (2, "cuda")][few]
    cpu, one = "2 of 2 GPUs are not used: 4 ranks compute on the CPU, as each would need its own", "nproc 1"
    assert warnings == [[], [], [], [f"warning: {cpu}"], [f"warning: 1 of 2 GPUs are not used: {one}"], []][few]


def test_dtype_auto_is_the_checkpoints_on_gpus() -> None:
    assert json.loads((SHIPPED_MODEL / "config.json").read_text())["dtype"] == "bfloat16"
    found = {name: with_dtype(EngineConfig(), torch.device(name)).dtype for name in ("cpu", "cuda")}
    assert found == {"cpu": "float32", "cuda": "bfloat16"}
    assert with_dtype(EngineConfig(dtype="float16"), torch.device("cuda")).dtype == "float16"


GENERATED = {"prompts": ["a [b]"], "text": [f" \x1b[2Jc\x9b\r{'d' * 200}\u202e\n\te"], "new_tokens": 3, "world_size": 1}


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_gets_no_control_characters(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    times = {"generate_secs": 1.0, "tokens_per_sec": 3.0}
    cli.report.show_generate(GENERATED | {"times": times, "rebalancing": None})
    [text] = GENERATED["text"]
    if terminal:
        text = f" \\x1b[2Jc\\x9b\\r{'d' * 200}\\u202e\n        e"
    assert capsys.readouterr().out == f"a [b]{text}\n\n"


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_full_disk_is_one_line(options: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*EP_MOE, "formats", *options], stdout=full, stderr=subprocess.PIPE, env=environ(), check=False
        )
    expected = b"error: standard output: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_piped_tables_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"shapes": {"name": "x" * 150}, "setup": {"path": "[y]" * 50}, "figures": {"a_us": 1.0}, "left_out": {}}
    cli.show_rows(
        {"rows": [row | {"baselines": {f"[z]{'z' * 150}": {"a_us": 2.0}}}], "world_size": 1, "gpu": "[g]", "ok": True}
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"1 x [g]: name {'x' * 150}"
    assert lines[1] == f"path {'[y]' * 50}"
    assert any(f"[z]{'z' * 150}" in line for line in lines[2:])
