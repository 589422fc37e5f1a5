"""A group names the lost rank, whichever it is and however it was lost."""

import dataclasses
import json
import multiprocessing
import os
import pickle
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.fake_rows import continuation, lead
from helpers.lost import be_lost, record, recorded

from ep_moe.config import GroupConfig
from ep_moe.engines.transformers.decoding.passes import MESSAGES, Logprob, RowsMade, RowsPlan, RowStart, Sampling, Shape
from ep_moe.environment import SECRET, LaunchEnv
from ep_moe.group import EPGroup, PeerLostError, StorePlace, store
from ep_moe.group.collectives import begin_all_gather
from ep_moe.group.joining import check_nodes
from ep_moe.group.watch import Watch
from ep_moe.group.wire import decode, encode
from ep_moe.launch import RankFailedError, launch, run_rank
from ep_moe.serving.channel import RankChannel
from ep_moe.serving.scheduler import Generation

CONFIG = GroupConfig(timeout_secs=3.0, heartbeat_secs=0.2)
SLACK_SECS = 2.0
LOST_ROUND = 20


def exchange(group: EPGroup, round_: int) -> torch.Tensor:
    """One all_to_all over the group: every rank receives the id of each rank."""
    sent = torch.full((group.num_ranks,), float(group.rank))
    received = torch.full_like(sent, float("nan"))
    work = dist.all_to_all_single(received, sent, group=group.process_group, async_op=True)
    group.wait(work, phase="dispatch", round=round_)
    return received


def lose_a_rank(group: EPGroup, folder: Path, victim: int, how: str) -> None:
    """Exchange until a failure; record the error, the time, and the error of the next call."""
    for round_ in range(10**9):
        if (group.rank, round_) == (victim, LOST_ROUND):
            if how == "leaves":
                return
            be_lost(how)
        start = time.monotonic()
        try:
            exchange(group, round_)
        except PeerLostError as error:
            secs = time.monotonic() - start
            with pytest.raises(PeerLostError) as again:
                group.check()
            with pytest.raises(PeerLostError):
                exchange(group, round_ + 1)
            record(folder, group.rank, (error, secs, str(again.value), time.monotonic() - start - secs))
            raise


