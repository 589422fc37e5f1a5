"""Tests that need GPUs: every case, random rounds, a layer of DeepSeek-V3's size, faults over NCCL, the main job.

EP_MOE_STRESS_ROUNDS is the number of random rounds of each case, 2000 by default; long runs have 20000.
"""

import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.layers import random_layer
from helpers.lost import be_lost, record, recorded

from ep_moe.config import GroupConfig, Layout, MoEConfig, TransportConfig
from ep_moe.environment import shares_gpus
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import RankFailedError, launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layer.micro_batches import row_slices
from ep_moe.placement import Placement
from ep_moe.profiling.timing import capture
from ep_moe.quant import StoredMatrix, get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import ROW_ERROR_LIMITS, check_transport, worst_row_error
from ep_moe.transport import TRANSPORTS, create_transport
from ep_moe.transport.base import RoundKind
from ep_moe.weights import ExpertWeights

NUM_GPUS = num_gpu_ranks()
HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 7168, 2048, 256, 8, 128  # DeepSeek-V3, tokens of a rank


def needs(num_gpus: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that needs so many GPUs."""
    mark = pytest.mark.gpu if num_gpus == 1 else pytest.mark.multigpu
    return [mark, pytest.mark.skipif(num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs, there are {NUM_GPUS}")]


def on_gpus(*numbers: int) -> list:
    """Parameters: one number of ranks each."""
    return [pytest.param(number, marks=needs(number), id=f"{number}-ranks") for number in numbers]


NUM_SHARES = 6  # most of the time is compilation: each scheme, layout and shape has its own kernels


def check_on_rank(group: EPGroup, name: str, share: tuple[int, int]) -> dict[str, str]:
    """A share of all checks of a transport on this rank."""
    return check_transport(TRANSPORTS[name], group, share=share)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2, 3, 4))
@pytest.mark.parametrize("name", ["nvlink", "collective", "gathered"])
def test_carries_every_case(name: str, num_ranks: int, share: int) -> None:
    config, part = GroupConfig(timeout_secs=120), (share, NUM_SHARES)
    outcomes = launch(check_on_rank, name, part, num_ranks=num_ranks, config=config, device="cuda")
    errors = [
        f"rank {rank}: {case}: {text}" for rank, found in enumerate(outcomes) for case, text in found.items() if text
    ]
    assert errors == []
    assert len(outcomes[0]) > 40 // NUM_SHARES


def nans_on_rank(group: EPGroup) -> int:
    """Results that are all ones, on this rank: how many rows came as NaN."""
    from nvlink.nans import check_all_ones

    return check_all_ones(TRANSPORTS["nvlink"], group)


@pytest.mark.parametrize("num_ranks", on_gpus(1, 2, 4))
def test_results_of_all_ones(num_ranks: int) -> None:
    seen = launch(nans_on_rank, num_ranks=num_ranks, config=GroupConfig(timeout_secs=60), device="cuda")
    assert len(seen) == num_ranks
    assert min(seen) > 0


FEW: dict[str, Any] = {
    "rounds": int(os.environ.get("EP_MOE_STRESS_ROUNDS", "2000")),
    "hidden": 512,
    "max_tokens": 96,
    "room": 200,
    "num_experts": 18,
    "max_topk": 6,
    "look_every": 100,
    "delay": 300_000,
    "num_graphs": 2,
}
# ids are counted before they are sent
MANY = {**FEW, "max_tokens": 600, "room": 1000, "shapes": 6, "seed": 1}
EAGER = {**FEW, "shapes": 3, "seed": 5, "num_graphs": 0, "delay": 0, "look_every": 10}
# few kernels, as one with puts takes seconds to compile
HEAP = {**FEW, "transport": "nvshmem", "shapes": 4, "num_graphs": 1, "seed": 7}
NODES = {**FEW, "transport": "hierarchical", "shapes": 6, "seed": 7}
ROUNDS = {
    "few": FEW,
    "many": MANY,
    "eager": EAGER,
    **{stores: {**HEAP, "options": {"nvshmem_stores": stores}} for stores in ("addresses", "puts")},
    "gathered": {**NODES, "options": {"ranks_per_node": 1}, "most_gathered": 1 << 20},
    "relays": {**NODES, "options": {"ranks_per_node": 1, "chunk_rows": 40}, "num_graphs": 0},
}
NO_PEERS = {"NCCL_P2P_DISABLE": "1"}  # as between nodes


def stress_on_rank(group: EPGroup, options: dict[str, Any]) -> int:
    """Random rounds on this rank."""
    from nvlink.stress import StressConfig, stress  # needs Triton

    return stress(group, StressConfig(**options))


def programs_by_mps(num_ranks: int) -> int:
    """Programs of a launch: both slots of ranks that share a GPU fit at once, with an SM for other kernels."""
    from ep_moe.kernels.device import Device
    from ep_moe.transport.one_sided.occupancy import Occupancy

    ranks_of_a_gpu = -(-num_ranks // torch.cuda.device_count())
    return Occupancy(device=Device.of(torch.device("cuda", 0))).most_leaving_one_sm_empty // (2 * ranks_of_a_gpu)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("num_ranks", on_gpus(2, 4))
def test_random_rounds(num_ranks: int, options: dict[str, Any]) -> None:
    transport, start, config = options.get("transport"), time.monotonic(), GroupConfig(timeout_secs=120)
    if transport == "nvshmem" and importlib.util.find_spec("nvshmem") is None:
        pytest.skip("nvshmem4py is not installed")
    env = NO_PEERS if transport == "hierarchical" else {}
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:  # ranks that take turns need no limit
        options = {**options, "options": {"num_sms": programs_by_mps(num_ranks), **options.get("options", {})}}
    done = launch(stress_on_rank, options, num_ranks=num_ranks, config=config, device="cuda", env=env)
    print(f"{options['rounds']} rounds in {time.monotonic() - start:.0f} s", file=sys.stderr)
    assert min(done) >= options["rounds"]


KINDS = (
    RoundKind(num_topk=8, scheme="fp8_block"),
    RoundKind(
        num_topk=4,
        layout=Layout.FLAT,
        ids_dtype=torch.int64,
        counted=True,
        shared_dtype=torch.bfloat16,
        split_dispatch=True,
        split_combine=True,
    ),
)


def run_kinds(group: EPGroup, kinds: tuple[RoundKind, ...]) -> list[torch.Tensor]:
    """Results of rounds of KINDS, at each size with different kernels and at sizes between."""
    device = group.device
    config = TransportConfig(hidden=512, max_tokens_per_rank=600)
    transport, found = create_transport("nvlink", group, Placement.linear(16, group.num_ranks), config), []
    transport.warmup(kinds)
    generator = torch.Generator(device).manual_seed(group.rank)
    for kind, rows in itertools.product(KINDS, (1, 16, 17, 100, 256, 300, 600)):
        x = torch.randn(rows, 512, generator=generator, device=device).bfloat16()
        weights, ids = torch.rand(rows, 16, generator=generator, device=device).topk(kind.num_topk)
        routing = Routing(topk_ids=ids.to(kind.ids_dtype), topk_weights=weights)
        count = torch.tensor([rows - 1], dtype=torch.int32, device=device) if kind.counted else None
        call: dict[str, Any] = {"layout": kind.layout, "scheme": get_scheme(kind.scheme), "num_tokens": count}
        if kind.split_dispatch:
            transport.dispatch_send(x, routing, **call)
            dispatched = transport.dispatch_recv()
        else:
            dispatched = transport.dispatch(x, routing, **call)
        batch = dispatched.batch
        values = batch.x.float()  # rows without a token are undefined
        if batch.scale is not None:
            values = values * batch.scale.repeat_interleave(128, dim=-1)
        y = values.bfloat16()
        out = torch.zeros(rows, 512, dtype=torch.bfloat16, device=device)
        if kind.split_combine:
            transport.combine_send(y, dispatched)
            transport.combine_recv(dispatched, shared=x, out=out)
        else:
            transport.combine(y, dispatched, out=out)
        found.append(out[: rows - 1].cpu())
    transport.check()
    transport.destroy()
    return found


def ready_kinds(group: EPGroup) -> list[str]:
    """Errors of rounds with kernels compiled beforehand, and of rounds without launches through the driver."""
    from ep_moe.kernel_launch import kernel
    from ep_moe.kernel_launch.cuda_driver import LaunchMismatchError
    from ep_moe.kernels.exchange import combine, dispatch

    def cannot(*args: Any, **options: Any) -> None:
        raise LaunchMismatchError("as of an old driver")

    kernels = (dispatch._dispatch_kernel, combine._combine_kernel)
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels]
    config = TransportConfig(hidden=512, max_tokens_per_rank=600)
    warmed = create_transport("nvlink", group, Placement.linear(16, group.num_ranks), config)
    warmed.warmup(KINDS)
    warmed.destroy()
    before = [len(cache) for cache in caches]
    first = run_kinds(group, ())
    wrong = [] if [len(cache) for cache in caches] == before and min(before) > 0 else [f"{before} kernels were not all"]
    with mock.patch.object(kernel, "DriverKernel", cannot):
        second = run_kinds(group, KINDS)
    same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, second, strict=True)]
    return wrong + [f"round {number} differs" for number, equal in enumerate(same) if not equal]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2))
def test_kernels_of_kinds_are_compiled_beforehand(num_ranks: int) -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(ready_kinds, num_ranks=num_ranks, config=config, device="cuda") == [[]] * num_ranks


def call_after_warm_up(group: EPGroup, transport: str) -> list[str]:
    """Kernels of the experts and the exchange that a warmed-up layer compiles in its first calls."""
    from ep_moe.kernels.exchange import combine, dispatch
    from ep_moe.kernels.gemm import grouped

    device, layer = group.device, random_layer(group, transport, max_tokens_per_rank=300)
    layer.warmup(num_topk=4, padded=True)
    kernels = {
        "dispatch": dispatch._dispatch_kernel,
        "combine": combine._combine_kernel,
        "first GEMM": grouped._first_gemm_kernel,
        "second GEMM": grouped._second_gemm_kernel,
    }
    caches = {name: kernel.device_caches[torch.cuda.current_device()][0] for name, kernel in kernels.items()}
    before = {name: len(cache) for name, cache in caches.items()}
    for rows, ids_dtype in itertools.product((300, 1, 17, 0), (torch.int32, torch.int64)):
        x = torch.randn(rows, 512, device=device).bfloat16()
        scores, ids = torch.rand(rows, 16, device=device).topk(4)
        count = torch.full((1,), rows // 2, dtype=torch.int32, device=device)
        layer.forward_routed(x, ids.to(ids_dtype), scores)
        out = layer.forward_routed(x, ids.to(ids_dtype), scores, num_tokens=count, max_num_tokens=max(rows, 1))
        assert not bool(out[rows // 2 :].any()), f"padding of {rows} rows has results"
    layer.transport.check()
    layer.transport.destroy()
    return [
        f"{name}: {before[name]}, then {len(cache)}" for name, cache in caches.items() if len(cache) != before[name]
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["collective", "gathered", "nvlink"])
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2))
def test_a_warmed_up_layer_compiles_nothing(num_ranks: int, transport: str) -> None:
    config = GroupConfig(timeout_secs=60)
    found = launch(call_after_warm_up, transport, num_ranks=num_ranks, config=config, device="cuda")
    assert found == [[]] * num_ranks


def replay_gathered(group: EPGroup, transport: str) -> list[str]:
    """Replays with other tokens, ids and counts beside eager calls, then with bad ids on rank 1."""
    device, rows, wrong = group.device, 48, []
    layer, generator = random_layer(group, transport, max_tokens_per_rank=rows), torch.Generator(device)
    generator.manual_seed(group.rank)
    x, count = torch.empty(rows, 512, device=device).bfloat16(), torch.tensor([rows], dtype=torch.int32, device=device)
    scores, ids = torch.rand(rows, 16, generator=generator, device=device).topk(4)

    def call() -> torch.Tensor:
        return layer.forward_routed(x, ids, scores, num_tokens=count)

    graph = capture(call, device)
    for turn in range(40):
        x.normal_(generator=generator)
        ids.copy_(torch.rand(rows, 16, generator=generator, device=device).topk(4).indices)
        count.fill_((rows, 0, 1, 17)[(turn + group.rank) % 4])
        found = graph.replayed().clone()
        if not torch.equal(found, call()) or bool(found.isnan().any()):
            wrong.append(f"turn {turn}")
    count.fill_(rows)
    good = ids[0, 0].clone()
    if group.rank == 1:
        ids[0, 0] = 16
    lost = graph.replayed().clone()
    ids[0, 0] = good
    found = graph.replayed().clone()
    try:
        layer.transport.check()
        wrong.append("no error")
    except ValueError as error:
        if "topk_ids has 1 ids outside [-1, num_experts (16)) on rank 1, such as 16" not in str(error):
            wrong.append(str(error))
    if not bool(lost.isnan().all()) or not torch.equal(found, call()):
        wrong.append("bad ids, or the replay behind them")
    layer.transport.check()
    layer.transport.destroy()
    return wrong


@pytest.mark.parametrize("transport", ["gathered", "hierarchical"])
@pytest.mark.parametrize("num_ranks", on_gpus(2, 4))
@pytest.mark.skipif(shares_gpus(), reason="ranks that share a GPU gather over gloo, which no graph captures")
def test_gathered_rounds_in_graphs(num_ranks: int, transport: str) -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(replay_gathered, transport, num_ranks=num_ranks, config=config, device="cuda") == [[]] * num_ranks


def cross_slots(group: EPGroup, num_tokens: int) -> list[str]:
    """Rounds on two slots, a stream each, begun in opposite order on even and odd ranks, with NCCL sums on a third.

    Returns the differences from rounds that ran alone.
    """
    device, rounds = group.device, 300
    placement = Placement.linear(64, group.num_ranks)
    config = TransportConfig(hidden=4096, max_tokens_per_rank=num_tokens, num_slots=2)
    transport = create_transport("nvlink", group, placement, config)
    generator = torch.Generator(device).manual_seed(group.rank)
    scheme, slots = get_scheme("fp8_block"), []
    for slot in range(2):
        x = torch.randn(num_tokens, 4096, generator=generator, device=device).bfloat16()
        weights, ids = torch.rand(num_tokens, 64, generator=generator, device=device).topk(8)
        call = {"x": x, "routing": Routing(topk_ids=ids, topk_weights=weights), "layout": Layout.COMPACT}
        call |= {"scheme": scheme, "slot": slot}
        dispatched = transport.dispatch(**call)
        y = torch.randn(dispatched.batch.output_shape, generator=generator, device=device).bfloat16()
        alone = transport.combine(y, dispatched)
        slots.append((call, y, alone, torch.full_like(alone, float("nan")), torch.cuda.Stream()))
    numbers = torch.ones(1 << 22, device=device)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    for call, _, alone, out, _ in slots:  # loading a kernel for its first run synchronizes the whole GPU
        wrong[call["slot"]] += (out.view(torch.int16) != alone.view(torch.int16)).sum()
        out.fill_(float("nan"))
    torch.distributed.all_reduce(numbers, group=group.process_group)
    wrong.zero_()
    torch.cuda.synchronize()
    group.barrier()
    order = slots if group.rank % 2 == 0 else slots[::-1]
    for _ in range(rounds):
        work = torch.distributed.all_reduce(numbers, group=group.process_group, async_op=True)
        opened = []
        for call, *_, stream in order:
            with torch.cuda.stream(stream):
                opened.append(transport.dispatch(**call))
        for (call, y, alone, out, stream), dispatched in zip(order, opened, strict=True):
            with torch.cuda.stream(stream):
                transport.combine(y, dispatched, out=out)
                wrong[call["slot"]] += (out.view(torch.int16) != alone.view(torch.int16)).sum()
                out.fill_(float("nan"))
        work.wait()
    transport.check()
    transport.destroy()
    return [f"slot {slot}: {count} numbers differ" for slot, count in enumerate(wrong.tolist()) if count]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_tokens", [16, 200, 1000])
@pytest.mark.parametrize("num_ranks", on_gpus(2, 4))
def test_two_slots_in_opposite_order_beside_nccl(num_ranks: int, num_tokens: int) -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(cross_slots, num_tokens, num_ranks=num_ranks, config=config, device="cuda") == [[]] * num_ranks


def overlap(group: EPGroup, num_sms: int) -> list[str]:
    """Calls in micro-batches, eager and from a graph, beside calls of each part: the differences."""
    device, generator = group.device, torch.Generator(group.device).manual_seed(group.rank)
    layer = random_layer(group, "nvlink", max_tokens_per_rank=400, num_sms=num_sms)
    layer.warmup(num_topk=4)
    wrong = []
    for count, num_tokens in ((2, 800), (3, 700)):
        x = torch.randn(num_tokens, 512, generator=generator, device=device).bfloat16()
        scores, ids = torch.rand(num_tokens, 16, generator=generator, device=device).topk(4)
        parts = [layer.forward_routed(x[rows], ids[rows], scores[rows]) for rows in row_slices(num_tokens, count)]
        call = functools.partial(layer.forward_micro_batches, x, (ids, scores), num_micro_batches=count)
        graph = capture(call, device)
        for number in range(100):
            for name, found in (("eager", call()), ("graph", graph.replayed())):
                if not torch.equal(found, torch.cat(parts)):
                    wrong.append(f"{count} micro-batches, {name}, call {number}")
    layer.transport.check()
    layer.transport.destroy()
    return wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_sms", [0, 32])
@pytest.mark.parametrize("num_ranks", on_gpus(1, 2))
def test_micro_batches_on_a_stream_of_their_own(num_ranks: int, num_sms: int) -> None:
    config = GroupConfig(timeout_secs=60)
    assert launch(overlap, num_sms, num_ranks=num_ranks, config=config, device="cuda") == [[]] * num_ranks


def expert(index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [2I, H] and w2 [H, I] of one expert, bfloat16, different for each, the same on every rank."""
    generator = torch.Generator(device).manual_seed(index)
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    w13, w2 = (torch.randn(s, generator=generator, device=device) * s[1] ** -0.5 for s in shapes)
    return w13.bfloat16(), w2.bfloat16()


def big_layer(group: EPGroup, scheme: str) -> dict[str, float]:
    """Worst row error of the layer against a loop over whole experts in float32, on this rank's tokens."""
    device = group.device
    placement = Placement.linear(NUM_EXPERTS, group.num_ranks)
    mine = [expert(index, device) for index in placement.local_experts(group.rank)]
    w13, w2 = (StoredMatrix(torch.stack(matrices)) for matrices in zip(*mine, strict=True))
    weights = ExpertWeights(w13=w13, w2=w2)
    del mine
    transport = create_transport(
        "auto", group, placement, TransportConfig(hidden=HIDDEN, max_tokens_per_rank=NUM_TOKENS)
    )
    config = MoEConfig(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=NUM_EXPERTS, scheme=scheme)
    layer = ExpertParallelMoE(config, weights, transport)
    generator = torch.Generator(device).manual_seed(1000 + group.rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, device=device).bfloat16()
    scores, ids = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator, device=device).topk(NUM_TOPK)
    out = layer.forward_routed(x, ids, scores.softmax(-1))
    again = layer.forward_routed(x, ids, scores.softmax(-1))
    torch.cuda.synchronize()
    start = time.perf_counter()
    layer.forward_routed(x, ids, scores.softmax(-1))
    torch.cuda.synchronize()
    layer_secs = time.perf_counter() - start
    total = torch.zeros(NUM_TOKENS, HIDDEN, device=device)
    for index in range(NUM_EXPERTS):
        token, column = torch.nonzero(ids == index, as_tuple=True)
        w13, w2 = (w.float() for w in expert(index, device))
        gate, up = (x[token].float() @ w13.t()).chunk(2, dim=-1)
        y = (gate * torch.sigmoid(gate) * up) @ w2.t()
        total[token] += scores.softmax(-1)[token, column, None] * y
    return {
        "worst_row_error": worst_row_error(out, total),
        "same_bits": float(torch.equal(out, again)),
        "layer_secs": layer_secs,
    }


