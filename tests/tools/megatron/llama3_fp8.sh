#!/usr/bin/env bash
# Llama 3 8B in fp8 on eight GPUs, on generated data unless a prefix is given. Written for the tests of
# merak-from-megatron.
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
CHECKPOINTS=${1:-"checkpoints/llama3"}
TOKENIZER=${2:-"MOCK"}
DATA=${3:-MOCK}
PROGRAM="examples/pretrain_gpt.py"
PRECISION="fp8"

if [ ! -f "$PROGRAM" ]; then
    echo "$PROGRAM is not there"; exit 1
fi

MODEL=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --use-rotary-position-embeddings --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --normalization RMSNorm
    --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
if [[ "$PRECISION" == "fp8" ]]; then
    TRAINING+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-amax-compute-algo max" "--fp8-param-gather")
elif [[ "$PRECISION" == "fp16" ]]; then
    TRAINING+=(--fp16)
fi
LAYOUT=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel)
SHARDING=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
LAYOUT+=("${SHARDING[@]}")

INPUT=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    INPUT+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--tiktoken-pattern v2")
else
    INPUT+=("--data-path $DATA" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER")
fi
INPUT+=("--data-cache-path ${PWD}/cache" "--split '99,1,0'" --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1)
OUTPUT=(
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save "$CHECKPOINTS" --load "$CHECKPOINTS" --tensorboard-dir "logs/llama 3"
)

python3 -m torch.distributed.launch --nproc-per-node=8 --use_env \
    "$PROGRAM" \
    ${MODEL[@]} ${TRAINING[@]} ${LAYOUT[@]} ${INPUT[@]} "${OUTPUT[@]}"
