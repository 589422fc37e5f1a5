"""`ep-moe bench model`: models are compared before they are timed."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.benches import bench
from transformers.utils import is_accelerate_available

from ep_moe import cli
from ep_moe.bench import configs
from ep_moe.bench import model as model_bench
from ep_moe.bench.configs import ModelBenchConfig
from ep_moe.bench.model import model_rank_main
from ep_moe.config import EngineConfig
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.report.records import read_records

VERSION = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])


HAS_HOOK = VERSION >= (5, 23) or VERSION < (5, 19)


needs_accelerate = pytest.mark.skipif(
    not is_accelerate_available(), reason="transformers spreads nothing over ranks without accelerate"
)


@needs_accelerate
def test_bench_model_of_another_architecture(tmp_path: Path) -> None:
    """Biases, a gate interleaved with up, transposed weights, a router of another name."""
    sizes = ["--preset", "tiny-gpt-oss", "--layers", "2", "--batch", "2", "--prompt-tokens", "6", "--new-tokens", "2"]
    done = bench("model", *sizes, "--repeats", "1", "--dtype", "float32", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "all results checked (worst row at most 1e-05)" in done.stdout


@needs_accelerate
def test_bench_model_and_its_row(tmp_path: Path) -> None:
    options = ["--preset", "tiny", "--layers", "2", "--batch", "2", "--prompt-tokens", "6", "--new-tokens", "4"]
    more = ["--repeats", "1", "--dtype", "float32", "--placement", "round_robin", *(["--hook"] if HAS_HOOK else [])]
    done = bench("model", *options, *more, "--append", "model.jsonl", "--commit", "0123abc", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "all results checked (worst row at most 1e-05)" in done.stdout
    [record] = read_records(tmp_path)
    others = {"transformers_ep"} | ({"transformers_ep_hook"} if HAS_HOOK else set())
    assert set(record.baselines) == others
    assert record.figures["worst_block_row_error"] < 1e-5
    for figures in (record.figures, *(record.baselines[name] for name in others - {"transformers_ep"})):
        assert figures["worst_first_logits_error"] < 1e-5
        assert figures["same_tokens_share"] == 1.0
    ran = {
        "baseline_dense": "replicated" if VERSION < (5, 19) else "tensor_parallel",
        "hook": HAS_HOOK,
        "nodes": 1,
        "repeats": 1,
    }
    assert {name: record.setup[name] for name in ran} == ran
    for figures in (record.figures, *record.baselines.values()):
        assert {"tokens_per_sec", "generate_secs", "prefill_ms", "decode_step_ms", "host_us"} < set(figures)
        assert figures["tokens_per_sec"] == 2 * 2 * 4 / figures["generate_secs"]
    assert record.command == " ".join(["ep-moe bench model", *options, *more, "--nproc 2 --device cpu"])
    assert not record.sweep


def louder_experts(model: Any) -> None:
    """An expert is 1 % too large."""
    model.ep_moe.layers[1].weights.w2.values[0] *= 1.01


def other_head(model: Any) -> None:
    """The rows of the head are reversed."""
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)


def other_attention(model: Any) -> None:
    """The output of attention is that of another model."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = 3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).to(weight)


def rotated_rows(model: Any) -> None:
    """Every rank gets the next rank's result rows."""
    layer, group = model.ep_moe.layers[0], model.ep_moe.group
    combine = layer.transport.combine

    def combine_wrongly(*args: Any, **options: Any) -> torch.Tensor:
        mine = combine(*args, **options)
        ranks = group.all_gather_object(mine.tolist())
        return mine.new_tensor(ranks[(group.rank + 1) % group.num_ranks])

    layer.transport.combine = combine_wrongly


