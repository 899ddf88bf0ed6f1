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
#     PYTHON        interpreter            default: .venv/bin/python, else python3
#
# Exit status, after the last restart: that of the rank that failed first, or of what it failed for: 0 done; 2 a
# mistake in the flags, or an unusable file; 3 a checkpoint could not be written; 4 ranks differ; 5 a collective failed
# or timed out, because another rank is gone or hangs, or another node has ended the job; 6 --loss-guard stop saw a loss
# that jumped or is not finite; 128 + n killed by signal n.
set -euo pipefail

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

python=${PYTHON:-$launch/../.venv/bin/python}
if [[ -z ${PYTHON:-} && ! -x $python ]]; then
    python=python3
fi

gpus=0
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
nnodes=${NNODES:-1}
restarts=${MAX_RESTARTS:-0}

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$python" "$launch/options.py" --help
fi
# A mistake in the flags is told here, once. Later, torchrun would add a report of its own.
WORLD_SIZE=$((nnodes * nproc)) "$python" "$launch/options.py" "$@"

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
fi

if ((nnodes == 1)); then
    rendezvous=(--standalone)
elif ((restarts > 0)); then # The ports of a static rendezvous cannot be used twice.
    rendezvous=(
        --nnodes "$nnodes"
        --rdzv-backend c10d
        --rdzv-endpoint "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}:${MASTER_PORT:-29500}"
        --rdzv-id "train-gpt-${MASTER_PORT:-29500}"
    )
    if ((${NODE_RANK:?set NODE_RANK to the number of this node, from 0} == 0)); then
        rendezvous+=(--rdzv-conf is_host=true)
    else
        rendezvous+=(--rdzv-conf is_host=false)
    fi
else
    rendezvous=(
        --nnodes "$nnodes"
        --node-rank "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
        --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}"
        --master-port "${MASTER_PORT:-29500}"
    )
fi

if ((restarts > 0)); then
    # Else the ranks find the addresses of those before the restart in torchrun's store, and may wait for them
    # (pytorch/pytorch issue 135712; seen with torch 2.13).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
exec "$python" "$launch/torchrun.py" "${rendezvous[@]}" --nproc-per-node "$nproc" --max-restarts "$restarts" \
    "$launch/train_gpt.py" "$@"
