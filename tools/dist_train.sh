#!/usr/bin/env bash
# Train on several GPUs, on one machine or on NNODES of them (start it on each with its NODE_RANK,
# and the same MASTER_ADDR and PORT).
if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG GPUS [arguments of train.py]" >&2
    exit 2
fi
config=$1 gpus=$2
shift 2

exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$gpus" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "$@"
