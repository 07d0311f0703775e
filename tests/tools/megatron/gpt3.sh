#!/bin/bash
# A model of 175 billion parameters on 16 nodes. Written for the tests of merak-from-megatron.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS=8 NODES=16
HOST=${HOST:-localhost}   # of the first node
OUT=$1
LOGS=$2
VOCABULARY=$3  # vocab.json
MERGES=$4
DATA=$5

if [ ! -d "$OUT" ]; then
    mkdir -p "$OUT"
fi

RANKS=(
    --nproc_per_node $GPUS
    --nnodes $NODES    # one command per node
    --master_addr $HOST --master_port 6000
)
SHAPE=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto # torch decides
)
TRAINING="--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
    --train-samples 300000000 --lr-decay-samples 260000000 --lr-warmup-fraction .001 --lr 6.0e-5 --min-lr 6.0e-6
    --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --clip-grad 1.0 --fp16"
LAYOUT=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
LAYOUT+=(--num-layers-per-virtual-pipeline-stage 2 --sequence-parallel)
INPUT=(--data-path $DATA --vocab-file $VOCABULARY --merge-file "$MERGES" --split 949,50,1)
OUTPUT=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save $OUT --load $OUT --tensorboard-dir "$LOGS"
)

torchrun ${RANKS[@]} examples/pretrain_gpt.py "${SHAPE[@]}" $TRAINING ${LAYOUT[@]} \
    "${INPUT[@]}" \
    "${OUTPUT[@]}" 2>&1 | tee train.log
