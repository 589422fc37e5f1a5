"""Wrong arguments of `ep-moe bench`, and rows that cannot be written."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_moe import cli
from ep_moe.cli import app
from ep_moe.quant import SCHEMES as QUANT_SCHEMES
from ep_moe.report.records import Record, read_records

WRONG = {
    "no-commit": (["layer", "--append", "a.jsonl"], "append needs --commit"),
    "bad-commit": (["layer", "--append", "a.jsonl", "--commit", "HEAD"], "commit ('HEAD') is not 7 to 40 hex digits"),
    "no-append": (["model", "--sweep"], "--commit and --sweep require --append"),
    "suffix": (["model", "--append", "a.json", "--commit", "0123abc"], "append ('a.json') must end in .jsonl"),
    "folder": (
        ["layer", "--append", f"{__file__}/a.jsonl", "--commit", "0123abc"],
        f"append ('{__file__}/a.jsonl') cannot be written",
    ),
    "trace": (["layer", "--trace", f"{__file__}/t.json"], f"trace ('{__file__}/t.json') cannot be written"),
    "preset": (["layer", "--preset", "huge"], "preset ('huge') is not one of deepseek-v3, qwen3-235b"),
    "tokens": (["layer", "--tokens", "0"], "tokens ((0,)) must be one or more numbers of at least 1"),
    "routing": (["layer", "--routing", "odd"], "routing ('odd') is not one of uniform, skewed"),
    "hidden": (["layer", "--hidden", "100"], "hidden (100) must be a positive multiple of 16"),
    "num_topk": (["layer", "--preset", "mixtral", "--num-topk", "9"], "num_topk (9) exceeds num_experts (8)"),
    "rows": (["experts", "--rows", "0"], "rows ((0,)) must be one or more numbers of at least 1"),
    "ep_size": (["experts", "--preset", "tiny", "--ep-size", "17"], "ep_size (17) exceeds the 16 experts of tiny"),
    "scheme": (["experts", "--quant", "auto"], "scheme ('auto') is not one of none"),
    "layer-scheme": (["layer", "--quant", "auto"], "scheme ('auto') is not one of none"),
    "graph": (["layer", "--graph", "--device", "cpu"], "a CUDA graph needs a GPU for each rank"),
    "one-rank": (
        ["model", "--nproc", "1", "--hook"],
        "hook with nproc (1): transformers' own expert parallelism needs",
    ),
    "odd-ranks": (["model", "--nproc", "3", "--hook"], "hook: nproc (3) does not divide the 128 experts of qwen3-30b"),
    "exchange-preset": (["transport", "--preset", "huge"], "preset ('huge') is not one of deepseek-v3, qwen3-235b"),
    "repeats": (["layer", "--repeats", "0"], "repeats (0) must be at least 1"),
    "new_tokens": (["model", "--new-tokens", "1"], "new_tokens (1) must be at least 2"),
    "baseline": (["model", "--baseline-experts", "fast"], "baseline_experts ('fast') is not one of grouped_mm"),
    "transport": (["layer", "--transport", "pigeon"], "transport ('pigeon') is not one of auto"),
    "exchange-tokens": (["transport", "--tokens", "0"], "tokens (0) must be at least 1"),
    "exchange-hidden": (["transport", "--hidden", "100"], "hidden (100) must be a positive multiple of 16"),
    "exchange-topk": (["transport", "--num-topk", "9", "--num-experts", "8"], "num_topk (9) is not in [1, num_experts"),
    "payload": (["transport", "--payload", "fp7"], "scheme ('fp7') is not one of none, fp8_tensor"),
    "exchange-routing": (["transport", "--routing", "odd"], "routing ('odd') is not one of uniform, skewed, one_rank"),
    "exchange-transport": (["transport", "--transport", "pigeon"], "transport ('pigeon') is not one of auto, local"),
    "suite": (["transport", "--suite", "huge"], "suite ('huge') is not one of standard"),
    "beside-suite": (
        ["transport", "--suite", "standard", "--hidden", "64"],
        "hidden (64) is set by suite 'standard'; leave it out",
    ),
    "one_rank": (
        ["transport", "--routing", "one_rank", "--num-experts", "31", "--nproc", "4"],
        "routing 'one_rank': num_topk (8) exceeds the 7 experts of the last of 4 ranks",
    ),
    "untimed": (
        ["transport", "--device", "cpu", "--append", "a.jsonl", "--commit", "0123abc"],
        "append on a CPU needs --sweep: nothing is timed there",
    ),
    "no-load": (
        ["balance", "--routing", "recorded"],
        "routing 'recorded' needs load, a file of `ep-moe balance record`",
    ),
    "load": (["balance", "--load", __file__], ": not JSON in UTF-8"),
    "balance-scheme": (["balance", "--quant", "fp7"], "scheme ('fp7') is not one of none, fp8_tensor"),
    "dir": (["report", "--dir", "no/such"], "directory ('no/such') is not a directory"),
}


def no_ranks(*args: Any) -> None:
    """Fail if ranks are started: errors must come before."""
    raise AssertionError(f"ranks start for {args}")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_told_with_exit_code_2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, message = WRONG[name]
    monkeypatch.setattr(cli, "on_ranks", no_ranks)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "option", ["layer --quant", "experts --quant", "transport --payload", "formats --schemes", "balance --quant"]
)
def test_no_scheme_is_completed_that_is_refused(option: str) -> None:
    words = f"ep-moe bench {option} "
    variables = {"COMP_WORDS": words, "COMP_CWORD": "4", "_EP_MOE_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(app, [], prog_name="ep-moe", env=variables)
    assert set(done.stdout.split()) == set(QUANT_SCHEMES)


def append_a_layer(folder: Path, *options: str) -> Any:
    """`bench layer --append` in this process."""
    words = ["bench", "layer", "--preset", "tiny", "--tokens", "2", "--repeats", "1", "--warmup", "1", "--nproc", "1"]
    return CliRunner().invoke(app, [*words, "--append", str(folder / "a.jsonl"), "--commit", "0123abc", *options])


@pytest.mark.usefixtures("one_rank")
def test_rows_that_cannot_be_written_in_the_end_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, records: list[Record]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "append_records", full_disk)
    done = append_a_layer(tmp_path / "new")
    assert done.exit_code == 1
    assert "cannot be written: [Errno 28] No space left on device; the rows are:\n" in done.stderr
    row = Record.from_line(done.stderr.strip().splitlines()[-1], "stderr")
    assert row.shapes["tokens_per_rank"] == 2
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_interpreted_rows_are_sweeps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    done = append_a_layer(tmp_path)
    assert done.exit_code == 2
    assert "append under TRITON_INTERPRET needs --sweep" in done.stderr
    assert append_a_layer(tmp_path, "--sweep").exit_code == 0
    [record] = read_records(tmp_path)
    assert record.sweep


def test_a_row_of_torchrun_is_repeated_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": 0,
        "WORLD_SIZE": 16,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 8,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 29500,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    repeated = cli._repeatable(["bench", "layer", "--json", "--append", "a.jsonl", "--trace=t.json", "--graph"])
    assert repeated == "torchrun --nnodes 2 --nproc-per-node 8 -m ep_moe bench layer --graph"
