"""The hierarchical transport on CPU ranks that are 2 x 1, 2 x 2 and 3 x 2 nodes; `pytest -m nodes` runs every case."""

import dataclasses
import functools
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.lost import be_lost, record, recorded

from ep_moe.config import GroupConfig, Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.group.parts import split
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from ep_moe.quant import SCHEMES, get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import TransportCase, assert_same_bits, check_round, check_transport, transport_cases
from ep_moe.testing.cases import ROUTINGS
from ep_moe.testing.rounds import compute_experts
from ep_moe.testing.transports import check_abandon, check_sit_out, check_slots
from ep_moe.transport import HierarchicalTransport, create_transport
from ep_moe.transport.base import RoundKind
from ep_moe.transport.collective.messages import head_rows
from ep_moe.transport.hierarchical import relay
from ep_moe.transport.hierarchical.network import find_nodes
from ep_moe.transport.payload import RowFormat

CONFIG = GroupConfig(timeout_secs=60)
FEW = (
    "mixed-layouts",
    "batched-fewer-experts-than-ranks",
    "flat-mxfp8-of-more-rows",
    "compact-one_rank",
    "round-robin",
)
LOST_ROUND = 3


def make(
    group: EPGroup, placement: Placement, config: TransportConfig, *, per_node: int, chunk: int = 0
) -> HierarchicalTransport:
    """The transport with nodes of so many ranks and messages of so many rows; 0 gathers all rounds."""
    config = dataclasses.replace(config, ranks_per_node=per_node, chunk_rows=chunk or config.chunk_rows)
    transport = HierarchicalTransport(group, placement, config)
    transport.most_gathered = 0 if chunk else 1 << 20
    return transport


def run_all(group: EPGroup, per_node: int, chunk: int) -> dict[str, str]:
    return check_transport(functools.partial(make, per_node=per_node, chunk=chunk), group)


def failures(ranks: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    return [(rank, name, text) for rank, found in enumerate(ranks) for name, text in found.items() if text]


@pytest.mark.nodes
def test_every_case_on_two_nodes_of_two() -> None:
    ranks = launch(run_all, 2, 7, num_ranks=4, config=CONFIG, device="cpu")
    assert failures(ranks) == []
    assert set(ranks[0]) >= {case.name for case in transport_cases(4)}


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("nodes", "per_node", "chunk"),
    [(2, 3, 1000), (4, 2, 9), (2, 1, 1), (3, 1, 4), (1, 3, 7), (1, 1, 1), (2, 2, 1), (2, 2, 0), (3, 2, 0), (2, 1, 0)],
)
def test_every_case_on_other_nodes(nodes: int, per_node: int, chunk: int) -> None:
    assert failures(launch(run_all, per_node, chunk, num_ranks=nodes * per_node, config=CONFIG, device="cpu")) == []


@pytest.mark.multigpu
@pytest.mark.timeout(900)  # about 120 kernels and those of quantization compile, each on both ranks
@pytest.mark.parametrize(("num_ranks", "per_node", "chunk"), [(2, 1, 64), (2, 2, 64), (4, 2, 64), (2, 2, 0), (4, 2, 0)])
def test_every_case_on_gpus(num_ranks: int, per_node: int, chunk: int) -> None:
    """Nodes of one GPU, without peer access for NCCL, and nodes of two, with one-sided stores if they reach.

    With one GPU in each node the rounds are as many collectives, and launch the same kernels, as those of `collective`.
    """
    if num_gpu_ranks() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, there are {num_gpu_ranks()}")
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"} if per_node == 1 else {}
    assert failures(launch(run_all, per_node, chunk, num_ranks=num_ranks, config=CONFIG, device="cuda", env=env)) == []


def run_some(group: EPGroup, per_node: int, gathered: bool) -> dict[str, str]:
    """Some cases, those in which a rank forwards for others while its own experts fail, and random ones."""
    build = functools.partial(make, per_node=per_node, chunk=0 if gathered else 4)
    rng, outcomes = random.Random(group.num_ranks), {}
    cases = [case for case in transport_cases(group.num_ranks) if case.name in FEW]
    cases += [random_case(rng, group.num_ranks, number) for number in range(3 if group.num_ranks <= 6 else 2)]
    for case in cases:
        chunk = 0 if gathered else rng.choice((1, 2, 5, 64))
        transport = make(group, case.make_placement(), case.config, per_node=per_node, chunk=chunk)
        try:
            for slot in range(2):
                check_round(transport, case, group.device, slot, halves=(slot > 0, slot > 0))
            outcomes[case.name] = ""
        except AssertionError as error:
            outcomes[case.name] = str(error)
        transport.destroy()
        group.barrier()
    for check in (check_sit_out, check_abandon, check_slots):
        try:
            check(build, group)
            outcomes[check.__name__] = ""
        except AssertionError as error:
            outcomes[check.__name__] = str(error)
        group.barrier()
    return outcomes


