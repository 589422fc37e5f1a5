"""The planner: traffic and memory against counts by hand, constants and errors against the measured rows."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ep_moe.balance import ModelSizes, RecordedLoad, plan_placement
from ep_moe.cli import app
from ep_moe.planning.calibration import calibrate, chosen_rows, compare, worst_and_median
from ep_moe.planning.hardware import Hardware, known_hardware
from ep_moe.planning.planner import Job, plan
from ep_moe.planning.times import LayerShape, collective_us, experts_us, nvlink_us
from ep_moe.planning.traffic import recorded, traffic, uniform
from ep_moe.report.records import Record, read_records

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks"
SHAPE = LayerShape(hidden=7168, intermediate=2048, num_experts=256, num_topk=8)


@pytest.fixture(scope="module")
def hw() -> Hardware:
    return Hardware.read("h200-cx7")


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read_records(ROWS)


def test_constants_are_those_of_their_rows(hw: Hardware, records: list[Record]) -> None:
    found = dataclasses.asdict(calibrate(hw, records))
    for name, value in dataclasses.asdict(hw).items():
        assert found[name] == (pytest.approx(value, rel=2e-3) if isinstance(value, float) else value), name


def test_measured_rows_are_predicted(hw: Hardware, records: list[Record]) -> None:
    found = compare(hw, records)
    worst, median = worst_and_median(found)
    assert median <= 0.08
    assert worst <= 0.30
    assert {c.what for c in found if not c.reason} == {"exchange peer", "exchange by NCCL", "experts", "layer"}
    assert len({c.label for c in found if not c.reason and c.what == "layer"}) >= 5
    # a row is compared, by one figure or more, or left out with its reason
    transports = sum(not c.reason for c in found if c.what == "exchange by NCCL")
    assert len(found) - transports == len(records)
    assert sum(c.reason == "constants come from it" for c in found) == len(hw.rows)


@pytest.mark.parametrize(
    ("commit", "least_gbs", "most_gbs"),
    [pytest.param("9667c1e", 1.5, 2.5, id="sockets"), pytest.param("fdb8846", 15, 30, id="shared-memory")],
)
def test_a_network_is_found_in_rows_between_nodes(
    commit: str, least_gbs: float, most_gbs: float, hw: Hardware, records: list[Record]
) -> None:
    """Three of five rows of nodes of one GPU predict the others."""
    between = [f"transport commit={commit} transport=collective nodes=2 tokens={tokens}" for tokens in (1, 128, 4096)]
    measured = [each for each in records if each.setup.get("nodes", 1) == 1 or each.commit.startswith(commit)]
    found = calibrate(dataclasses.replace(hw, gpus_per_node=1, rows=(*hw.rows, *between)), measured)
    assert 500 < found.network_us < 2500
    assert least_gbs < found.network_gbs < most_gbs
    errors = [abs(c.error) for c in compare(found, measured) if c.what == "exchange between nodes"]
    assert len(errors) == 2
    assert max(errors) <= 0.25
    left_out = {c.reason for c in compare(hw, records) if "nodes of" in c.reason}
    assert left_out == {f"nodes of {gpus} GPUs instead of 8" for gpus in (1, 2)}


def test_rows_of_replaced_kernels_are_named_and_not_compared(hw: Hardware, records: list[Record]) -> None:
    [record] = chosen_rows(records, ["transport commit=aa13260 world_size=2 tokens=1"])
    [left_out] = (
        c
        for c in compare(hw, records)
        if c.label.endswith("tokens 1, hidden 7168, num_topk 8, payload fp8_block, layout batched, commit aa13260")
    )
    assert left_out.reason == "kernels of commit aa13260 have been replaced"
    again = chosen_rows(records, ["transport commit=b8f84a2 world_size=2 tokens=1"])
    assert again[0].date > record.date
    everything = dataclasses.replace(hw, superseded=())
    assert sum(not c.reason for c in compare(everything, records)) > sum(not c.reason for c in compare(hw, records))


def test_a_row_that_is_no_longer_there_is_named(hw: Hardware, records: list[Record]) -> None:
    rows = [record for record in records if record not in chosen_rows(records, hw.rows[:1])]
    with pytest.raises(ValueError, match=r"rows: 'transport commit=.*' describes 0 measured rows instead of one"):
        compare(hw, rows)


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_uniform_traffic_is_a_draw_without_replacement(ranks: int) -> None:
    load = traffic(uniform(256), 8, ranks, 0, 8)
    missed = math.comb(256 - 256 // ranks, 8) / math.comb(256, 8)  # a rank gets none of a token's experts
    assert load.remote_ranks == pytest.approx((ranks - 1) * (1 - missed), rel=0.02)
    nodes = max(ranks // 8, 1)
    missed_node = math.comb(256 - 256 // nodes, 8) / math.comb(256, 8)
    assert load.remote_nodes == pytest.approx((nodes - 1) * (1 - missed_node), rel=0.02)
    assert load.remote_on_node == pytest.approx((min(ranks, 8) - 1) * (1 - missed), rel=0.02)
    assert load.imbalance == pytest.approx(1.0)


def test_copies_of_loaded_experts_even_the_load() -> None:
    loads = (0.4, 0.3, 0.2, 0.1)
    apart = traffic(loads, 1, 4, 0, 8)
    assert (apart.imbalance, apart.expert_shares) == (pytest.approx(1.6), (0.4,))
    copied = traffic(loads, 1, 3, 2, 8)  # the copies are of experts 0 and 1: rank loads 0.5, 0.3, 0.2 at worst
    assert copied.imbalance < 1.3
    hot = (0.93, *(0.01,) * 7)  # no rank gets two copies of it, as in `ep-moe balance plan`
    balanced = plan_placement([hot], 10, 2)
    assert traffic(hot, 2, 2, 2, 8).imbalance == pytest.approx(1 / balanced.after[0])
    assert balanced.after[0] > 0.98
    assert traffic(loads, 1, 2, 0, 8).imbalance == pytest.approx(1.0)  # 0.4 + 0.1 and 0.3 + 0.2
    with pytest.raises(ValueError, match=r"num_ranks \(3\) does not divide the physical experts \(4\)"):
        traffic(loads, 1, 3, 0, 8)


def test_recorded_loads_keep_their_unevenness() -> None:
    measured = [(0.4, 0.3, 0.2, 0.1), (0.1, 0.4, 0.3, 0.2)]
    same = recorded(measured, 4)
    assert sorted(same) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    many = recorded(measured, 64)
    assert sum(many) == pytest.approx(1.0)
    assert max(many) / min(many) == pytest.approx(4.0, rel=1e-4)


def test_times_by_hand(hw: Hardware) -> None:
    load = dataclasses.replace(traffic(uniform(256), 8, 2, 0, 8), remote_ranks=1.0, imbalance=1.0)
    plain = {"dispatch_us": 5.0, "dispatch_wire_us": 3.0, "dispatch_pack_us": 0.5, "link_gbs": 1e6}
    plain |= {"combine_us": 4.0, "combine_wire_us": 2.0, "combine_pack_us": 0.25, "dispatch_sms": 64.0}
    made = dataclasses.replace(hw, **plain)
    row, back = 7168 + 4 * 56, 2 * 7168
    dispatch, combine = nvlink_us(made, SHAPE, 1000, load)
    assert dispatch == pytest.approx(5 + (3 + 0.5 * 8) * row / 1e3)
    assert combine == pytest.approx(4 + (2 + 0.25 * 8) * back / 1e3)
    assert nvlink_us(made, SHAPE, 1000, load, packs=False)[0] == pytest.approx(5 + 3 * row / 1e3)
    assert nvlink_us(made, SHAPE, 1000, load, num_sms=16)[0] == pytest.approx(5 + 4 * (3 + 0.5 * 8) * row / 1e3)
    slow = dataclasses.replace(made, link_gbs=0.1)  # never faster than the link
    assert nvlink_us(slow, SHAPE, 1000, load)[0] == pytest.approx(5 + 1000 * row / 0.1 / 1e3)
    # one node of two ranks each: half of what leaves crosses the network
    two = dataclasses.replace(load, remote_on_node=0.5, remote_nodes=0.25)
    names = ("collective_us", "collective_rank_us", "collective_wire_us", "dispatch_pack_us", "combine_pack_us")
    network = dataclasses.replace(hw, **dict.fromkeys(names, 0.0), network_us=10.0, network_gbs=50.0)
    assert collective_us(network, SHAPE, 1000, two, 4)[1] == pytest.approx(10 + 500 * back / 50e3)
    assert collective_us(network, SHAPE, 1000, two, 4, per_node=True)[1] == pytest.approx(10 + 250 * back / 50e3)
    reading = dataclasses.replace(hw, experts_us=1.0, weight_gbs=1000.0, fp8_tflops=1e9)
    assert experts_us(reading, SHAPE, [1.0] * 4, [0.5] * 4) == pytest.approx(1 + 2 * SHAPE.expert_bytes / 1e6)
    computing = dataclasses.replace(hw, experts_us=1.0, weight_gbs=1e9, fp8_tflops=100.0)
    flops = (16 + 32) * 6 * 7168 * 2048  # 1 and 17 rows in tiles of 16
    assert experts_us(computing, SHAPE, [1.0, 17.0], [1.0, 1.0]) == pytest.approx(1 + flops / 1e8)


def job(**changes: Any) -> Job:
    return dataclasses.replace(Job(shape=SHAPE, moe_layers=58, other_params=17.1e9, gpus=32, tokens=128), **changes)


def test_memory_and_target_decide_what_fits(hw: Hardware) -> None:
    found = plan(hw, job())
    assert {c.ep_size for c in found} == {1, 2, 4, 8, 16, 32}
    for candidate in found:
        experts = (256 + candidate.redundant) / candidate.ep_size * 58 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
        assert candidate.weights_gib == pytest.approx((experts + 2 * 17.1e9) / 2**30)
        assert candidate.fits_memory == (candidate.weights_gib + candidate.buffers_gib <= 0.9 * 139)
        assert candidate.pass_ms == pytest.approx(58 * candidate.times.whole_us / 1e3)
    assert [c.fits for c in found] == sorted((c.fits for c in found), reverse=True)
    assert not any(c.fits for c in found if c.ep_size <= 4)
    assert found[0].pass_ms == min(c.pass_ms for c in found if c.fits)
    bound = plan(hw, job(target_ms=found[0].pass_ms + 1e-6))
    assert {c.pass_ms for c in bound if c.fits} == {found[0].pass_ms}  # layouts may share a time
    assert not any(c.fits for c in plan(hw, job(target_ms=1.0)))
    wide = plan(hw, job(gpus=320))
    assert max(c.ep_size for c in wide) == 320
    assert {c.redundant for c in wide if c.ep_size == 320} == {64}
    assert {c.transport for c in wide if c.ep_size > 8}.isdisjoint({"peer", "local"})


def test_more_redundancy_helps_uneven_loads(hw: Hardware) -> None:
    uneven = job(measured=((0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05),))
    ways = [c for c in plan(hw, uneven) if (c.ep_size, c.transport, c.layout) == (32, "collective", "flat")]
    found = {c.redundant: c for c in ways}
    assert set(found) == {0, 32}
    assert found[32].imbalance < found[0].imbalance


def test_the_command(tmp_path: Path) -> None:
    def call(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["plan", "--json", "--rows", str(ROWS), *options])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    report = call("--gpus", "16", "--routing", "recorded", "--plot", str(tmp_path / "plan.png"), "--target-ms", "50")
    assert report["best"] == report["candidates"][0]
    assert report["best"]["pass_ms"] <= 50
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert call("--gpus", "8", "--target-ms", "1")["best"] is None
    validation = call("--validate")
    assert validation["worst"] >= validation["median"] == pytest.approx(0.07, abs=0.08)
    assert all(row["reason"] for row in validation["left_out"])
    sizes = ModelSizes(model_type="qwen3_moe", num_layers=1, num_experts=2, hidden=16, intermediate=16)
    RecordedLoad(model=sizes, load=((0, 0),)).save(tmp_path / "zero.json")
    done = CliRunner().invoke(app, ["plan", "--load", str(tmp_path / "zero.json")])
    assert (done.exit_code, "zero.json') has no token of any expert" in done.stderr) == (2, True)
    for options, words in ((["--gpus", "2"], "nothing fits"), (["--validate"], "figures: median error")):
        done = CliRunner().invoke(app, ["plan", "--rows", str(ROWS), *options], env={"COLUMNS": "300"})
        assert done.exit_code == 0, done.stderr
        assert words in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "b300"], "hardware ('b300') is not a .toml file or one of h200-cx7"),
        (["--model", "gpt-5"], "model ('gpt-5') is not one of deepseek-v3"),
        (["--gpus", "0"], "gpus (0) must be at least 1"),
        (["--validate", "--calibrate"], "validate and calibrate exclude each other"),
        (["--validate", "--rows", "nowhere"], "directory ('nowhere') is not a directory"),
        (["--validate", "--plot", "a.png"], "plot ('a.png') is of a plan"),
    ],
)
def test_bad_options_are_told(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 2
    assert f"error: {message}" in done.stderr
    assert known_hardware() == ["h200-cx7"]
