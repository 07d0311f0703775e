#!/usr/bin/env bash
# A newcomer's first hour: what README and docs/features.md show, and every example, in a fresh clone and a fresh environment, then from a
# wheel without a clone. Ends at the first command that does not do what they say.
#
#   tests/first_hour.sh            both (15 minutes; pip installs torch and transformers twice)
#   tests/first_hour.sh clone      the clone alone;  tests/first_hour.sh wheel    the wheel alone
#
# pip's own settings decide where packages come from. KEEP=1 leaves the directory that it works in.
set -euo pipefail

source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' # the clone may be another user's
unset PYTHONPATH

step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
says() { # says TEXT COMMAND...: the command succeeds and prints TEXT
    local text=$1 out; shift
    out=$("$@" 2>&1) || fail "$* ended with status $?: $out"
    grep -qF -- "$text" <<<"$out" || fail "$* does not print '$text': $out"
    printf '%s\n' "$out" | tail -n 2
}
refuses() { # refuses TEXT COMMAND...: the command fails, and all that it prints is one line with TEXT
    local text=$1 out status=0; shift
    out=$("$@" 2>&1) || status=$?
    [ "$status" -ne 0 ] || fail "$* succeeded"
    [ "$(grep -c . <<<"$out")" -eq 1 ] || fail "$* prints more than one line: $out"
    grep -qF -- "$text" <<<"$out" || fail "$* does not print '$text': $out"
    printf '%s\n' "$out"
}
environment() { # environment DIRECTORY: a fresh one, active
    python3 -m venv "$1"
    export PATH="$1/bin:$PATH" VIRTUAL_ENV="$1"
    hash -r
}

model='--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --micro-batch-size 4 --global-batch-size 16
    --lr 1e-3 --log-interval 5 --eval-iters 2'

commands() { # what both installations can do
    step "wrong flags"
    refuses 'The nearest is --num-layers.' merak-pretrain --num-layer 4
    refuses 'Start 4 or 8 ranks' merak-pretrain --nproc-per-node 6 --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 $model --train-iters 10 --mock-data --vocab-size 1000
    says usage: merak-pretrain --help
    says 'merak-COMMAND' python -m megatron_merak

    step "train, resume on another layout"
    says 'saved runs/gpt/iter_0000010' merak-pretrain --nproc-per-node 4 --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 $model --train-iters 10 --mock-data --vocab-size 1000 --save runs/gpt
    says 'loaded the checkpoint of iteration 10' merak-pretrain --nproc-per-node 2 $model --train-iters 15 --mock-data \
        --vocab-size 1000 --save runs/gpt --load runs/gpt
    says 'iter_0000015: undamaged' merak-verify runs/gpt
    says '2 ranks = tp 1 x cp 1 x dp 2 x pp 1' merak-inspect runs/gpt

    step "weights to HuggingFace and on"
    says LlamaForCausalLM merak-convert runs/gpt runs/hf
    says 'iteration        5/' merak-pretrain-hf --nproc-per-node 2 --pipeline-model-parallel-size 2 --model runs/hf \
        --seq-length 128 --micro-batch-size 4 --global-batch-size 16 --train-iters 5 --lr 1e-3 --log-interval 5 \
        --eval-iters 2 --mock-data --save-hf runs/trained
    says opened python -c '
from transformers import AutoModelForCausalLM
print("opened", type(AutoModelForCausalLM.from_pretrained("runs/trained")).__name__)'

    step "plans and pictures"
    says '1,024 ranks = tp 8 x cp 1 x dp 8 x pp 16' merak-plan show --world-size 1024 --device H100 --num-layers 96 \
        --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 50257 --micro-batch-size 1 \
        --global-batch-size 1536 --bf16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --save plan.json
    says 'largest: pipeline rank 0' merak-memory --plan plan.json
    says plans.html merak-simulate --plan plan.json --html plans.html
    merak-simulate --schedule 1f1b interleaved zb-v auto --microbatches 8 --html side.html
    [ -s side.html ] && [ -s plans.html ]

    step "two lines"
    cat >two_lines.py <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments as TrainingArguments, MerakTrainer as Trainer

torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 32))]
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=4))
args = TrainingArguments("runs/two_lines", max_steps=10, per_device_train_batch_size=4, learning_rate=1e-3,
                         use_cpu=True, report_to="none", tensor_model_parallel_size=2)
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model("runs/two_lines/model")
PYTHON
    says train_loss torchrun --nproc-per-node 2 two_lines.py
    [ -s runs/two_lines/model/model.safetensors ]
}