@pytest.mark.parametrize("num_ranks", on_gpus(4))
def test_a_layer_of_deepseek_v3_size(num_ranks: int) -> None:
    found = launch(big_layer, "none", num_ranks=num_ranks, device="cuda", config=GroupConfig(timeout_secs=120))
    print(json.dumps(found), file=sys.stderr)
    assert max(rank["worst_row_error"] for rank in found) < ROW_ERROR_LIMITS["bfloat16"]
    assert [rank["same_bits"] for rank in found] == [1.0] * num_ranks


def lose_a_rank(group: EPGroup, victim: int, how: str, rounds: str, folder: Path) -> None:
    """Run rounds until rank 0 is lost before a dispatch, or another one before a combine; survivors record the blamed
    ranks and the time."""
    name, sizes = rounds.split("-")[0], {"max_tokens_per_rank": 16, "ranks_per_node": 1, "chunk_rows": 5}
    layer = random_layer(group, name, hidden=64, inner=32, experts=8, **sizes)
    if rounds == "hierarchical-relays":
        layer.transport.most_gathered = 0
    x = torch.randn(16, 64, device=group.device).bfloat16()
    ids = torch.arange(32, device=group.device).reshape(16, 2) % 8
    start = time.monotonic()
    try:
        for step in range(2000):
            if step == 20 and group.rank == victim:
                where = "combine_send" if victim else "dispatch_send"
                setattr(layer.transport, where, lambda *_, **__: be_lost(how, 60))
            start = time.monotonic()
            layer.forward_routed(x, ids, torch.ones(16, 2, device=group.device))
    except PeerLostError as error:
        record(folder, group.rank, (error.ranks, time.monotonic() - start < 8.0))
        raise


