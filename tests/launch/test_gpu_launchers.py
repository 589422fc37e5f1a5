"""Launchers on two GPUs, as two nodes of one GPU each: the main job by every launcher, and a killed actor of Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.processes import EP_MOE, ROOT, environ, wait_until_gone
from test_launchers import free_port, slurm_environ

from ep_moe.config import GroupConfig
from ep_moe.group import EPGroup
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import RankFailedError
from ep_moe.launch.on_ray import RayRanks
from ep_moe.launch.ray_cluster import NodeRanks

NUM_GPUS = num_gpu_ranks()
NODES = NodeRanks(address="auto", num_nodes=2, ranks_per_node=1, gpus=True)
CONFIG = GroupConfig(timeout_secs=4.0, heartbeat_secs=0.2)
SHORT = '[run]\nprompts = ["In the beginning", "Blessed"]\nnew_tokens = [6, 4]\nteacher_tokens = 96\n'
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, there are {NUM_GPUS}"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Arguments of a short main job on GPUs."""
    config = tmp_path / "short.toml"
    config.write_text(SHORT)
    return ["run", "--json", "--device", "cuda", "--config", str(config)]


def check_report(text: str) -> None:
    """The main job ran well on two ranks."""
    report = json.loads(text)
    assert (report["ok"], report["world_size"]) == (True, 2)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_the_main_job_on_two_nodes(launcher: str, tmp_path: Path, job: list[str]) -> None:
    env = environ() | {"NPROC": "1", "PYTHON": sys.executable, "MASTER_PORT": str(free_port())}
    if launcher == "slurm":  # its stand-in starts both nodes, and each is to see one GPU
        started, script = [env | slurm_environ(tmp_path)], tmp_path / "bin/srun"
        script.write_text(
            script.read_text().replace("SLURM_NODEID=$node", "CUDA_VISIBLE_DEVICES=$node SLURM_NODEID=$node")
        )
        command = ["bash", str(ROOT / "launch/slurm.sbatch"), *job]
    else:
        env |= {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}
        started = [env | {"NODE_RANK": str(node), "CUDA_VISIBLE_DEVICES": str(node)} for node in range(2)]
        command = ["bash", str(ROOT / "launch/torchrun.sh"), *job]
    pipes: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=each, **pipes) for each in started]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs[0][1]
    check_report(outputs[0][0])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of two nodes with one GPU each; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster()
    with mock.patch.dict(os.environ, environ() | {"RAY_USAGE_STATS_ENABLED": "0"}):
        for node in range(2):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(node)  # what this node offers
            cluster.add_node(**sizes, **({} if node else {"include_dashboard": False}))
        del os.environ["CUDA_VISIBLE_DEVICES"]
        ray.init(address=cluster.address, logging_level="warning")
        yield cluster.address
        ray.shutdown()
        cluster.shutdown()


def test_the_main_job_on_ray(address: str, job: list[str]) -> None:
    command = [*EP_MOE, *job, "--ray", address, "--nodes", "2", "--nproc", "1"]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    check_report(done.stdout)


def sum_for_ever(group: EPGroup) -> None:
    """All-reduces over NCCL without end."""
    for round_ in range(10**9):
        done = dist.all_reduce(torch.ones(1, device=group.device), async_op=True)
        group.wait(done, phase="dispatch", round=round_)
        time.sleep(0.01)


@pytest.mark.usefixtures("address")
def test_a_killed_actor_is_named_and_all_end() -> None:
    ranks = RayRanks(NODES, CONFIG)
    ranks.start(sum_for_ever)
    pids = [place.pid for place in ranks.places]
    time.sleep(20)  # both have met
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RankFailedError, match=rf"^rank 1 \(process {pids[1]} on .*\) died: ") as caught:
        ranks.collect()
    assert time.monotonic() - killed < 5
    assert "PeerLostError: rank 1" in caught.value.failures[0]
    ranks.close()
    assert wait_until_gone(pids, 5.0) == []