# fault, its ranks, dtype, the bounds that it breaks
MODEL_FAULTS: dict[str, tuple[Callable[[Any], None], tuple[int, ...], str, set[str]]] = {
    "experts": (louder_experts, (1,), "float32", {"worst_block_row_error", "worst_first_logits_error"}),
    "head": (other_head, (1,), "bfloat16", {"median_first_logits_error"}),
    "attention": (other_attention, (0,), "float32", {"median_first_logits_error", "worst_first_logits_error"}),
    "rows": (rotated_rows, (0, 1), "bfloat16", {"worst_block_row_error", "median_first_logits_error"}),
}


def wrong_models(group: EPGroup) -> dict[str, dict[str, Any]]:
    """`bench model` with one fault after another in the model of ep_moe."""
    shard, found = model_bench.shard_experts, {}
    config = ModelBenchConfig(preset="tiny", layers=2, batch=2, prompt_tokens=4, new_tokens=2, repeats=1)
    for name, (fault, ranks, dtype, _) in MODEL_FAULTS.items():

        def shard_wrongly(
            model: Any, group: EPGroup, fault: Any = fault, ranks: tuple[int, ...] = ranks, **options: Any
        ) -> Any:
            shard(model, group, **options)
            if group.rank in ranks:
                fault(model)
            return model

        model_bench.shard_experts = shard_wrongly
        found[name] = model_rank_main(group, EngineConfig(dtype=dtype), config)
    model_bench.shard_experts = shard
    return found


@needs_accelerate
def test_a_wrong_model_is_not_timed(capfd: pytest.CaptureFixture[str]) -> None:
    for rank in launch(wrong_models, num_ranks=2, device="cpu", env={"CUDA_VISIBLE_DEVICES": ""}):
        for name, (_, _, _, bounds) in MODEL_FAULTS.items():
            [row] = rank[name]["rows"]
            assert not rank[name]["ok"]
            assert {line.split()[1] for line in row["broken"]} == bounds, name
            assert all(line.startswith("ep_moe ") for line in row["broken"])
            assert "tokens_per_sec" not in row["figures"]
        [row] = rank["experts"]["rows"]
        assert 1e-4 < row["figures"]["worst_block_row_error"] < 0.02
        assert row["baselines"]["transformers_ep"]["worst_block_row_error"] < 1e-5
    assert re.search(r"layers\.1\.mlp\.experts of ep_moe on rank \d has a row error of", capfd.readouterr().err)


def test_ranks_that_transformers_cannot_spread_a_model_over(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelBenchConfig(preset="qwen3-30b")
    for spreads in (False, True):
        monkeypatch.setattr(configs, "spreads_dense", lambda spreads=spreads: spreads)
        for num_ranks in (2, 4):
            assert config.why_no_baseline(num_ranks) == ""
        assert config.why_no_baseline(1) == ""
        config.check_ranks(3)
        with pytest.raises(ValueError, match=r"hook with nproc \(1\): .* at least 2"):
            dataclasses.replace(config, hook=True).check_ranks(1)
        with pytest.raises(ValueError, match=r"hook: nproc \(3\) does not divide the 128 experts of qwen3-30b"):
            dataclasses.replace(config, hook=True).check_ranks(3)
    assert config.why_no_baseline(8).startswith("nproc (8) does not divide the 4 KV heads of qwen3-30b: transformers 5")


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("reason", ["", "too many ranks"])
def test_our_model_is_right_beside_routers_that_choose_otherwise_and_alone(
    reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 4 has a token with two equal scores in bfloat16, of which transformers takes the higher expert."""
    monkeypatch.setattr(ModelBenchConfig, "why_no_baseline", lambda config, num_ranks: reason)
    config = ModelBenchConfig(preset="tiny", layers=5, batch=1, prompt_tokens=2, new_tokens=2, repeats=1)
    report = model_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="bfloat16"), config)
    [row] = report["rows"]
    assert row["broken"] == []
    assert row["figures"]["tokens_per_sec"] > 0
    assert set(row["baselines"]) == (set() if reason else {"transformers_ep"})
    assert row["left_out"] == ({"transformers_ep": reason} if reason else {})
    cli.show_rows(report)
    assert ("without transformers_ep: too many ranks\n" in capsys.readouterr().out) == bool(reason)
