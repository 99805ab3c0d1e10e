#!/usr/bin/env bash
# Test on several GPUs, on one machine or on NNODES of them (start it on each with its NODE_RANK,
# and the same MASTER_ADDR and PORT).
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2
    exit 2
fi
config=$1 checkpoint=$2 gpus=$3
shift 3

exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$gpus" \
    "$(dirname "$0")/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
