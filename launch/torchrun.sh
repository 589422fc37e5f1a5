#!/usr/bin/env bash
# Start ep_moe under torchrun, one process per rank, on one node or on several. Arguments go to `python -m ep_moe`.
#
#   launch/torchrun.sh run                                                  all GPUs of this machine, or 2 CPU ranks
#   NPROC=4 launch/torchrun.sh eval                                         4 ranks on this machine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh run           on the first of two nodes
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/torchrun.sh run           on the second
#
# Nodes meet by torchrun's c10d rendezvous, in any order. Environment:
#   NPROC        ranks on this node, the same on every node; default: one per visible GPU, or 2 without GPUs
#   NNODES       nodes; default 1
#   NODE_RANK    index of this node, 0 .. NNODES-1; required if NNODES > 1. Node 0 serves the rendezvous
#   MASTER_ADDR  host name or address of node 0; required if NNODES > 1
#   MASTER_PORT  free port on node 0; default 29500; ignored with one node, which picks a free port
#   JOIN_SECS    how long nodes wait for one another; default 300
#   PYTHON       the interpreter; default python3
#   EP_MOE_LAUNCH_SECRET  any text that only the ranks know, the same on every node; default: a new one with one node
set -euo pipefail

python=${PYTHON:-python3}
nnodes=${NNODES:-1}

fail() {
    echo "error: $1" >&2
    exit 2
}

# print variable $1 of value $2, which may begin with zeros and is at least $3
whole() {
    [[ $2 =~ ^[0-9]+$ ]] || fail "$1 ('$2') is not a whole number"
    ((10#$2 >= $3)) || fail "$1 ($2) is below $3"
    echo $((10#$2))
}

nnodes=$(whole NNODES "$nnodes" 1)

if ((nnodes == 1)); then
    rendezvous=(--standalone)
    EP_MOE_LAUNCH_SECRET=${EP_MOE_LAUNCH_SECRET:-$("$python" -c 'import secrets; print(secrets.token_hex(16))')}
    export EP_MOE_LAUNCH_SECRET
else
    [[ -n ${NODE_RANK:-} ]] || fail "NNODES is $nnodes: set NODE_RANK to the index of this node, 0 to $((nnodes - 1))"
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES is $nnodes: set MASTER_ADDR to the host name or address of node 0"
    NODE_RANK=$(whole NODE_RANK "$NODE_RANK" 0)
    ((NODE_RANK < nnodes)) || fail "NODE_RANK ($NODE_RANK) is not below NNODES ($nnodes)"
    port=$(whole MASTER_PORT "${MASTER_PORT:-29500}" 1)
    serves=false
    if ((NODE_RANK == 0)); then
        serves=true
        "$python" -c 'import socket, sys; socket.create_server(("", int(sys.argv[1])))' "$port" 2>/dev/null ||
            fail "MASTER_PORT ($port) is in use on this node, or not allowed: set it to a free port on every node"
    fi
    rendezvous=(
        --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$port" --rdzv-id "${RDZV_ID:-ep-moe}"
        --rdzv-conf "is_host=$serves,join_timeout=${JOIN_SECS:-300},read_timeout=${JOIN_SECS:-300}"
    )
fi

if [[ -z ${NPROC:-} ]]; then
    gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) || gpus=0 # the visible ones
    NPROC=$((gpus > 0 ? gpus : 2))
fi
NPROC=$(whole NPROC "$NPROC" 1)

exec "$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$NPROC" "${rendezvous[@]}" -m ep_moe "$@"
