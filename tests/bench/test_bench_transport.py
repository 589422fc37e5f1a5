"""`ep-moe bench transport`: rounds are checked before they are timed."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benches import bench, fake_capture

from ep_moe.bench import exchanges
from ep_moe.bench import transport as transport_bench
from ep_moe.bench.configs import TransportBenchConfig, TransportPoint
from ep_moe.bench.exchanges import by_collectives
from ep_moe.bench.transport import transport_rank_main
from ep_moe.config import EngineConfig, Layout
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.profiling import timing
from ep_moe.profiling.timing import time_calls
from ep_moe.report.records import read_records
from ep_moe.testing.whole_rounds import make_routing
from ep_moe.transport import CollectiveTransport, Dispatched, Transport, create_transport

SMALL_POINT = {"hidden": 160, "num_topk": 3, "num_experts": 9, "warmup": 1, "repeats": 2}


def test_bench_transport_on_a_cpu_checks_and_its_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "5", "--tokens", "17", "--hidden", "160", "--num-topk", "3", "--num-experts", "9"]
    more = ["--layout", "batched", "--layout", "flat", "--routing", "one_rank", "--dtype", "float16", "--seed", "3"]
    done = bench(
        "transport", *options, *more, "--json", "--append", "a.jsonl", "--commit", "0123abc", "--sweep", cwd=tmp_path
    )
    assert done.exit_code == 0, done.stderr
    assert "results are checked, nothing is timed on a CPU" in capfd.readouterr().err  # of rank 0
    report, records = json.loads(done.stdout), read_records(tmp_path)
    assert report["ok"]
    assert [(row["layout"], row["tokens"]) for row in report["rows"]] == [
        (layout, tokens) for layout in ("batched", "flat") for tokens in (5, 17)
    ]
    for record, row in zip(records, report["rows"], strict=True):
        # rank 0 sends all its tokens, rank 1 none: fp8 values, 2 scales, 3 ids and weights out, and float16 back
        assert record.figures == {"wire_bytes": record.shapes["tokens"] / 2 * (160 + 2 * 4 + 3 * 8 + 160 * 2)}
        assert set(row) - {"ok", "broken", "left_out"} < set(json.loads(record.to_line()))
        assert (record.setup["transport"], record.setup["graph"]) == ("collective", False)
        assert record.command == " ".join(["ep-moe bench transport", *options, *more, "--nproc 2 --device cpu"])


def misplace(sound: CollectiveTransport, rank: int) -> Transport:
    """Two rows of an expert are swapped in dispatch, and swapped back in combine."""

    def swap(rows: torch.Tensor) -> torch.Tensor:
        swapped = rows.clone()
        swapped[0, [0, 1]] = rows[0, [1, 0]]
        return swapped

    send, recv = sound.combine_send, sound.dispatch_recv

    def dispatch_recv(*, slot: int = 0) -> Dispatched:
        dispatched = recv(slot=slot)
        assert dispatched.batch.scale is not None
        x, scale = swap(dispatched.batch.x.view(torch.uint8)), swap(dispatched.batch.scale)
        batch = dataclasses.replace(dispatched.batch, x=x.view(dispatched.batch.x.dtype), scale=scale)
        return dataclasses.replace(dispatched, batch=batch)

    if rank == 1:
        sound.dispatch_recv = dispatch_recv
        sound.combine_send = lambda y, dispatched: send(swap(y), dispatched)
    return sound


def lose(sound: CollectiveTransport, rank: int) -> Transport:
    """The result of a token of rank 1 is zero."""
    recv = sound.combine_recv

    def combine_recv(*args: Any, **options: Any) -> torch.Tensor:
        out = recv(*args, **options)
        out[0] = 0
        return out

    if rank == 1:
        sound.combine_recv = combine_recv
    return sound


# fault, transports, message
EXCHANGE_FAULTS: dict[str, tuple[Callable[[CollectiveTransport, int], Transport], tuple[str, ...], list[str]]] = {
    "none": (lambda sound, rank: sound, (), []),
    "order": (misplace, ("auto",), [f"rank 1: {part} of experts' rows: 2 of" for part in ("values", "scales")]),
    "lost": (
        lose,
        ("auto",),
        [f"rank 1: output against the {other}: 1 of 9 differ" for other in ("other transport's", "expectation")],
    ),
    "lost-by-both": (lose, ("auto", "collective"), ["rank 1: output against the expectation: 1 of 9 differ"]),
}


def wrong_exchanges(group: EPGroup) -> dict[str, dict[str, Any]]:
    """`bench transport`, also timed on the CPU, with one fault after another."""
    found = {}
    transport_bench.is_timed, transport_bench.MANY_PAIRS = lambda device: True, 2
    for name, (fault, faulty, _) in EXCHANGE_FAULTS.items():

        def create(which: str, *args: Any, fault: Any = fault, faulty: tuple[str, ...] = faulty) -> Transport:
            made = create_transport(which, *args)
            return fault(made, group.rank) if which in faulty else made

        transport_bench.create_transport = create
        config = TransportBenchConfig(tokens=(9, 10), layout=(Layout.BATCHED,), graph=False, **SMALL_POINT)
        found[name] = transport_rank_main(group, EngineConfig(dtype="bfloat16"), config)
    transport_bench.create_transport = create_transport
    config = TransportBenchConfig(tokens=(9,), layout=tuple(Layout), payload=("none", "fp8_tensor"), **SMALL_POINT)
    found["formats"] = transport_rank_main(group, EngineConfig(dtype="float32"), config)
    return found


def test_a_wrong_exchange_is_not_timed() -> None:
    ranks = launch(wrong_exchanges, num_ranks=2, device="cpu", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ranks[0] == ranks[1]
    for name, (_, _, told) in EXCHANGE_FAULTS.items():
        row = ranks[0][name]["rows"][0]
        assert (row["ok"], ranks[0][name]["ok"]) == (not told, not told)
        assert len(row["broken"]) == len(told)
        assert all(line.startswith(words) for line, words in zip(row["broken"], told, strict=True)), row["broken"]
        if told:
            assert len(ranks[0][name]["rows"]) == 1
            assert (set(row["figures"]), row["baselines"]) == ({"wire_bytes"}, {})
    assert [row["ok"] for row in ranks[0]["formats"]["rows"]] == [True] * 6
    for row in [*ranks[0]["none"]["rows"], *ranks[0]["formats"]["rows"]]:
        figures = row["figures"]
        times = {"dispatch_us", "combine_us", "sum_us"}
        assert set(figures) == times | {
            *("host_dispatch_us", "host_combine_us", "wire_bytes", "wire_gbs", "floor_share_ratio")
        }
        assert min(figures.values()) > 0
        assert figures["wire_gbs"] == pytest.approx(figures["wire_bytes"] / figures["sum_us"] * 1e6 / 1e9)
        assert figures["floor_share_ratio"] == pytest.approx(figures["wire_gbs"] / 370)
        assert set(row["baselines"]) == {"allgather_reducescatter", "all_to_all_single"}
        for theirs in row["baselines"].values():
            assert set(theirs) == times | {"speedup_ratio"}
            assert theirs["speedup_ratio"] == theirs["sum_us"] / figures["sum_us"]


@pytest.mark.parametrize("fault", ["none", "missing-row", "other-kernel"])
def test_a_graph_of_pairs_is_checked_and_its_kernels_are_assigned(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport_bench, "is_timed", lambda device: True)
    monkeypatch.setattr(transport_bench, "capture", fake_capture(int(fault == "missing-row")))
    other, pairs = [("memset", 0.5)] if fault == "other-kernel" else [], transport_bench.MANY_PAIRS

    def kernels(call: Callable[[], object], group: EPGroup, *, repeats: int) -> list[tuple[str, float]]:
        return [("_dispatch_kernel", 30.0), ("_combine_rows", 12.0), ("_combine_sum", 8.0), *other] * pairs * repeats

    monkeypatch.setattr(exchanges, "profile_kernels", kernels)

    def clock(*args: Any, cold: bool, on_call: Callable[[], None] | None = None, **options: Any) -> list[float]:
        samples = time_calls(*args, cold=cold, on_call=on_call, **options)
        return samples if on_call else [50.0 * pairs + cold] * len(samples)

    monkeypatch.setattr(timing, "time_calls", clock)
    config = TransportBenchConfig(tokens=(20,), transport=("auto", "local"), **SMALL_POINT)
    report = transport_rank_main(EPGroup.single("cpu"), EngineConfig(dtype="float32"), config)
    [row] = report["rows"]  # "auto" is "local", which is not measured twice
    assert row["setup"]["graph"]
    if fault == "missing-row":
        assert row["broken"] == ["rank 0: output of the graph: 1 of 20 differ"]
        assert set(row["figures"]) == {"wire_bytes"}
        return
    assert report["ok"]
    assert row["figures"]["sum_us"] == 50.0
    timed = (row["figures"]["dispatch_us"], row["figures"]["combine_us"])
    assert (timed == (30.0, 20.0)) == (fault == "none")
    assert (
        "by events of eager calls: kernels are not of one of dispatch, combine: memset" in capsys.readouterr().err
    ) == (fault == "other-kernel")


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_exchanges_on_gpus() -> None:
    config = TransportBenchConfig(tokens=(16, 600), transport=("auto", "collective"), repeats=3)
    report, _ = launch(transport_rank_main, EngineConfig(dtype="bfloat16"), config, num_ranks=2, device="cuda")
    assert report["ok"], [row["broken"] for row in report["rows"]]
    for row in report["rows"]:
        figures = row["figures"]
        assert 0 < figures["dispatch_us"] < 1e6
        assert 0 < figures["combine_us"] < 1e6
        assert 0 < figures["floor_share_ratio"] < 1.1
        assert set(row["baselines"]) == {"allgather_reducescatter", "all_to_all_single"}
        assert all(0 < us < 1e6 for theirs in row["baselines"].values() for us in theirs.values())


def exchange_rows(group: EPGroup) -> dict[str, torch.Tensor]:
    """The baselines' results on a rank of two, with payload and outputs that identify their source."""
    rank, sent, received = group.rank, ([1, 2], [3, 0])[group.rank], ([1, 3], [2, 0])[group.rank]
    rows = {name: torch.arange(n) for name, n in {"T": 2, "all": 4, "sent": 3, "got": sum(received)}.items()}
    payload = {
        name: (100 * rank + n).to(torch.uint8).unsqueeze(1).expand(-1, 5).contiguous() for name, n in rows.items()
    }
    y = {name: (100.0 * rank + n).unsqueeze(1).expand(-1, 3).contiguous() for name, n in rows.items()}
    gathered = by_collectives(group, payload["T"], y["all"])
    to_all = by_collectives(group, payload["sent"], y["got"], (sent, received))
    found = {}
    for name, exchange in {"gathered": gathered, "to_all": to_all}.items():
        found[f"{name}-out"], found[f"{name}-home"] = exchange.dispatch(), exchange.combine()
    return {name: tensor[:, -1].clone() for name, tensor in found.items()}


