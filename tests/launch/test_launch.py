"""Launched ranks return results in order, are named when they fail, and never outlive their launcher."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import environ, hear_sighup, is_running, wait_until_gone

from ep_moe.config import GroupConfig
from ep_moe.group import EPGroup
from ep_moe.launch import RankFailedError, launch, local, run_rank
from ep_moe.launch.signals import terminable

CONFIG = GroupConfig(timeout_secs=4.0, heartbeat_secs=0.2)


def write_pid(group: EPGroup, folder: str) -> None:
    partial = Path(folder, f".{group.rank}")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder, str(group.rank)))


def read_pids(folder: Path, num_ranks: int, within_secs: float = 60.0) -> list[int]:
    deadline = time.monotonic() + within_secs
    paths = [folder / str(rank) for rank in range(num_ranks)]
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{num_ranks} ranks did not start within {within_secs} s"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def describe_rank(group: EPGroup, factor: int, folder: str) -> tuple[Any, ...]:
    write_pid(group, folder)
    print(f"hello from rank {group.rank}")
    os.system(f"echo child of rank {group.rank}")
    group.barrier()
    return (
        factor * group.rank,
        group.num_ranks,
        group.local_rank,
        group.node,
        str(group.device),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_results_come_in_rank_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    results = launch(describe_rank, 10, str(tmp_path), num_ranks=num_ranks, config=CONFIG, device="cpu")
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    assert results == [(10 * rank, num_ranks, rank, 0, "cpu", threads) for rank in range(num_ranks)]
    out, err = capfd.readouterr()
    assert out == ""
    for rank in range(num_ranks):
        assert f"hello from rank {rank}\n" in err
        assert f"child of rank {rank}\n" in err
    assert wait_until_gone(read_pids(tmp_path, num_ranks), 0.0) == []


def test_the_environment_is_set_before_the_target_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os, torch\nSEEN = os.environ.get('EP_MOE_TEST'), os.environ.get('EP_MOE_OWN')\n"
    source += "def target(group):\n    return SEEN, os.environ['RANK'], torch.get_num_threads()\n"
    (tmp_path / "target_of_a_launch.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EP_MOE_OWN", "inherited")
    from target_of_a_launch import target

    env = {"EP_MOE_TEST": "given", "OMP_NUM_THREADS": "2,1"}
    results = launch(target, num_ranks=2, config=CONFIG, device="cpu", env=env)
    assert results == [(("given", "inherited"), str(rank), 2) for rank in range(2)]
    assert "EP_MOE_TEST" not in os.environ


def test_a_target_with_a_name_is_imported_by_ranks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os\nIMPORTER = os.getpid()\ndef target(group):\n    return IMPORTER == os.getpid(), group.rank\n"
    (tmp_path / "named_target.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    results = launch("named_target:target", num_ranks=2, config=CONFIG, device="cpu")
    assert results == [(True, 0), (True, 1)]
    assert "named_target" not in sys.modules
    with pytest.raises(RankFailedError, match="rank 0: AttributeError: module 'named_target' has no attribute 'aim'"):
        launch("named_target:aim", num_ranks=1, config=CONFIG, device="cpu")


PRELOADING = """
import sys
from ep_moe.launch import launch
sys.path.insert(0, sys.argv[1])
from target_of_a_launch import target
env = {"EP_MOE_TEST": "given", "TRITON_INTERPRET": "1"}
print(*launch(target, num_ranks=2, device="cpu", env=env, preload=("no_such_module", *sys.argv[2:])))
"""


def launch_preloading(folder: Path, *preload: str) -> "subprocess.CompletedProcess[str]":
    """Launch with these modules preloaded, in a new process, as only a process's first launch uses them.

    They are in a folder that only the process itself has put on its path.
    """
    source = "import gc, os\nIMPORTER, SEEN = os.getpid(), os.environ.get('EP_MOE_TEST')\n"
    source += "def target(group):\n    import triton.language as tl\n"  # its functions are for the interpreter, or not
    source += "    collects = gc.isenabled() and gc.get_freeze_count() > len(gc.get_objects())\n"
    source += "    return IMPORTER == os.getppid(), SEEN, os.environ['EP_MOE_TEST'], type(tl.sum).__name__, collects\n"
    (folder / "target_of_a_launch.py").write_text(source)
    (folder / "broken_module.py").write_text("raise ValueError('broken')\n")
    command = [sys.executable, "-c", PRELOADING, str(folder), *preload]
    return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60)


def test_ranks_share_what_is_preloaded(tmp_path: Path) -> None:
    done = launch_preloading(tmp_path, "target_of_a_launch")
    expected = "(True, None, 'given', 'InterpretedFunction', True)"
    assert done.stdout == f"{expected} {expected}\n", done.stderr


def test_a_failure_to_preload_is_named(tmp_path: Path) -> None:
    done = launch_preloading(tmp_path, "broken_module")
    lines = done.stderr.splitlines()
    assert "ValueError: broken" in lines
    assert lines[-1].startswith("RuntimeError: the server that forks ranks has ended")
    assert lines[-1].endswith("(modules to preload: no_such_module, broken_module)")


NO_TRITON = """
import sys
class NoTriton:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
"""
ON_TORCH = """
import sys, torch
from helpers import layers
from ep_moe.cli import app
from ep_moe.launch import launch
from ep_moe.testing import worst_row_error
arguments = "linear", "none", layers.Layout.COMPACT, torch.float32
parts = launch(layers.run_layer, *arguments, num_ranks=2, device="cpu")
print(worst_row_error(torch.cat(parts, dim=1)[0], layers.expected(torch.float32)))
app(["run", "--nproc", "1", "--device", "cpu", "--config", sys.argv[1]])
"""


def test_everything_on_a_cpu_does_without_triton(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TRITON)  # Python imports it in every process
    (tmp_path / "small.toml").write_text('[run]\nprompts = ["In"]\nnew_tokens = [2]\nteacher_tokens = 8\n')
    command = [sys.executable, "-c", ON_TORCH, str(tmp_path / "small.toml")]
    done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, timeout=120)
    error, *report = done.stdout.splitlines()
    assert float(error) < 1e-6, done.stderr
    assert done.returncode == 0
    assert any("tokens equal" in line for line in report), done.stdout


BARE = """
import os, sys
from ep_moe.launch import launch
if sys.argv[1:]:
    os.close(2)
