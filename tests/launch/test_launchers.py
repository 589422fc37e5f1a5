"""Launchers: the main job on 4 ranks over 2 nodes, lost ranks, bad input. Nodes are processes of this machine.

Needs the extra `ray`, ray[serve] and kubernetes-validate; `.ci/run` runs it in a step of its own: pytest -m launchers.
"""

import concurrent.futures
import http.server
import json
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.processes import EP_MOE, ROOT, actors_with, environ, is_running, processes_with, wait_until_gone
from typer.testing import CliRunner

from ep_moe.cli import app
from ep_moe.config import EngineConfig, GroupConfig
from ep_moe.group import EPGroup
from ep_moe.launch import KEEP, Ended, Front, RankFailedError, on_ray
from ep_moe.launch.on_ray import RayRanks, launch_on_ray
from ep_moe.launch.ray_cluster import NodeRanks

pytestmark = pytest.mark.launchers

CONFIG = GroupConfig(timeout_secs=4.0, heartbeat_secs=0.2)
MARK = "EP_MOE_TEST_MARK"
CLUSTER = f"cluster.{os.getpid()}"  # the mark of the cluster that tests share
JOB = ["--json", "--device", "cpu", "--config"]
LONG = ["generate", "Blessed", "--max-new-tokens", "900", "--device", "cpu", "--timeout-secs", "5"]
FAKE_SLURM = {
    "scontrol": "printf '127.0.0.1\\nother\\n'",
    "srun": """
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_STEP_NUM_TASKS=2 "$@" & tasks+=($!); done
trap 'kill "${tasks[@]}" 2>/dev/null' EXIT
code=0
for _ in 0 1; do wait -n || { code=$?; break; }; done
exit $code
""",
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A config of a short run."""
    path = tmp_path / "small.toml"
    path.write_text('[run]\nprompts = ["In the beginning", "Blessed"]\nnew_tokens = [6, 4]\nteacher_tokens = 96\n')
    return str(path)


def slurm_environ(folder: Path) -> dict[str, str]:
    """Variables of a Slurm job of 2 nodes, and its commands, which start all tasks on this machine."""
    commands = folder / "bin"
    commands.mkdir()
    for name, body in FAKE_SLURM.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    job = {"JOB_ID": os.getpid(), "JOB_NODELIST": "two", "JOB_NUM_NODES": 2, "SUBMIT_DIR": ROOT}
    return {f"SLURM_{name}": str(value) for name, value in job.items()} | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"
    }


def start(launcher: str, arguments: list[str], folder: Path, **more: str) -> "list[subprocess.Popen[str]]":
    """Start ep-moe on 4 ranks over 2 nodes; the first process is the one that prints."""
    env = environ() | {"NPROC": "2", "PYTHON": sys.executable, "RAY_USAGE_STATS_ENABLED": "0"} | more
    pipes: Any = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if launcher == "ray":
        command = [*EP_MOE, *arguments, "--ray", "local", "--nodes", "2", "--nproc", "2"]
        return [subprocess.Popen(command, env=env, **pipes)]
    if launcher == "slurm":
        env |= slurm_environ(folder) | {"MASTER_PORT": str(free_port())}
        return [subprocess.Popen(["bash", str(ROOT / "launch/slurm.sbatch"), *arguments], env=env, **pipes)]
    env |= {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["bash", str(ROOT / "launch/torchrun.sh"), *arguments]
    return [subprocess.Popen(command, env=env | {"NODE_RANK": str(node)}, **pipes) for node in range(2)]


@pytest.mark.parametrize("launcher", ["slurm", "ray"])  # slurm.sbatch runs torchrun.sh, one agent on each node
def test_the_main_job_on_two_nodes(launcher: str, tmp_path: Path, small: str) -> None:
    processes = start(launcher, ["run", *JOB, small], tmp_path)
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs[0][1]
    report = json.loads(outputs[0][0])
    assert (report["ok"], report["world_size"]) == (True, 4)
    assert [out for out, _ in outputs[1:]] == [""] * (len(processes) - 1)


def rank_process(mark: str, rank: int) -> int:
    """The process of a rank started by torchrun."""
    for process in processes_with(mark):
        if f"\0RANK={rank}\0" in Path(f"/proc/{process}/environ").read_text():
            return process
    raise AssertionError(f"rank {rank} does not run")


def test_torchrun_ends_both_nodes_after_a_rank_is_killed(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.{time.time_ns()}"
    first, second = start("torchrun", LONG, tmp_path, **{MARK: mark, "NPROC": "1"})
    lines = []
    while not lines or "generate" not in lines[-1]:
        assert first.stderr is not None
        lines.append(first.stderr.readline())
        assert lines[-1], "".join(lines)
    os.kill(rank_process(f"{MARK}={mark}", 1), signal.SIGKILL)
    killed = time.monotonic()
    errors = [process.communicate(timeout=60)[1] for process in (first, second)]
    assert time.monotonic() - killed < 15
    assert (first.returncode, second.returncode) == (1, 1)
    assert re.search(r"rank +: 1 \(local_rank: 0\)\s+exitcode +: -9", errors[1]), errors[1]
    assert re.search(r"^rank 0: PeerLostError: rank 1 ", errors[0], re.MULTILINE), errors[0]
    assert wait_until_gone(processes_with(f"{MARK}={mark}"), 10.0) == []


def test_nodes_with_different_numbers_of_ranks_are_refused(tmp_path: Path, small: str) -> None:
    env = environ() | {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["bash", str(ROOT / "launch/torchrun.sh"), "run", *JOB, small]
    both = [
        subprocess.Popen(
            command,
            env=env | {"NODE_RANK": str(node), "NPROC": str(node + 1), "PYTHON": sys.executable},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    for process in both:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "ValueError: nodes have different numbers of ranks (" in error
        assert "start as many on every node" in error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "NNODES is 2: set NODE_RANK to the index of this node, 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES is 2: set MASTER_ADDR to the host name or address of node 0"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK (2) is not below NNODES (2)"),
        ({"NNODES": "two"}, "NNODES ('two') is not a whole number"),
        ({"NNODES": "0"}, "NNODES (0) is below 1"),
        ({"NNODES": "08"}, "NNODES is 8: set NODE_RANK to the index of this node, 0 to 7"),
        ({"NPROC": "x"}, "NPROC ('x') is not a whole number"),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "USED"}, "is in use on this node"),
    ],
    ids=["no-node-rank", "no-address", "node-rank", "nnodes", "no-nodes", "base-10", "nproc", "port"],
)
def test_torchrun_names_what_is_missing(variables: dict[str, str], message: str) -> None:
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        given = {name: port if value == "USED" else value for name, value in variables.items()}
        command = ["bash", str(ROOT / "launch/torchrun.sh"), "run"]
        done = subprocess.run(command, env=environ() | given, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_torchrun_starts_a_rank_on_each_visible_gpu(tmp_path: Path) -> None:
    """By what an interpreter that sees three GPUs is asked to run."""
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 3)\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\n')
    python.chmod(0o755)
    env = environ() | {"PYTHON": str(python), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["bash", str(ROOT / "launch/torchrun.sh"), "run"], env=env, capture_output=True, text=True)
    assert "--nproc-per-node 3 " in done.stdout, done.stderr


def test_slurm_names_what_is_missing(tmp_path: Path) -> None:
    env = environ() | slurm_environ(tmp_path) | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    command = ["bash", str(ROOT / "launch/slurm.sbatch"), "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "launch/torchrun.sh is missing: submit from the root of the repository, or set EP_MOE_ROOT" in done.stderr


# Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of 2 nodes with 2 CPUs each; this process is connected to it."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}  # a loaded machine starts late
    os.environ |= variables | {"PYTHONPATH": environ()["PYTHONPATH"], MARK: CLUSTER}
    import ray
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    made.add_node(**sizes)
    ray.init(address=made.address, logging_level="warning")
    yield made
    ray.shutdown()
    made.shutdown()


NODES = NodeRanks(address="auto", num_nodes=2, ranks_per_node=2, gpus=False)


def test_a_wrong_number_of_threads_is_told_before_ray_starts() -> None:
    with pytest.raises(ValueError, match=r"OMP_NUM_THREADS \('4;2'\) is not a number of at least 1"):
        launch_on_ray(sum_for_ever, nodes=NODES, env={"OMP_NUM_THREADS": "4;2"})


def sum_for_ever(group: EPGroup, tells: bool = False) -> None:
    group.barrier()
    if tells and group.rank == 0:
        print("all have met")
    for round_ in range(10**9):
        group.wait(dist.all_reduce(torch.ones(1), async_op=True), phase="dispatch", round=round_)
        time.sleep(0.01)


def sleep_for_ever(group: EPGroup, folder: Path) -> None:
    (folder / str(group.rank)).touch()
    time.sleep(1000)


def place_of(group: EPGroup) -> str:
    group.barrier()
    return f"node {group.node}, local rank {group.local_rank} of {group.local_num_ranks}"


def fail_on_rank_1(group: EPGroup) -> None:
    if group.rank == 1 and os.environ["EP_MOE_TEST"] == "given":
        raise ValueError("hidden (30) must be a multiple of 16")
    sum_for_ever(group)


@pytest.mark.usefixtures("cluster")
def test_a_ranks_own_error_comes_first_on_ray() -> None:
    nodes = NodeRanks(address="auto", num_nodes=2, ranks_per_node=1, gpus=False)
    with pytest.raises(RankFailedError, match=r"^rank 1: ValueError: hidden \(30\) must be a multiple") as caught:
        launch_on_ray(fail_on_rank_1, nodes=nodes, config=CONFIG, env={"EP_MOE_TEST": "given"})
    assert "in fail_on_rank_1" in caught.value.traceback_text
    assert caught.value.failures[0].startswith("rank 0: PeerLostError: rank 1 failed: ValueError: hidden (30)")


def test_a_killed_actor_is_named_and_all_end(cluster: Any) -> None:
    lost = 0  # others still agree, as the store is not rank 0's
    ranks = RayRanks(NODES, CONFIG)
    ranks.start(sum_for_ever)
    pids = [place.pid for place in ranks.places]
    time.sleep(4)  # all ranks have met
    os.kill(pids[lost], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RankFailedError, match=rf"^rank {lost} \(process {pids[lost]} on .*\) died: ") as caught:
        ranks.collect()
    assert time.monotonic() - killed < 5
    for rank in {0, 1, 2, 3} - {lost}:
        assert f"PeerLostError: rank {lost}" in caught.value.failures[rank]
    ranks.close()
    assert wait_until_gone(pids, 5.0) == []
    command = [sys.executable, str(ROOT / "launch/ray_launch.py"), "test_launchers:place_of", "--device", "cpu"]
    command += ["--nodes", "2", "--address", cluster.address]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=120, check=False)
    placed = [f"rank {rank}: node {rank}, local rank 0 of 1" for rank in range(2)]
    assert [line for line in done.stdout.splitlines() if line.startswith("rank")] == placed, done.stderr


DRIVER = """
import test_launchers
from ep_moe.launch.ray_cluster import NodeRanks
nodes = NodeRanks(address="local", num_nodes=1, ranks_per_node=1, gpus=False)
test_launchers.launch_on_ray(test_launchers.sum_for_ever, True, nodes=nodes, config=test_launchers.CONFIG)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signals_end_a_cluster_of_our_own(number: int, code: int) -> None:
    """SIGTERM to the driver, and Ctrl-C, which reaches all processes of its group."""
    mark = f"{os.getpid()}.{time.time_ns()}"
    env = environ() | {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", DRIVER], env=env, start_new_session=True, **pipes) as driver:
        seen = ""
        while "all have met" not in seen:
            assert driver.stderr is not None
            line = driver.stderr.readline()
            seen += line
            assert line, seen
        driver.terminate() if number == signal.SIGTERM else os.killpg(driver.pid, number)
        driver.communicate(timeout=60)
    assert driver.returncode == code
    assert wait_until_gone(processes_with(f"{MARK}={mark}"), 10.0) == []


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "3", "--nproc", "2"], "has 2 nodes with 2 CPUs, 3 are needed (nodes 3, nproc 2)"),
        (["--nodes", "1", "--nproc", "3"], "has 0 nodes with 3 CPUs, 1 are needed (nodes 1, nproc 3)"),
        (["--device", "cuda", "--nproc", "1"], "has 0 nodes with 1 GPUs, 1 are needed"),
    ],
    ids=["nodes", "cpus", "gpus"],
)
def test_a_cluster_that_is_too_small_is_refused(options: list[str], message: str) -> None:
    begin = time.monotonic()
    done = CliRunner().invoke(app, ["generate", "Blessed", "--ray", "auto", "--device", "cpu", *options])
    assert done.exit_code == 1
    assert message in done.stderr
    assert time.monotonic() - begin < 10


