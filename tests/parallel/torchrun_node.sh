#!/usr/bin/env bash
# This host's part of a job on several hosts. Start the same line on every host, in any order:
#
#   HEAD=host0 NODES=2 examples/multi_node/node.sh --load ckpt --save ckpt ... (flags of pretrain_gpt.py)
#
# HEAD             a host of the job whose name or address all others reach; it keeps the rendezvous
# NODES            number of hosts
# RANKS_PER_NODE   processes per host; default: one per GPU, or 4 without any
# INTERFACE        network interface between the hosts, e.g. eth0 or ib0; default: what torch finds by the host's name
# JOB, PORT        name and port of the rendezvous; two jobs with the same HEAD need different ones
# RESTARTS         how often the job may start again by itself after losing a process; it resumes from --load
set -euo pipefail

: "${HEAD:?name the host that keeps the rendezvous, e.g. HEAD=host0}"
: "${NODES:?give the number of hosts, e.g. NODES=2}"
: "${PORT:=29500}" "${JOB:=megatron-merak}" "${RESTARTS:=0}" "${PYTHON:=python3}"
if [ -z "${RANKS_PER_NODE:-}" ]; then
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    RANKS_PER_NODE=$((gpus > 0 ? gpus : 4))
fi
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Ranks that start again must not read the addresses that their predecessors left in a shared store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB" \
    --rdzv-conf join_timeout=300,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 \
    "$root/pretrain_gpt.py" "$@"