AT_ONCE, AFTER_TIMEOUT = SLACK_SECS, CONFIG.timeout_secs + SLACK_SECS
KILLED = "was killed by SIGKILL (noticed in dispatch of round 20)"
LOSSES = {
    "SIGKILL-0": (AT_ONCE, f"rank 0 {KILLED}"),
    "SIGKILL-2": (AT_ONCE, f"rank 2 {KILLED}"),
    "SIGSTOP-0": (AFTER_TIMEOUT, "rank 0 stopped answering in dispatch of round 20: no heartbeat for"),
    "stuck-2": (AFTER_TIMEOUT, "did not arrive in dispatch of round 20: alive, last seen in dispatch of round 19"),
    "raises-1": (AT_ONCE, "rank 1 failed: ValueError: 7 is too many (after dispatch of round 19)"),
    "leaves-1": (AT_ONCE, "rank 1 has left (noticed in dispatch of round 20)"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_survivors_name_the_lost_rank(tmp_path: Path, loss: str) -> None:
    (how, _, number), (within_secs, words) = loss.partition("-"), LOSSES[loss]
    victim = int(number)
    with pytest.raises(RankFailedError) as caught:
        launch(lose_a_rank, tmp_path, victim, how, num_ranks=3, config=CONFIG, device="cpu")
    assert caught.value.rank == victim
    outcomes = recorded(tmp_path)
    assert set(outcomes) - {victim} == {0, 1, 2} - {victim}
    for rank in {0, 1, 2} - {victim}:
        error, secs, again, afterwards_secs = outcomes[rank]
        assert error.ranks == (victim,)
        assert words in str(error)
        assert again == str(error)
        assert secs < within_secs
        assert afterwards_secs < 1.0


def use_collectives(group: EPGroup) -> tuple[list[Any], list[float], list[float]]:
    for round_ in range(3):
        received = exchange(group, round_)
    summed = group.all_reduce_sum(torch.tensor([1.0, float(group.rank)]))
    group.barrier()
    gathered = group.all_gather_object({"rank": group.rank, "text": "x" * 9_000_000 * group.rank})
    after = (group.rank + 1) % group.num_ranks
    before = (group.rank - 1) % group.num_ranks
    ring = torch.full((2,), float("nan"))
    works = [dist.isend(torch.full((2,), float(group.rank)), after), dist.irecv(ring, before)]
    for work in works:
        assert work is not None
        group.wait(work, phase="ring", round=0)
    assert ring.tolist() == [before, before]
    return gathered, summed.tolist(), received.tolist()


def test_collectives() -> None:
    gathered = [{"rank": rank, "text": "x" * 9_000_000 * rank} for rank in range(3)]
    expected = (gathered, [3, 0 + 1 + 2], [0, 1, 2])
    assert launch(use_collectives, num_ranks=3, config=CONFIG, device="cpu") == [expected] * 3


@dataclasses.dataclass(frozen=True)
class Executed:
    """A value whose pickle makes a folder where it is read."""

    folder: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_values_travel_between_ranks(tmp_path: Path) -> None:
    start = RowStart(
        row=1, prompt=(5, 2**62), max_new_tokens=3, sampling=Sampling(temperature=0.1, logit_bias=((7, -1.5),))
    )
    plan = RowsPlan(
        ended=((), (2,)), starts=((start,), ()), passes=1, shapes=(Shape(rows=1, capacity=2, sampled=True),)
    )
    found = {
        "text": "\ud800 \N{SNOWMAN}",
        3: {"of": [float("-inf"), 1e-308]},
        (1, None): {4, 5},
        b"\xff": frozenset("a"),
    }
    made = RowsMade(tokens=[[-1, 5]], logprobs={1: [Logprob(value=float("-inf"), rank=3, top=((4, -0.25),))]})
    for value in (plan, made, found, [], {}, (), ((),), {"tuple": [1]}, [True, 1, 1.0]):
        again = decode(encode(value), *MESSAGES)
        assert (again, str(again), type(again)) == (value, str(value), type(value))
    evil = Executed(str(tmp_path / "read"))
    refused = [pickle.dumps(evil), pickle.dumps(plan), b"", b"{", b"[" * 10**5, b"\xff", b'{"tuple": 1}']
    refused += [b'{"dict": [[[], 1]]}', b"{}", b'{"tuple": [], "set": []}', b'{"Executed": ["x"]}']
    refused += [b'{"RowStart": [1]}', b'{"bytes": "0"}']
    for data in refused:
        with pytest.raises(ValueError, match="is nothing that a rank has sent"):
            decode(data, *MESSAGES)
    assert not (tmp_path / "read").exists()
    for value in (evil.__reduce__, torch.ones(1), {1: [torch.float32]}):
        with pytest.raises(ValueError, match="which ranks do not send to each other"):
            EPGroup.single("cpu").all_gather_object(value)


def write_as_a_stranger(folder: str, num_ranks: int) -> None:
    """Send pickles and plans to ranks, and report deaths to them, with the keys that the store lists to everyone."""
    foreign = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    told: Any = foreign
    assert not any(os.environ[SECRET] in key for key in told.list_keys())
    names = {"ep_moe/world/0/watch", *(key.removesuffix("/beat/0") for key in told.list_keys() if "/beat/0" in key)}
    assert len(names) == 2
    forged = encode(RowsPlan(ended=((0, 1, 2, 3),) * num_ranks, starts=((),) * num_ranks))
    for message in (pickle.dumps(Executed(folder)), forged, encode((1, [[7]]))):
        for name in ("serving", *(f"{name}/serving" for name in names)):
            told.queue_push(f"{name}/orders/1/{os.getpid()}", message)
            told.queue_push(f"{name}/answers", message)
    foreign.set("ep_moe/deaths", json.dumps([[0, "was forged"]]))
    foreign.set("ep_moe/world/0/watch/failure", json.dumps([[0], "plan", 1, "was forged"]))


def lead_beside_a_stranger(group: EPGroup, folder: str) -> list[list[int]]:
    if group.rank == 1:
        write_as_a_stranger(folder, group.num_ranks)
    group.barrier()
    return lead(group, "close")


def test_a_stranger_at_the_store_neither_runs_code_nor_changes_plans(tmp_path: Path) -> None:
    config, folder = GroupConfig(timeout_secs=20), tmp_path / "read"
    attacked = launch(lead_beside_a_stranger, str(folder), num_ranks=2, config=config, device="cpu")
    assert attacked[0] == [continuation(Generation(prompt=(n,) * n, max_new_tokens=n)) for n in range(1, 21)]
    assert not folder.exists()


def test_without_a_secret_what_strangers_write_is_a_named_error(tmp_path: Path) -> None:
    """As under torchrun, which has nothing that its ranks alone know."""
    shared = store.serve_store("127.0.0.1", 0, 5.0)
    foreign: Any = dist.TCPStore("127.0.0.1", shared.port, wait_for_workers=False)
    channel = RankChannel(StorePlace(host="127.0.0.1", port=shared.port, secret=""), 1, 60.0)
    foreign.queue_push(f"serving/orders/1/{os.getpid()}", pickle.dumps(Executed(str(tmp_path / "read"))))
    with pytest.raises(ValueError, match="is nothing that a rank has sent"):
        channel.receive(10)
    assert not (tmp_path / "read").exists()
    watch = Watch(dist.PrefixStore("w", shared), rank=0, world_ranks=(0,), config=CONFIG, local_rank=0, secret="")
    watch.meet(5.0)
    foreign.set("w/failure", pickle.dumps("no rank"))
    deadline = time.monotonic() + 5
    while watch.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the launcher's store holds what no rank wrote" in str(watch.failure)
    watch.close()


def test_a_rank_leaves_once_all_are_connected() -> None:
    """gloo had failed to connect to a rank that was done before."""
    shared = store.serve_store("127.0.0.1", 0, 5.0)
    prefixed = dist.PrefixStore("w", shared)
    first, second = (
        Watch(prefixed, rank=rank, world_ranks=(0, 1), config=CONFIG, local_rank=rank, secret="") for rank in range(2)
    )
    first.meet(5.0)
    first.connected()
    leaving = threading.Thread(target=first.let_connect, daemon=True)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    second.connected()
    leaving.join(0.5)
    assert not leaving.is_alive()
    first.close()
    second.close()


def be_slow(group: EPGroup) -> tuple[float, list[int]]:
    start = time.monotonic()
    group.wait_for_all("load")
    at_once = time.monotonic() - start
    if group.rank == 1:
        time.sleep(CONFIG.timeout_secs + SLACK_SECS)  # a barrier would have blamed it
    group.wait_for_all("load")
    assert time.monotonic() - start > CONFIG.timeout_secs + SLACK_SECS
    return at_once, group.all_gather_object(group.rank)


def test_wait_for_all_is_patient_with_a_slow_rank() -> None:
    for at_once, gathered in launch(be_slow, num_ranks=3, config=CONFIG, device="cpu"):
        assert at_once < SLACK_SECS
        assert gathered == [0, 1, 2]


def wait_beside_a_lost_rank(group: EPGroup, folder: Path, how: str) -> None:
    start = time.monotonic()
    try:
        group.wait_for_all("load")  # rank 1 may be lost before the others have noticed that it arrived here
        if group.rank == 1:
            be_lost(how)
        start = time.monotonic()
        group.wait_for_all("load")
    except PeerLostError as error:
        record(folder, group.rank, (str(error), time.monotonic() - start))
        raise


@pytest.mark.parametrize(
    ("how", "within_secs", "words"),
    [
        ("SIGKILL", AT_ONCE, "rank 1 was killed by SIGKILL (noticed in load)"),
        ("SIGSTOP", AFTER_TIMEOUT, "rank 1 stopped answering in load: no heartbeat for 3.0 s (timeout 3 s)"),
    ],
    ids=["killed", "stopped"],
)
def test_wait_for_all_names_the_lost_rank(tmp_path: Path, how: str, within_secs: float, words: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(wait_beside_a_lost_rank, tmp_path, how, num_ranks=3, config=CONFIG, device="cpu")
    assert caught.value.rank == 1
    for text, secs in (recorded(tmp_path)[rank] for rank in (0, 2)):
        assert text == words
        assert secs < within_secs


def test_a_single_rank_needs_no_others() -> None:
    with EPGroup.single("cpu") as group:
        assert (group.rank, group.num_ranks, group.local_rank, group.node) == (0, 1, 0, 0)
        assert group.process_group is None
        assert group.all_gather_object("a") == ["a"]
        assert group.all_reduce_sum(torch.ones(2)).tolist() == [1, 1]
        group.barrier()
        group.wait_for_all("load")
        with pytest.raises(RuntimeError, match="broken pipe"), group.guard("generate"):
            raise RuntimeError("broken pipe")
    group.destroy()


SILENCE = "stopped answering: no heartbeat for 5.0 s (timeout 5 s)"
ERRORS = {
    f"rank 2 {SILENCE.replace(':', ' in dispatch of round 17:', 1)}": ((2,), "dispatch", 17, SILENCE),
    "rank 0 and rank 3 did not arrive in connect: late": ((0, 3), "connect", None, "did not arrive: late"),
    "rank 1 failed: ValueError: no": ((1,), "", None, "failed: ValueError: no"),
    "the store is gone (noticed in generate)": ((), "generate", None, "the store is gone"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_the_error_reads_well_and_travels(text: str) -> None:
    error = PeerLostError(*ERRORS[text])
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == text
    assert (copy.ranks, copy.phase, copy.round, copy.reason) == ERRORS[text]


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(3))


def guard_foreign_code(group: EPGroup, folder: Path) -> None:
    unrelated = RuntimeError("the peer review of this tensor failed")  # it says peer, and no peer is to blame
    for error in (unrelated, ValueError("bad shape")):
        with pytest.raises(type(error)) as caught, group.guard("generate"):
            raise error
        assert caught.value is error
    group.barrier()
    if group.rank == 1:
        be_lost("SIGKILL")
    with pytest.raises(PeerLostError) as lost, group.guard("generate"):
        reduce_for_ever()
    record(folder, group.rank, (lost.value.ranks, lost.value.phase, lost.value.round, type(lost.value.__cause__)))


def test_guard_names_the_rank_that_foreign_code_lost(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="^rank 1 was killed by SIGKILL$"):
        launch(guard_foreign_code, tmp_path, num_ranks=3, config=CONFIG, device="cpu")
    assert recorded(tmp_path) == dict.fromkeys((0, 2), ((1,), "generate", None, RuntimeError))


def connect_beside_a_dead_rank(group: EPGroup, folder: Path) -> None:
    group.barrier()
    if group.rank == 1:
        be_lost("SIGKILL")
    group._is_connected = False  # as on NCCL
    start, everyone = time.monotonic(), torch.zeros(2)
    with (
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(dist, "all_reduce", side_effect=lambda *args, **options: time.sleep(1000)),
        pytest.raises(PeerLostError) as lost,
    ):
        begin_all_gather(group, everyone, everyone[:1])
    record(folder, group.rank, (lost.value.ranks, time.monotonic() - start < AT_ONCE))


def test_a_first_operation_that_never_ends_names_the_lost_rank(tmp_path: Path) -> None:
    """NCCL waits for ever for a rank that dies while it makes a communicator."""
    with pytest.raises(RankFailedError, match="^rank 1 was killed by SIGKILL$"):
        launch(connect_beside_a_dead_rank, tmp_path, num_ranks=2, config=CONFIG, device="cpu")
    assert recorded(tmp_path) == {0: ((1,), True)}


def bare_collective_beside_a_stuck_rank(group: EPGroup) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 0:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def test_a_foreign_timeout_names_the_stuck_rank() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="^rank 0 did not arrive in .*: alive") as caught:
        launch(bare_collective_beside_a_stuck_rank, num_ranks=3, config=CONFIG, device="cpu")
    assert caught.value.rank == 0
    assert time.monotonic() - start < 3 + 4 * SLACK_SECS


def work_in_halves(world: EPGroup, folder: Path) -> list[float] | None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = halves[world.rank % 2]
    store = dist.distributed_c10d._get_default_store()
    with EPGroup.from_process_group(half, store, CONFIG) as group:
        assert (group.num_ranks, group.rank) == (2, world.rank // 2)
        assert (group.local_rank, group.local_num_ranks, group.node) == (world.rank // 2, 2, 0)
        for round_ in range(50):
            if (world.rank, round_) == (2, LOST_ROUND):
                be_lost("SIGKILL")
            try:
                received = exchange(group, round_)
            except PeerLostError as error:
                record(folder, world.rank, (error.ranks, error.round, str(error)))
                return None
    with EPGroup.from_process_group(half, store, CONFIG) as again:
        received = exchange(again, 0)
    record(folder, world.rank, received.tolist())
    return received.tolist()


def test_two_subsets_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(work_in_halves, tmp_path, num_ranks=4, config=CONFIG, device="cpu")
    assert caught.value.failures == {2: "rank 2 was killed by SIGKILL"}
    assert recorded(tmp_path) == {
        0: ((1,), LOST_ROUND, "rank 1 was killed by SIGKILL (noticed in dispatch of round 20)"),
        1: [0, 1],
        3: [0, 1],
    }


def refuse_bad_places(group: EPGroup, folder: str) -> list[str]:
    """The error of each bad device or store; none for one that is not refused."""
    whole, store = group.process_group, dist.distributed_c10d._get_default_store()
    assert whole is not None
    calls = (
        lambda: EPGroup.from_process_group(whole, dist.FileStore(f"{folder}/store", 1)),
        lambda: EPGroup.from_process_group(whole, store, device="mps"),
        lambda: EPGroup.single("cuda:99"),
    )
    said = []
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_bad_places_are_refused(tmp_path: Path) -> None:
    [said] = launch(refuse_bad_places, str(tmp_path), num_ranks=1, config=CONFIG, device="cpu")
    expected = ["ValueError: .*FileStore.*TCPStore", r"ValueError: .*device \(mps\).*cpu:gloo"]
    expected.append("RuntimeError: .*cuda:99 was requested")
    assert len(said) == len(expected)
    for message, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, message), message


def device_without_an_index(group: EPGroup) -> tuple[str, str]:
    """The devices of groups that ask for "cuda" and for GPU 1, while GPU 2 is the current one."""
    whole, store = group.process_group, dist.distributed_c10d._get_default_store()
    assert whole is not None
    backends = mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:gloo")
    with backends, mock.patch.object(torch.cuda, "current_device", return_value=2):
        groups = [EPGroup.from_process_group(whole, store, device=device) for device in ("cuda", "cuda:1")]
    for made in groups:
        made.destroy()
    return str(groups[0].device), str(groups[1].device)


def test_cuda_is_the_current_device() -> None:
    assert launch(device_without_an_index, num_ranks=1, config=CONFIG, device="cpu") == [("cuda:2", "cuda:1")]


def bare_rank(rank: int, num_ranks: int, port: int, target: Any, *args: Any) -> None:
    """A rank as srun starts it: no launcher hosts the store or sees the rank die."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    torch.set_num_threads(1)
    run_rank(target, *args, config=CONFIG, device="cpu")


def start_bare_ranks(num_ranks: int, target: Any, *args: Any) -> list[int | None]:
    """Run ranks without a launcher; returns their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=bare_rank, args=(r, num_ranks, port, target, *args)) for r in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


def bare_target(group: EPGroup, folder: Path, victim: int) -> None:
    try:
        for round_ in range(2 * LOST_ROUND):
            if (group.rank, round_) == (victim, LOST_ROUND):
                be_lost("SIGKILL")
            exchange(group, round_)
    except PeerLostError as error:
        record(folder, group.rank, error.ranks)
        return
    if group.rank != 0:
        time.sleep(1.0)  # rank 0 must keep its store until the others are done
    record(folder, group.rank, "done")


def look_for_the_store(group: EPGroup, folder: Path) -> None:
    """Whether the store can be reached at the ranks' address, and at another address of this machine."""
    reached = []
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as client:
            reached.append(client.connect_ex((address, int(os.environ["MASTER_PORT"]))) == 0)
    group.barrier()
    record(folder, group.rank, reached)
    if group.rank != 0:
        time.sleep(1.0)


def test_the_store_of_rank_0_listens_where_the_ranks_meet_alone(tmp_path: Path) -> None:
    start_bare_ranks(2, look_for_the_store, tmp_path)
    assert recorded(tmp_path) == dict.fromkeys(range(2), [True, False])


LISTENING = {  # a host's addresses, and where its store listens; None is every interface
    "127.0.0.3": (None, "127.0.0.3"),
    "localhost": (["127.0.0.1"], "127.0.0.1"),
    "both": (["198.51.100.7", "127.0.0.1"], None),  # as /etc/hosts may have it: others resolve it otherwise
    "loopback": (["127.0.1.1"], None),
    "elsewhere": (["198.51.100.7"], None),
    "ipv4-first": (["2001:db8::7", "0.0.0.0"], "0.0.0.0"),  # stands for an address of this machine
    "no-such-host.invalid": (None, None),
}


@pytest.mark.parametrize("host", LISTENING)
def test_where_a_store_listens(host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    addresses, expected = LISTENING[host]
    if addresses is not None:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        found = [(f, socket.SOCK_STREAM, 6, "", (a, 0)) for f, a in zip(families, addresses, strict=True)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    listener = store.listen(host, 0)
    warning = f"{host} is not an address of this machine: the store listens on every interface, port 0"
    assert [record.getMessage() for record in caplog.records] == ([] if expected else [warning])
    assert (listener is None) == (expected is None)
    if listener is not None:
        with listener:
            assert listener.getsockname()[0] == expected


def test_a_port_in_use_is_named() -> None:
    with store.listen("127.0.0.1", 0) as listener:  # type: ignore[union-attr]
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"the store cannot listen at 127.0.0.1, port {port}: .*in use"):
            store.listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("victim", "outcomes"),
    [(-1, dict.fromkeys(range(3), "done")), (0, {1: (0,), 2: (0,)}), (1, {0: (1,), 2: (1,)})],
    ids=["none", "store", "other"],
)
def test_without_a_launcher_heartbeats_show_the_loss(tmp_path: Path, victim: int, outcomes: dict[int, Any]) -> None:
    codes = start_bare_ranks(3, bare_target, tmp_path, victim)
    assert recorded(tmp_path) == outcomes
    assert codes == [-9 if rank == victim else 0 for rank in range(3)]


@pytest.mark.parametrize(
    ("local_ranks", "message"),
    [
        ((0, 1, 0, 1), None),
        ((0, 0, 0, 0), r"LOCAL_WORLD_SIZE \(2\) is not the number of ranks of every node \(1\)"),
        ((0, 1, 0), r"nodes have different numbers of ranks \(2 from rank 0 on a, 1 from rank 2 on b\); start as many"),
        ((0, 0, 1, 1), r"rank 3 has LOCAL_RANK 1, 2 was expected: ranks have to be numbered node by node"),
        ((1, 0, 1, 0), r"rank 0 has LOCAL_RANK 1, 0 was expected"),
    ],
    ids=["even", "local size", "uneven", "mixed", "descending"],
)
def test_ranks_are_numbered_by_even_nodes(local_ranks: tuple[int, ...], message: str | None) -> None:
    sizes = {"rank": 0, "world_size": len(local_ranks), "local_rank": 0, "local_world_size": 2}
    env = LaunchEnv(**sizes, master_addr="a", master_port=1, store_is_hosted=True)
    places = [("ab"[index // 2], local_rank) for index, local_rank in enumerate(local_ranks)]
    if message is None:
        check_nodes(places, env)
        return
    with pytest.raises(ValueError, match=message):
        check_nodes(places, env)
