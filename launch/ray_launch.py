"""Run a function of your own on the ranks of a Ray cluster, and print what each rank returns.

    pip install 'ep-moe[ray]'
    python launch/ray_launch.py my_package.my_module:main --nodes 2 --nproc 8
    python launch/ray_launch.py my_package.my_module:main --address local --device cpu

`main(group)` gets its rank's `EPGroup`; its module has to be importable on every node. `ep-moe run`, `generate` and
`eval` need no script: they take `--ray`.
"""

import argparse
import sys

from ep_moe.launch import RankFailedError
from ep_moe.launch.on_ray import launch_on_ray
from ep_moe.launch.ray_cluster import NodeRanks


def main() -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("target", help="the function, as package.module:function")
    parser.add_argument("--address", default="auto", help="of the cluster: auto, HOST:PORT, or local for a new one")
    parser.add_argument("--nodes", type=int, default=1, help="nodes to use")
    parser.add_argument("--nproc", type=int, default=1, help="ranks on each node")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="GPUs if there are enough")
    given = parser.parse_args()
    gpus = None if given.device == "auto" else given.device == "cuda"
    try:
        nodes = NodeRanks(address=given.address, num_nodes=given.nodes, ranks_per_node=given.nproc, gpus=gpus)
        for rank, result in enumerate(launch_on_ray(given.target, nodes=nodes)):
            print(f"rank {rank}: {result}")
    except RankFailedError as error:
        print(f"error: {error}\n{error.traceback_text}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