def random_case(rng: random.Random, num_ranks: int, number: int) -> TransportCase:
    """A round of any size, format and routing, the same on every rank."""
    scheme = rng.choice(sorted(name for name in SCHEMES))
    num_topk = rng.choice((1, 2, 3, 6, 8))
    return TransportCase(
        name=f"random-{number}-{scheme}",
        tokens=tuple(rng.choice((0, 1, 3, 8, 19)) for _ in range(num_ranks)),
        hidden=rng.choice((32, 64, 96, 176)),
        num_topk=num_topk,
        num_experts=rng.choice((1, 5, num_ranks, 16, 23)),
        layout=rng.choice(list(Layout)),
        scheme=scheme,
        routing=rng.choice([name for name in ROUTINGS if num_topk > 1 or name != "one_expert"]),
        placement=rng.choice(("linear", "round_robin")),
        shared=rng.random() < 0.5,
        mixed_layouts=rng.random() < 0.3,
        quantized_input=get_scheme(scheme).payload.quantized and rng.random() < 0.3,
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "gathered"),
    [
        (2, 1, False),
        (2, 2, False),
        (2, 2, True),
        *(pytest.param(*size, False, marks=pytest.mark.matrix) for size in ((3, 1), (3, 2), (2, 3), (4, 2))),
        *(pytest.param(*size, True, marks=pytest.mark.matrix) for size in ((2, 1), (3, 2), (2, 3))),
    ],
)
def test_some_cases(nodes: int, per_node: int, gathered: bool) -> None:
    num_ranks = nodes * per_node
    assert failures(launch(run_some, per_node, gathered, num_ranks=num_ranks, config=CONFIG, device="cpu")) == []


def stress_on_rank(group: EPGroup, most_gathered: int) -> int:
    """Random rounds on nodes of one rank; those of up to `most_gathered` tokens are gathered."""
    from nvlink.stress import StressConfig, stress  # needs Triton

    options = {"ranks_per_node": 1, "chunk_rows": 2}
    return stress(
        group, StressConfig(rounds=60, transport="hierarchical", options=options, most_gathered=most_gathered)
    )


@pytest.mark.parametrize("most_gathered", [0, 60, 1 << 20], ids=["relays", "both", "gathered"])
def test_random_rounds(most_gathered: int) -> None:
    pytest.importorskip("triton")
    assert min(launch(stress_on_rank, most_gathered, num_ranks=2, config=CONFIG, device="cpu")) >= 60


