#!/usr/bin/env bash
# Start train_gpt.py on every rank of this node:
#
#     NPROC=2 launch/torchrun.sh --precision fp8 --steps 200
#
# Several nodes: on each of them, with NODE_RANK counting up from 0,
#
#     NNODES=4 NODE_RANK=0 MASTER_ADDR=<host of node 0> launch/torchrun.sh --precision fp8
#
# A job that survives its ranks: torchrun starts all of them again when one has failed, and they go on from the newest
# checkpoint (without --save-every: from the start):
#
#     MAX_RESTARTS=3 launch/torchrun.sh --save-every 50 --timeout 120
#
# On several nodes --save-every needs an --out on a file system that they share.
#
# All arguments go to train_gpt.py (--help lists them). Environment:
#     NPROC         ranks on this node     default: its GPUs; 2 without a GPU
#     NNODES        nodes of the job       default: 1
#     NODE_RANK     this node, from 0      needed when NNODES > 1
#     MASTER_ADDR   host of node 0         needed when NNODES > 1
#     MASTER_PORT   a free port on it      default: 29500
#     MAX_RESTARTS  of the whole job       default: 0
#     JOIN_TIMEOUT  seconds that nodes     default: 600; collectives have train_gpt.py's --timeout
#                   wait for each other
#     LOGS          a folder for what      default: none. Files: */attempt_N/LOCAL_RANK/std{out,err}.log, when NNODES > 1 in
#                   each rank says         its node-NODE_RANK; the terminal still has all of it, each line with its rank
#     IFNAME        network interface      default: the one that leads to MASTER_ADDR, when NNODES > 1
#     LOCAL_ADDR    this node's address    default: the IPv4 one of IFNAME, when NNODES > 1
#     PYTHON        interpreter            default: .venv/bin/python, else python3
#
# IFNAME becomes GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (there with a "=": no other name that begins like it), unless
# they are set. Left alone, gloo takes the address that this node's host name has on this node, often 127.0.1.1, and
# NCCL the first interface that is up, which may be a bridge of containers. LOCAL_ADDR replaces the host name where
# torchrun tells other nodes of this one. Both are found for IPv4 only: where nodes have IPv6 alone, set both.
# OMP_NUM_THREADS, unless it is set, shares the cores among the ranks.
#
# Exit status, after the last restart: that of the rank that failed first, or of what it failed for: 0 done; 2 a
# mistake in the flags, or an unusable file; 3 a checkpoint could not be written; 4 ranks differ; 5 a collective failed
# or timed out, because another rank is gone or hangs, or another node has ended the job, or did not come within
# JOIN_TIMEOUT; 6 --loss-guard stop saw a loss that jumped or is not finite; 128 + n killed by signal n.
set -euo pipefail

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

python=${PYTHON:-$launch/../.venv/bin/python}
if [[ -z ${PYTHON:-} && ! -x $python ]]; then
    python=python3
fi

root=$(dirname "$launch")
export PYTHONPATH=$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}

gpus=0
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
nnodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}
patience=${JOIN_TIMEOUT:-600}
if [[ ! $patience =~ ^[1-9][0-9]*$ ]]; then
    echo "torchrun.sh: error: JOIN_TIMEOUT must be a whole number of seconds, got $patience" >&2
    exit 2
fi

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$python" -m launch.train_gpt.options --help
fi
# A mistake in the flags is told here, once. Later, torchrun would add a report of its own.
WORLD_SIZE=$((nnodes * nproc)) "$python" -m launch.train_gpt.options "$@"

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
fi

logs=()
if [[ -n ${LOGS:-} ]]; then
    logs=(--log-dir "$LOGS" --tee 3)
    if ((nnodes > 1)); then
        logs=(--log-dir "$LOGS/node-${NODE_RANK:-}" --tee 3)
    fi
    # Of the whole job; torchrun would say the rank on this node.
    # shellcheck disable=SC2016
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE-'[${rank}]: '}
fi

if ((nnodes == 1)); then
    rendezvous=(--standalone)
else
    node=${NODE_RANK:?set NODE_RANK to the number of this node, from 0}
    master=${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}
    port=${MASTER_PORT:-29500}
    ifname=${IFNAME:-} address=${LOCAL_ADDR:-}
    if [[ -z $address || (-z $ifname && (-z ${GLOO_SOCKET_IFNAME:-} || -z ${NCCL_SOCKET_IFNAME:-})) ]]; then
        interface=$("$python" -m launch.interface "$master" "$patience" ${IFNAME:+"$IFNAME"})
        read -r ifname address <<<"$interface"
        ifname=${IFNAME:-$ifname} address=${LOCAL_ADDR:-$address}
    fi
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$ifname}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$ifname}
    rendezvous=(--nnodes "$nnodes" --local-addr "$address")
    if ((restarts > 0)); then # The ports of a static rendezvous cannot be used twice.
        is_host=$([[ $node == 0 ]] && echo true || echo false)
        rendezvous+=(
            --rdzv-backend c10d
            --rdzv-endpoint "$master:$port"
            --rdzv-id "train-gpt-$port"
            --rdzv-conf "is_host=$is_host,join_timeout=$patience,read_timeout=$patience"
        )
    else
        rendezvous+=(
            --node-rank "$node"
            --master-addr "$master"
            --master-port "$port"
            --rdzv-conf "timeout=$patience"
        )
    fi
fi

if ((restarts > 0)); then
    # Else the ranks find the addresses of those before the restart in torchrun's store, and may wait for them
    # (pytorch/pytorch issue 135712; seen with torch 2.13).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
# With set -u, bash 4.3 takes an empty array for one that is not set.
exec "$python" -m launch.torchrun "${rendezvous[@]}" ${logs[@]+"${logs[@]}"} --nproc-per-node "$nproc" \
    --max-restarts "$restarts" \
    -m launch.train_gpt "$@"