print(launch("target_of_a_launch:target", num_ranks=1, device="cpu"))
"""


def test_a_long_folder_and_no_stderr_do_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    (tmp_path / "target_of_a_launch.py").write_text(
        "import sys\ndef target(group):\n    return sys.stderr.write('x')\n"
    )
    env = environ(tmp_path) | {"TMPDIR": str(folder)}
    for shell, closes in (('"$@" 2>&-', []), ('"$@"', ["closes"])):
        command = ["bash", "-c", shell, "bash", sys.executable, "-c", BARE, *closes]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.returncode) == ("[1]\n", 0), done.stderr


def fail_on_rank_1(group: EPGroup, how: str) -> None:
    if group.rank == 1:
        if how == "raises":
            raise ValueError("hidden (30) must be a multiple of 16")
        if how == "exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    for round_ in range(10**9):
        group.wait(dist.all_reduce(torch.ones(1), async_op=True), phase="dispatch", round=round_)


@pytest.mark.parametrize(
    ("how", "error_type", "line", "seen_by_others"),
    [
        (
            "raises",
            "ValueError",
            "rank 1: ValueError: hidden (30) must be a multiple of 16",
            "rank 1 failed: ValueError: hidden (30) must be a multiple of 16",
        ),
        ("exits", "Died", "rank 1 exited with code 3 without a result", "rank 1 exited with code 3 without a result"),
        ("killed", "Died", "rank 1 was killed by SIGKILL", "rank 1 was killed by SIGKILL"),
    ],
    ids=["raises", "exits", "killed"],
)
def test_the_first_failure_is_the_one_reported(how: str, error_type: str, line: str, seen_by_others: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        launch(fail_on_rank_1, how, num_ranks=3, config=CONFIG, device="cpu")
    error = caught.value
    assert time.monotonic() - start < 10
    assert (str(error), error.rank, error.error_type) == (line, 1, error_type)
    assert error.failures[1] == line
    for rank in (0, 2):
        assert error.failures[rank].startswith(f"rank {rank}: PeerLostError: {seen_by_others}")
    assert ("in fail_on_rank_1" in error.traceback_text) == (how == "raises")
    assert error.traceback_text in str(error.__cause__)
    assert pickle.loads(pickle.dumps(error)).failures == error.failures


def return_a_lambda(group: EPGroup) -> Any:
    return lambda: group


def test_a_result_that_cannot_travel_is_a_named_failure() -> None:
    with pytest.raises(RankFailedError, match=r"^rank 0: .*lambda"):
        launch(return_a_lambda, num_ranks=1, config=CONFIG, device="cpu")


def cling_to_life(group: EPGroup, folder: str) -> None:
    write_pid(group, folder)
    group.barrier()
    if group.rank == 0:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


_kept: list[Any] = []


def keep_a_lock(group: EPGroup) -> str:
    """Make a lock between processes, as progress bars do; the name of its semaphore."""
    _kept.append(multiprocessing.get_context("forkserver").Lock())
    return str(_kept[0]._semlock.name)


def test_a_rank_leaves_no_semaphore() -> None:
    """The end of the launcher warns of those that are left."""
    (name,) = launch(keep_a_lock, num_ranks=1, config=CONFIG, device="cpu")
    assert name.startswith("/mp-")
    assert not Path("/dev/shm", f"sem.{name[1:]}").exists()


def test_a_rank_that_will_not_end_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        launch(cling_to_life, str(tmp_path), num_ranks=2, config=CONFIG, device="cpu", grace_secs=0.5)
    assert time.monotonic() - start < 10
    assert caught.value.failures == {
        0: "rank 0: ValueError: first",
        1: "rank 1 did not end within 0.5 s of the first failure and was killed",
    }
    assert wait_until_gone(read_pids(tmp_path, 2), 0.0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, r"num_ranks \(0\) must be an int of at least 1"),
        ({"num_ranks": True}, r"num_ranks \(True\) must be an int"),
        ({"num_ranks": 2.0}, r"num_ranks \(2.0\) must be an int"),
        ({"grace_secs": -1.0}, r"grace_secs \(-1.0\) must not be negative"),
        ({"grace_secs": float("nan")}, r"grace_secs \(nan\) must be finite"),
        ({"target": lambda group: group}, r"cannot be sent to ranks, as a lambda cannot: .*<lambda>"),
        ({"target": "no colon"}, r"target \('no colon'\) is no function"),
        ({"target": None}, r"target \(None\) is no function"),
        ({"config": None}, r"config \(None\) is no GroupConfig"),
        ({"device": "gpu"}, r"device \('gpu'\) is no device of torch"),
        ({"env": {"A": 1}}, r"env has 'A': 1, no texts"),
        ({"env": {"OMP_NUM_THREADS": "auto"}}, r"OMP_NUM_THREADS \('auto'\) is not a number of at least 1"),
        ({"env": {"OMP_NUM_THREADS": "0"}}, r"OMP_NUM_THREADS \('0'\) is not a number of at least 1"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "start_server", lambda preload: pytest.fail("the server was started"))
    given = {"target": return_a_lambda, "num_ranks": 1} | arguments
    with pytest.raises(ValueError, match=message):
        launch(given.pop("target"), **given)


def work_for_ever(group: EPGroup, folder: str) -> None:
    write_pid(group, folder)
    for round_ in range(10**9):
        group.wait(dist.all_reduce(torch.ones(1), async_op=True), phase="dispatch", round=round_)
        time.sleep(0.01)


LAUNCHER = """
import sys
import test_launch
try:
    test_launch.launch(
        test_launch.work_for_ever, sys.argv[1], num_ranks=3, config=test_launch.CONFIG, device="cpu"
    )