def test_baselines_bring_every_row_where_it_belongs() -> None:
    expected = [
        {"gathered-out": [0, 1, 100, 101], "gathered-home": [100, 102], "to_all-out": [0, 100, 101, 102]},
        {"gathered-out": [0, 1, 100, 101], "gathered-home": [104, 106], "to_all-out": [1, 2]},
    ]
    expected[0]["to_all-home"], expected[1]["to_all-home"] = [0, 100, 101], [1, 2, 3]
    for rank, found in enumerate(launch(exchange_rows, num_ranks=2, device="cpu")):
        assert {name: rows.tolist() for name, rows in found.items()} == expected[rank]


@pytest.mark.parametrize("name", ["uniform", "skewed", "one_rank"])
def test_routings_of_the_exchange(name: str) -> None:
    placement, generator = Placement.linear(32, 4), torch.Generator().manual_seed(1)
    routing = make_routing(name, placement, num_tokens=500, num_topk=4, generator=generator)
    ids = routing.topk_ids
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = torch.bincount(ids.flatten(), minlength=32)
    share = {"uniform": counts.max() / counts.sum(), "skewed": counts[:4].sum() / counts.sum()}
    share["one_rank"] = counts[24:].sum() / counts.sum()
    low, high = {"uniform": (1 / 32, 2 / 32), "skewed": (0.5, 0.9), "one_rank": (1, 1)}[name]
    assert low <= share[name] <= high
    assert torch.allclose(routing.topk_weights.sum(1), torch.ones(500))
    assert routing.topk_weights.min() > 0


