#!/usr/bin/env bash
# Start a training program on every rank of this node, and join the other nodes of the job:
#
#     NPROC=2 launch/torchrun.sh train.py --its-flags
#     NPROC=2 launch/torchrun.sh -m package.module --its-flags
#
# Without arguments, or if the first argument is a flag other than -m, it starts the example job, launch/train_gpt. All
# arguments are then flags of that job; --help prints this text and lists them:
#
#     NPROC=2 launch/torchrun.sh --precision fp8 --steps 200
#     MAX_RESTARTS=3 launch/torchrun.sh --save-every 50 --timeout 120
#
# On several nodes, --save-every needs an --out on a file system that all nodes share. Exit statuses of the example job:
# 2 a mistake in the flags or an unusable file; 4 ranks differ.
#
# This is "fp8dist launch" for a clone that is not installed. "python -m fp8dist launch --help" describes its exit
# status and environment variables (NPROC, NNODES, NODE_RANK, MASTER_ADDR, MAX_RESTARTS, LOGS, …). This script adds one:
#     PYTHON        interpreter            default: this clone's .venv/bin/python, else python3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=${PYTHON:-$root/.venv/bin/python}
if [[ -z ${PYTHON:-} && ! -x $python ]]; then
    python=python3
fi
export PYTHONPATH=$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}

if [[ $# == 0 || ($1 == -* && $1 != -m) ]]; then
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
        sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
        printf '\nFlags of the example job:\n\n'
        exec "$python" -m launch.train_gpt.options --help
    fi
    export PYTHONSAFEPATH=1 # Do not import a launch.py or fp8dist of the current folder (Python 3.11 and newer).
    # Check the flags once, before torch is imported. A later mistake would come with torchrun's own report.
    ranks=$("$python" "$root/fp8dist/cli/launcher/environment.py")
    WORLD_SIZE=$ranks "$python" -m launch.train_gpt.options "$@"
    set -- -m launch.train_gpt "$@"
fi
exec "$python" -m fp8dist launch "$@"