finally:
    print("left in good order", flush=True)
"""


def test_a_second_ctrl_c_at_once_leaves_time_to_end_the_ranks() -> None:
    ended = []

    def interrupted_twice() -> None:
        with terminable():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                ended.append(True)

    pytest.raises(KeyboardInterrupt, interrupted_twice)
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "to_all", "code", "out"),
    [
        (signal.SIGINT, True, -signal.SIGINT, "left in good order\n"),
        pytest.param(signal.SIGTERM, False, 143, "left in good order\n", marks=pytest.mark.matrix),
        pytest.param(signal.SIGHUP, False, 129, "left in good order\n", marks=pytest.mark.matrix),
        (signal.SIGKILL, False, -signal.SIGKILL, ""),
    ],
    ids=["ctrl-c", "terminated", "hung-up", "killed"],
)
def test_ranks_end_with_their_launcher(tmp_path: Path, number: int, to_all: bool, code: int, out: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": hear_sighup}
    with subprocess.Popen(command, env=environ(), start_new_session=True, **pipes) as launcher:
        pids = read_pids(tmp_path, 3)
        time.sleep(0.3)
        assert all(is_running(pid) for pid in [launcher.pid, *pids])
        # a terminal sends Ctrl-C to the launcher and to the ranks alike
        (os.killpg if to_all else os.kill)(launcher.pid, number)
        assert launcher.wait(10) == code
        assert wait_until_gone(pids, 5.0) == []
        stdout, stderr = launcher.communicate(timeout=10)
    assert stdout == out
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)


UNDER_TORCHRUN = """
import test_launch
test_launch.run_rank(test_launch.fail_on_rank_1, "raises", config=test_launch.CONFIG, device="cpu")
"""


def test_torchrun_shows_a_ranks_own_error_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script)], env=environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    own = lines.index("rank 1: ValueError: hidden (30) must be a multiple of 16")
    assert not any("ValueError" in line or "FAILED" in line for line in lines[:own])


def test_without_an_environment_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run_rank(lambda group, x: (group.num_ranks, group.process_group, x), 7, device="cpu") == (1, None, 7)