@pytest.mark.parametrize("rounds", ["collective", "hierarchical", "hierarchical-relays"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "stuck"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("num_ranks", on_gpus(2, 4))
def test_survivors_name_a_lost_rank_over_nccl(
    num_ranks: int, victim: int, how: str, rounds: str, tmp_path: Path
) -> None:
    config, start = GroupConfig(timeout_secs=5, heartbeat_secs=0.25), time.monotonic()
    options: dict[str, Any] = {"device": "cuda", "grace_secs": 15, "env": {} if rounds == "collective" else NO_PEERS}
    with pytest.raises(RankFailedError):
        launch(lose_a_rank, victim, how, rounds, tmp_path, num_ranks=num_ranks, config=config, **options)
    assert recorded(tmp_path) == {rank: ((victim,), True) for rank in range(num_ranks) if rank != victim}
    assert time.monotonic() - start < 90


@pytest.mark.parametrize("num_ranks", on_gpus(1, 2, 4))
def test_the_main_job_over_nccl(num_ranks: int) -> None:
    command = [sys.executable, "-m", "ep_moe", "run", "--json", "--nproc", str(num_ranks), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    print({name: report[name] for name in ("ok", "world_size", "max_logit_diff", "times")}, file=sys.stderr)
    assert report["ok"]
    gpus = torch.cuda.device_count()
    assert [rank["device"] for rank in report["ranks"]] == [f"cuda:{rank % gpus}" for rank in range(num_ranks)]