def test_an_exchange_has_the_sizes_of_a_preset() -> None:
    [point] = TransportBenchConfig(preset="qwen3-30b", tokens=(1,), num_topk=4).points
    assert (point.hidden, point.num_experts, point.num_topk) == (2048, 128, 4)
    assert TransportBenchConfig(tokens=(1,)).points == (TransportPoint(tokens=1, layout=Layout.COMPACT),)
    with pytest.raises(ValueError, match=r"preset \(qwen3-30b\) is set by suite 'standard'"):
        TransportBenchConfig(preset="qwen3-30b", suite="standard")


def test_the_standard_suite_changes_one_thing_at_a_time() -> None:
    points = TransportBenchConfig(suite="standard").points
    assert len(set(points)) == len(points) == 21
    sizes = [(point.tokens, point.layout.value) for point in points[:5]]
    assert sizes == [*((tokens, "batched") for tokens in (1, 16, 128, 512)), (4096, "compact")]
    base, names = points[2], [field.name for field in dataclasses.fields(TransportPoint)]
    changed = [[name for name in names if getattr(point, name) != getattr(base, name)] for point in points[5:-4]]
    assert [name for [name] in changed] == [
        *("layout", "layout", "payload", "hidden", "hidden", "hidden"),
        *("num_topk", "num_topk", "num_topk", "num_topk", "routing", "graph"),
    ]
    assert points[-4:] == tuple(dataclasses.replace(points[4], num_sms=number) for number in (16, 32, 64, 128))
    assert points[-1].config(torch.bfloat16).num_sms == 128
    assert [point.config(torch.bfloat16).max_tokens_per_rank for point in points[:2]] == [8, 16]
    # of 128 tokens about 0.9 go to each of 3 other ranks, which is 7.0 us and 13.4 us at 370 GB/s
    assert 128 * 0.9035 * 3 * base.row_bytes(torch.bfloat16) / 370e3 == pytest.approx(7.0, rel=0.01)
