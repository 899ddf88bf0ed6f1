#!/usr/bin/env bash
# Start train_gpt.py on every rank of this node:
#
#     NPROC=2 launch/torchrun.sh --precision fp8 --steps 200
#
# Several nodes: on each of them, with NODE_RANK counting up from 0,
#
#     NNODES=4 NODE_RANK=0 MASTER_ADDR=<host of node 0> launch/torchrun.sh --precision fp8
#
# All arguments go to train_gpt.py (--help lists them). Environment:
#     NPROC        ranks on this node     default: its GPUs; 2 without a GPU
#     NNODES       nodes of the job       default: 1
#     NODE_RANK    this node, from 0      needed when NNODES > 1
#     MASTER_ADDR  host of node 0         needed when NNODES > 1
#     MASTER_PORT  a free port on it      default: 29500
#     PYTHON       interpreter            default: .venv/bin/python, else python3
#
# Exit status: that of the first rank that failed (train_gpt.py says which there are); 2 for a mistake in the flags.
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
else
    rendezvous=(
        --nnodes "$nnodes"
        --node-rank "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
        --master-addr "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}"
        --master-port "${MASTER_PORT:-29500}"
    )
fi

exec "$python" "$launch/torchrun.py" "${rendezvous[@]}" --nproc-per-node "$nproc" "$launch/train_gpt.py" "$@"