def send_counted(group: EPGroup, per_node: int) -> list[tuple[Any, ...]]:
    """Results and traffic of the same round with messages of several sizes, and the same counted from the ids; and of
    a gathered round, whose traffic is by its bound."""
    num_experts, hidden, num_topk = 12, 48, 3
    generator = torch.Generator().manual_seed(group.rank)
    num_tokens = (0, 23, 40, 9, 17, 31, 2, 28)[group.rank]
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    ids = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=generator, dtype=torch.int32)
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(num_tokens, num_topk, generator=generator))
    placement = Placement.linear(num_experts, group.num_ranks)
    config = TransportConfig(hidden=hidden, max_tokens_per_rank=64)
    node = group.rank // per_node
    found: list[tuple[Any, ...]] = []
    for name in ("none", "mxfp8"):
        results = []
        for chunk in (1, 6, 1000, 0):
            transport = make(group, placement, config, per_node=per_node, chunk=chunk)
            dispatched = transport.dispatch(x, routing, layout=Layout.COMPACT, scheme=get_scheme(name))
            rows = dispatched.batch.x.view(torch.uint8)[: int(dispatched.batch.expert_num_tokens[:1].sum())].clone()
            results.append(
                (rows, transport.combine(compute_experts(dispatched.batch, placement.starts[group.rank]), dispatched))
            )
            sent = transport.traffic
            found.append(dataclasses.astuple(sent))
            transport.destroy()
        for rows, result in results[1:]:
            assert_same_bits(rows, results[0][0], "rows")
            assert_same_bits(result, results[0][1], "result")
        # counted by loops: a token crosses once for each other node that owns one of its experts
        owners = [next(r for r in range(group.num_ranks) if e < placement.starts[r + 1]) for e in range(num_experts)]
        went = [{owners[e] // per_node for e in row if e >= 0} - {node} for row in ids.tolist()]
        everywhere = group.all_gather_object([sorted(nodes) for nodes in went])
        crossing = sum(map(len, went))
        peers = [rank for rank in range(group.num_ranks) if rank % per_node == group.rank % per_node]
        back = sum(nodes.count(node) for rank in peers if rank // per_node != node for nodes in everywhere[rank])
        payload = {"none": 2 * hidden, "mxfp8": hidden + -(-hidden // 32)}[name]
        row_format = RowFormat.of(get_scheme(name), torch.bfloat16, hidden, num_topk)
        row_bytes = row_format.row_bytes
        headers = (group.num_ranks - per_node) * 9 * 8
        metadata = crossing * (row_bytes - payload) + headers
        expected = (crossing, crossing * payload, back, back * 2 * hidden, metadata)
        others, elsewhere = group.num_ranks // per_node - 1, group.num_ranks - per_node
        most, height = config.max_tokens_per_rank, config.max_tokens_per_rank + head_rows(row_format)
        metadata = others * (height * row_bytes - most * payload) + headers
        bounds = others * most, others * most * payload, elsewhere * height, elsewhere * height * 2 * hidden, metadata
        whole = [expected] * 3 + [bounds]
        assert found[-4:] == whole, f"rank {group.rank}, {name}: {found[-4:]}, expected {whole}"
    return found


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.matrix)])
def test_traffic_is_a_row_for_each_token_and_node(nodes: int, per_node: int) -> None:
    ranks = launch(send_counted, per_node, num_ranks=nodes * per_node, config=CONFIG, device="cpu")
    assert sum(found[0][0] for found in ranks) == sum(found[0][2] for found in ranks) > 0


def warm_up(group: EPGroup) -> int:
    """Warm up where the second node has no experts; the number of rounds that this rank has begun."""
    case = TransportCase(name="warm-up", tokens=(3,) * group.num_ranks, num_experts=2)
    transport = make(group, case.make_placement(), case.config, per_node=2, chunk=2)
    transport.warmup([RoundKind(num_topk=4), RoundKind(num_topk=4, scheme="fp8_block")])
    check_round(transport, case, group.device)
    return transport.num_rounds


def test_a_node_without_experts_warms_up_with_the_others() -> None:
    assert launch(warm_up, num_ranks=4, config=CONFIG, device="cpu") == [1] * 4


def fail_on_one_node(group: EPGroup) -> list[str]:
    """The errors of a transport whose second node has no memory for its rounds, and of an unknown `inside`."""
    case, said = TransportCase(name="broken", tokens=(2,) * group.num_ranks), []
    config = dataclasses.replace(case.config, ranks_per_node=2)
    full = RuntimeError(f"/dev/shm has no room on rank {group.rank}")
    for inside in ("collective", "nvshmem"):
        with mock.patch.object(relay, "CollectiveTransport", side_effect=[full] if group.rank > 1 else None):
            try:
                HierarchicalTransport(group, case.make_placement(), config, inside=inside)
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
    try:
        split(group, ((7, 8),))
    except ValueError as error:
        said.append(str(error))
    check_round(make(group, case.make_placement(), case.config, per_node=2, chunk=2), case, group.device)
    return said


def test_a_node_that_cannot_be_served_is_an_error_on_all_nodes() -> None:
    full = "rounds inside the node of rank 2 cannot be made: /dev/shm has no room on rank 2"
    unknown = "inside ('nvshmem') is not one of auto, peer, nvlink, collective"
    for rank, said in enumerate(launch(fail_on_one_node, num_ranks=4, config=CONFIG, device="cpu")):
        assert said == [full, unknown, f"rank {rank} is in none of the parts ((7, 8),)"]


def lose_a_rank(group: EPGroup, folder: Path, victim: int, how: str, where: str) -> None:
    """Run rounds until a rank is lost before its dispatch or its combine; record the error and its time."""
    case = TransportCase(name="loss", tokens=(5,) * group.num_ranks, num_topk=8)
    transport = make(group, case.make_placement(), case.config, per_node=2, chunk=2)
    inputs, first = case.inputs(group.rank), case.make_placement().starts[group.rank]
    assert isinstance(inputs.x, torch.Tensor)
    for round_ in range(LOST_ROUND + 1):
        start = time.monotonic()
        for call in ("dispatch", "combine"):
            if (group.rank, round_, call) == (victim, LOST_ROUND, where):
                be_lost(how)
            try:
                if call == "dispatch":
                    dispatched = transport.dispatch(
                        inputs.x, inputs.routing, layout=Layout.COMPACT, scheme=get_scheme("none")
                    )
                else:
                    transport.combine(compute_experts(dispatched.batch, first), dispatched)
            except PeerLostError as error:
                record(folder, group.rank, (error.ranks, str(error), time.monotonic() - start))
                raise


@pytest.mark.parametrize(
    ("how", "victim", "where", "within_secs"),
    [
        ("SIGKILL", 3, "dispatch", 2.0),
        ("SIGKILL", 0, "combine", 2.0),
        ("raises", 1, "combine", 2.0),
        ("stuck", 2, "dispatch", 5.0),
    ],
)
def test_survivors_on_all_nodes_name_the_lost_rank(
    tmp_path: Path, how: str, victim: int, where: str, within_secs: float
) -> None:
    config = GroupConfig(timeout_secs=3.0, heartbeat_secs=0.2)
    with pytest.raises(RankFailedError) as caught:
        launch(lose_a_rank, tmp_path, victim, how, where, num_ranks=4, config=config, device="cpu")
    assert caught.value.rank == victim
    outcomes = recorded(tmp_path)
    assert set(outcomes) == {0, 1, 2, 3} - {victim}
    for ranks, text, secs in outcomes.values():
        assert ranks == (victim,), text
        assert f"rank {victim}" in text
        assert secs < within_secs, text


def lose_a_rank_at_the_start(group: EPGroup, folder: Path) -> None:
    """Rank 1 is stuck while its node makes its rounds; the other node has no experts, and none to make."""
    case = TransportCase(name="start", tokens=(1,) * group.num_ranks, num_experts=2)
    if group.rank == 1:
        relay.CollectiveTransport = lambda *_: time.sleep(1000)
    try:
        make(group, case.make_placement(), case.config, per_node=2, chunk=2)
    except PeerLostError as error:
        record(folder, group.rank, error.ranks)
        raise


def test_survivors_name_a_rank_that_is_lost_at_the_start(tmp_path: Path) -> None:
    config = GroupConfig(timeout_secs=2.0, heartbeat_secs=0.2)
    with pytest.raises(RankFailedError) as caught:
        launch(lose_a_rank_at_the_start, tmp_path, num_ranks=4, config=config, device="cpu")
    assert recorded(tmp_path) == dict.fromkeys((0, 2, 3), (1,))
    assert caught.value.rank == 1


def refuse_bad_nodes(group: EPGroup) -> list[str]:
    """The error of each setting that no node can have, by name; the group serves the next transport."""
    placement, said = Placement.linear(6, group.num_ranks), []
    config = TransportConfig(hidden=16, max_tokens_per_rank=4)
    for changes in ({"ranks_per_node": 2}, {"ranks_per_node": 4}, {"on_peer_loss": "mask"}):
        try:
            create_transport("hierarchical", group, placement, dataclasses.replace(config, **changes))
        except ValueError as error:
            said.append(str(error))
    case = TransportCase(name="one node", tokens=(2,) * group.num_ranks)
    transport = create_transport("hierarchical", group, case.make_placement(), case.config)
    check_round(transport, case, group.device)
    assert transport.ranks_per_sum == group.num_ranks  # the launcher has made one node
    return said


def test_bad_nodes_are_refused_on_every_rank() -> None:
    expected = [
        "ranks_per_node (2) does not divide num_ranks (3)",
        "ranks_per_node (4) does not divide num_ranks (3)",
        "on_peer_loss ('mask') needs transport 'peer': a collective waits for all",
    ]
    assert launch(refuse_bad_nodes, num_ranks=3, config=CONFIG, device="cpu") == [expected] * 3
    with pytest.raises(ValueError, match=re.escape("chunk_rows (0) must be at least 1")):
        TransportConfig(hidden=16, max_tokens_per_rank=4, chunk_rows=0)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((0, 0, 1), r"nodes have different numbers of ranks \(2 on node 0, 1 on node 1\)"),
        ((0, 1, 0, 1), r"ranks 0 to 3 are on nodes \[0, 1, 0, 1\].* node by node"),
    ],
)
def test_nodes_of_the_launcher(nodes: tuple[int, ...], said: str) -> None:
    group: Any = SimpleNamespace(rank=1, num_ranks=len(nodes), node=nodes[1], all_gather_object=lambda _: list(nodes))
    with pytest.raises(ValueError, match=said):
        find_nodes(group, 0)
    group.all_gather_object = lambda _: sorted(nodes[:2] * 2)
    group.num_ranks = 4
    grid = find_nodes(group, 0)
    assert (grid.num_nodes, grid.ranks_per_node) == (len(set(nodes[:2])), 4 // len(set(nodes[:2])))