@pytest.mark.usefixtures("cluster")
def test_nodes_in_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(on_ray, "RESERVE_SECS", 1.0)
    other_job = ray.util.placement_group([{"CPU": 1}])
    assert other_job.wait(10)
    with pytest.raises(RuntimeError, match=r"has not freed 2 nodes with 2 CPUs within 1 s: other jobs use them"):
        launch_on_ray(place_of, nodes=NODES, config=CONFIG)
    ray.util.remove_placement_group(other_job)


def test_an_address_where_nobody_listens_is_told(tmp_path: Path) -> None:
    for given, message in (
        (f"127.0.0.1:{free_port()}", "does not answer: "),
        ("no-address", "is not auto, local or HOST:PORT"),
    ):
        command = [*EP_MOE, "generate", "Blessed", "--device", "cpu", "--ray", given]
        done = subprocess.run(
            command, env=environ(), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode in (1, 2)
        assert done.stderr.splitlines()[-1].startswith(f"error: ray ('{given}') {message}")


def test_a_rank_whose_node_is_lost_stays_lost(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; they end with the front process, and nothing is left."""
    import ray

    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    ours, theirs = multiprocessing.Pipe()
    nodes = NodeRanks(address="auto", num_nodes=3, ranks_per_node=1, gpus=False)
    ranks = RayRanks(nodes, CONFIG, grace_secs=0.0, front=Front(connection=theirs, restarts=2))
    ranks.start(sleep_for_ever, tmp_path)
    monkeypatch.setattr(on_ray, "START_SECS", 3.0)
    [lost] = [rank for rank, place in enumerate(ranks.places) if place.node_id == node.node_id]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        collected = pool.submit(ranks.collect)
        assert ours.recv()[1:] == (3, True)
        ours.send(KEEP)
        while len([*tmp_path.iterdir()]) < 3:
            time.sleep(0.1)
        cluster.remove_node(node)
        first, second = ours.recv(), ours.recv()
        others = [place.pid for rank, place in enumerate(ranks.places) if rank != lost]
        assert all(map(is_running, others))
        ours.close()
        assert collected.result() == [None] * 3
    assert (first.seat, first.process, first.again) == (lost, ranks.places[lost].pid, 0.5)
    how = "has not been started by Ray within 3 s: its node may be lost"
    assert second == Ended(seat=lost, process=0, how=how, again=None)
    ranks.close()
    assert wait_until_gone(others, 5.0) == []
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


@pytest.mark.usefixtures("cluster")
def test_a_rank_does_not_go_to_a_node_with_other_gpus() -> None:
    failure = pickle.loads(on_ray._Rank().run({"CUDA_VISIBLE_DEVICES": "0"}, b"", "another node"))
    assert failure.what() == "RuntimeError: Ray has moved it to a node whose GPUs the others do not know"


@pytest.mark.usefixtures("cluster")
def test_ray_serve_answers_while_a_rank_is_replaced() -> None:
    import ray
    from ray import serve

    port, mark = free_port(), f"{MARK}={CLUSTER}"
    build = runpy.run_path(str(ROOT / "launch/ray_serve.py"), run_name="ray_serve_example")["build"]
    serve.start(http_options={"port": port})
    given = {"nodes": "1", "nproc": "2", "device": "cpu", "max_rows": "2", "max_positions": "64"}
    serve.run(build(given), route_prefix="/", name="ep-moe")
    body = json.dumps({"prompt": "In the beginning God ", "max_tokens": 8, "temperature": 0}).encode()

    def ask() -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]

    text = ask()
    assert len(text) == 8
    before = actors_with(mark)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    deadline = time.monotonic() + 90
    while len(now := actors_with(mark)) < 2 or before[0] in now:
        assert ask() == text
        assert time.monotonic() < deadline
    assert before[1] in now
    assert ask() == text
    serve.shutdown()
    assert wait_until_gone(now, 20.0) == []
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


# Files that other programs read


def test_kubernetes_takes_the_job() -> None:
    import kubernetes_validate
    import yaml

    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    for resource in (service, job):
        kubernetes_validate.validate(resource, "1.30", strict=True)
    spec = job["spec"]
    variables = {entry["name"]: entry.get("value") for entry in spec["template"]["spec"]["containers"][0]["env"]}
    assert str(spec["completions"]) == str(spec["parallelism"]) == variables["NNODES"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_the_image_has_what_its_files_name() -> None:
    import yaml

    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert next(line for line in reversed(lines) if line.startswith("USER ")) == "USER 1000"
    health = json.loads(next(line for line in lines if line.startswith("HEALTHCHECK")).partition("CMD ")[2])
    assert health == HEALTH
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["ep-moe"]
    assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    options = [re.sub(r"\$\{\w+:[-+](.*?)\}", r"\1", option) for option in service["command"].split()[1:]]
    assert {option.partition("=")[0] for option in options} == {"--host", "--port", "--model", ""}
    helped = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    assert [option for option in options if option.partition("=")[0] not in helped] == []


HEALTH = ["ep-moe", "doctor", "--only", "server"]


@pytest.mark.parametrize("status", [200, 503])
def test_the_image_asks_the_server_for_its_health(status: int) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the name is the library's
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"running": 0}')

        def log_message(self, *args: Any) -> None: ...

    def ask(port: int) -> "subprocess.CompletedProcess[str]":
        address = {"EP_MOE_DOCTOR_SERVER": f"http://127.0.0.1:{port}"}
        command = [sys.executable, "-m", "ep_moe", *HEALTH[1:]]
        return subprocess.run(command, env=environ() | address, capture_output=True, text=True, check=False)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = ask(server.server_address[1])
        server.shutdown()
    assert done.returncode == (0 if status == 200 else 1)
    assert '{"running": 0}' in done.stdout + done.stderr
    assert ask(free_port()).returncode == 1


def test_engine_options_of_ray_are_checked() -> None:
    with pytest.raises(ValueError, match=r"nodes \(2\) needs --ray"):
        EngineConfig(nodes=2)
