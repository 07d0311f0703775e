#!/usr/bin/env bash
# Start it on every host, in any order; HEAD is host 0 as the others reach it:
#   HEAD=host0 NODE=0 bash FILE
#   HEAD=host0 NODE=1 bash FILE
# It was written by
# merak-launch --emit shell --nodes 4 --gpus-per-node 8 --shared-dir /shared -- pretrain-hf \
#     --model /shared/model --data-path /shared/corpus_text_document --seq-length 4096 \
#     --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --lr 3e-4 --bf16 \
#     --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --save /shared/run \
#     --load /shared/run --save-interval 500
set -euo pipefail

: "${HEAD:?the name or address of host 0}" "${NODE:?the index of this host, from 0}"
: "${PORT:=29500}" # and the next one; two jobs with one HEAD need different ones
exec python3 -m megatron_merak launch --nnodes 4 --nproc-per-node 8 --node-rank "$NODE" \
    --master-addr "$HEAD" --master-port $PORT --max-restarts 3 pretrain-hf --model /shared/model \
    --data-path /shared/corpus_text_document --seq-length 4096 --micro-batch-size 1 \
    --global-batch-size 256 --train-iters 20000 --lr 3e-4 --bf16 --tensor-model-parallel-size 8 \
    --pipeline-model-parallel-size 2 --save /shared/run --load /shared/run --save-interval 500