from_clone() {
    step "clone"
    git clone -q "$source" "$work/clone"
    cd "$work/clone"
    environment "$work/env-clone"
    step "pip install -e ."
    pip install -q -e '.[pictures]'
    step "merak-doctor"
    says 'CPU kernels        active' merak-doctor
    commands

    step "your own text"
    python - <<'PYTHON'
import json, sysconfig
from pathlib import Path
from megatron_merak.data.train_tokenizer import train_byte_bpe
modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
texts = [path.read_text(errors="ignore") for path in modules]
Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
train_byte_bpe(texts, 1024, Path("tokenizer.json"))
PYTHON
    says documents merak-preprocess --input text.jsonl --output-prefix data/text --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json
    says 'saved checkpoints/iter_0000010' merak-pretrain --nproc-per-node 2 --tensor-model-parallel-size 2 $model \
        --train-iters 10 --data-path data/text_text_document --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model tokenizer.json --save checkpoints --load checkpoints

    step "a Trainer script"
    says train_loss python examples/from_trainer.py --max_steps 30

    step "a script of the clone by torchrun"
    says 'iteration        4/' torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 $model \
        --train-iters 4 --log-interval 4 --mock-data --vocab-size 1000
    examples
}

examples() { # each one, with settings that are as small as they may be
    step "pip install '.[trl]'"
    MERAK_EXT=0 pip install -q -e '.[pictures,trl]' # what the first one compiled stays
    step "examples"
    local name
    {
        for name in classification distill grpo long_context mixture muon; do
            echo "$name.py --max_steps 2 --output_dir runs/$name"
        done
        for name in preferences sft_lora; do
            echo "$name.py --steps 2 --output_dir runs/$name"
        done
        echo packing.py --steps 2 --directory runs/packing
        echo finetune.py --max-steps 2 --directory runs/finetune
        echo growing_batch.py --samples 64 --directory runs/growing_batch
        echo stdlib_corpus.py --output-dir runs/corpus --vocab-size 600 --max-bytes 300000
        echo train.py --train-iters 2 --directory runs/train
    } | side_by_side
    for name in examples/*.py; do
        grep -qF "$(basename "$name" .py)" "$source/tests/first_hour.sh" || fail "$name is not started"
    done
}

side_by_side() { # examples, one a line, on all cores: most of them are one process
    xargs -P "$(nproc)" -I{} bash -c '
        set -- {}
        if out=$(python "examples/$@" 2>&1); then
            printf "\n-- examples/%s\n%s\n" "$*" "$(tail -n 2 <<<"$out")"
        else
            printf "FAILED: examples/%s: %s\n" "$*" "$out" >&2
            exit 255 # starts no other
        fi'
}

from_wheel() {
    step "make wheel"
    git clone -q "$source" "$work/source"
    (cd "$work/source" && environment "$work/env-build" && pip install -q build && make -s wheel VENV="$work/env-build")
    mkdir "$work/nothing"
    cd "$work/nothing"
    environment "$work/env-wheel"
    step "pip install WHEEL"
    pip install -q "$work"/source/dist/*.whl
    step "merak-doctor"
    says 'CPU kernels        active' merak-doctor
    commands
}

case "${1:-all}" in
clone) from_clone ;;
wheel) from_wheel ;;
all) (from_clone) && (from_wheel) ;;
*) fail "first_hour.sh takes clone, wheel or nothing" ;;
esac
step "done"
