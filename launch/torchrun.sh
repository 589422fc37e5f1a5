#!/usr/bin/env bash
# Start ep_moe under torchrun, one process per rank, on one node or on several. Arguments go to `python -m ep_moe`.
#
#   launch/torchrun.sh run                                                  all GPUs of this machine, or 2 CPU ranks
#   NPROC=4 launch/torchrun.sh eval                                         4 ranks on this machine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh run           on the first of two nodes
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/torchrun.sh run           on the second
#
# Environment:
#   NPROC        ranks on this node; default: one per GPU, or 2 without GPUs
#   NNODES       nodes; default 1
#   NODE_RANK    index of this node, 0 .. NNODES-1; required if NNODES > 1
#   MASTER_ADDR  host name or address of node 0; required if NNODES > 1
#   MASTER_PORT  free port on node 0; default 29500; ignored with one node, which picks a free port
#   PYTHON       the interpreter; default python3
set -euo pipefail

python=${PYTHON:-python3}
nnodes=${NNODES:-1}

if [[ -z ${NPROC:-} ]]; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
    NPROC=$((gpus > 0 ? gpus : 2))
fi

if ((nnodes == 1)); then
    rendezvous=(--standalone)
else
    : "${NODE_RANK:?NNODES is $nnodes: set NODE_RANK to the index of this node, 0 to $((nnodes - 1))}"
    : "${MASTER_ADDR:?NNODES is $nnodes: set MASTER_ADDR to the host name or address of node 0}"
    rendezvous=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi

exec "$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$NPROC" "${rendezvous[@]}" -m ep_moe "$@"
