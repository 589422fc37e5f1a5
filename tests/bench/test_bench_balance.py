"""`ep-moe bench balance`: tokens follow a load, and a layer is placed for it."""

import json
from pathlib import Path

import pytest
import torch
from helpers.benches import bench

from ep_moe.balance import ModelSizes, RecordedLoad
from ep_moe.bench.loads import HOT_SHARE, UNIT, draw_ids, named_load, token_shares
from ep_moe.placement import Placement
from ep_moe.report.records import read_records


@pytest.mark.parametrize("name", ["uniform", "zipf", "one_rank"])
@pytest.mark.parametrize(("num_experts", "num_topk", "num_ranks"), [(256, 8, 2), (16, 8, 3), (8, 8, 2), (5, 1, 4)])
def test_tokens_choose_different_experts_as_often_as_a_load_says(
    name: str, num_experts: int, num_topk: int, num_ranks: int
) -> None:
    linear = Placement.linear(num_experts, num_ranks)
    load = named_load(name, linear, 3)
    wanted = [weight * num_topk / sum(load) for weight in load]
    while (most := max(wanted)) > 1 + 1e-12:  # what an expert cannot take goes to the others, in proportion
        taken = sum(min(share, 1.0) for share in wanted)
        others = sum(share for share in wanted if share < 1)
        grown = (num_topk - (taken - others)) / others
        wanted = [1.0 if share >= 1 else share * grown for share in wanted]
    assert most > 0
    shares = token_shares(load, num_topk)
    assert shares.sum() == num_topk * UNIT
    torch.testing.assert_close(shares / UNIT, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=2e-6)
    ids = draw_ids(shares, 4000, torch.Generator().manual_seed(1))
    assert all(len({*row}) == num_topk for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=num_experts) / 4000
    torch.testing.assert_close(counts, shares / UNIT, rtol=0, atol=4 * 0.5 / 4000**0.5)
    if name == "one_rank" and (num_experts, num_topk) == (256, 8):
        assert abs(counts[: linear.starts[1]].sum() / num_topk - HOT_SHARE) < 0.01


def test_more_experts_than_the_load_has_tokens_for_are_chosen_evenly() -> None:
    assert (token_shares([0, 0, 5, 0], 2) / UNIT).tolist() == pytest.approx([1 / 3, 1 / 3, 1, 1 / 3], abs=2e-6)


def test_rows_of_named_and_recorded_loads(tmp_path: Path) -> None:
    uneven, even = (40, 1, 1, 30, 1, 9, 1, 1), (1,) * 8
    sizes = ModelSizes(model_type="other", num_layers=2, num_experts=8, hidden=64, intermediate=32)
    RecordedLoad(model=sizes, load=(even, uneven)).save(tmp_path / "load.json")
    options = ["--preset", "tiny", "--tokens", "40", "--quant", "none", "--routing", "one_rank", "--load", "load.json"]
    options += ["--redundant-experts", "0", "--redundant-experts", "20", "--repeats", "1", "--warmup", "1"]
    more = ["--append", "rows/balance.jsonl", "--commit=0123456789abcdef", "--sweep", "--plot", "plot.png", "--json"]
    done = bench("balance", *options, *more, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    rows, report = read_records(tmp_path / "rows"), json.loads(done.stdout)
    # copies are as many as two ranks take, and experts those of the load
    sizes_of = [(row.shapes["num_experts"], row.shapes["redundant_experts"], row.setup["routing"]) for row in rows]
    assert sizes_of == [(16, 0, "one_rank"), (16, 16, "one_rank"), (8, 0, "recorded"), (8, 8, "recorded")]
    for row, before, after in zip(rows, report["rank_load_before"], report["rank_load"], strict=True):
        assert sum(before) == sum(after) == 2 * 40 * 4
        assert row.figures["worst_row_error"] < 0.01
        assert row.figures["balancedness_ratio"] == sum(after) / 2 / max(after)
        linear, even_load = row.baselines["linear"], row.baselines["uniform"]
        assert linear["balancedness_ratio"] == sum(before) / 2 / max(before)
        assert 0.85 < row.figures["balancedness_ratio"] > linear["balancedness_ratio"]
        assert even_load["balancedness_ratio"] > 0.9
        assert even_load["time_ratio"] == row.figures["call_us"] / even_load["call_us"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_steps_while_experts_move(tmp_path: Path) -> None:
    options = ["--preset", "tiny", "--tokens", "12", "--every", "10", "--steps", "30", "--layers", "2", "--json"]
    done = bench("moving", *options, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    [row] = json.loads(done.stdout)["rows"]
    figures, still = row["figures"], row["baselines"]["without_moving"]
    assert 1 <= figures["rebalances_count"] <= 4
    assert figures["moved_bytes"] == figures["moved_experts_count"] * 3 * 256 * 128 * 2 > 0
    assert figures["allowed_bytes"] == 8 * 3 * 256 * 128 * 2
    assert max(figures["worst_row_error"], still["worst_row_error"]) < row["row_error_limit"]
    assert 0 < figures["moving_step_us"] <= figures["moving_step_max_us"] <= figures["step_max_us"]
    assert still["speedup_ratio"] == still["step_us"] / figures["step_us"]
