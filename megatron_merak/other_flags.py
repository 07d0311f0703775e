"""Flags of other programs, and short names, and their names here, which spelling alone would not
find.
"""

from collections.abc import Mapping
from types import MappingProxyType

_SHARDED = (
    "Use --data-parallel-sharding-strategy: optim is ZeRO stage 1, optim_grads 2, "
    "optim_grads_params 3 (FSDP)"
)
_REPLICAS = "Leave it out: ranks that tensor and pipeline parallelism leave are data parallel"

# Flag -> what to do instead.
MEANT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            "--tp --tp-size --tensor-parallel-size --tensor-parallel".split(),
            "Use --tensor-model-parallel-size",
        ),
        **dict.fromkeys(
            "--pp --pp-size --pipeline-parallel-size --pipeline-parallel".split(),
            "Use --pipeline-model-parallel-size",
        ),
        **dict.fromkeys(
            "--dp --dp-size --data-parallel-size --num-gpus --nproc-per-node".split(), _REPLICAS
        ),
        **dict.fromkeys(
            "--zero --zero-stage --fsdp --deepspeed --deepspeed-config".split(), _SHARDED
        ),
        **dict.fromkeys("--bs --per-device-train-batch-size".split(), "Use --micro-batch-size"),
        "--gradient-accumulation-steps": "Use --global-batch-size: micro-batch size x replicas x "
        "accumulation steps",
        **dict.fromkeys("--max-steps --num-steps --steps --iters".split(), "Use --train-iters"),
        **dict.fromkeys(
            "--epochs --num-epochs --train-epochs --max-epochs --num-train-epochs".split(),
            "Use --train-iters or --train-samples: data is read as often as that takes",
        ),
        "--learning-rate": "Use --lr",
        "--lr-scheduler-type": "Use --lr-decay-style",
        **dict.fromkeys("--warmup-steps --num-warmup-steps".split(), "Use --lr-warmup-iters"),
        "--warmup-ratio": "Use --lr-warmup-fraction",
        "--max-grad-norm": "Use --clip-grad",
        **dict.fromkeys(
            "--gradient-checkpointing --activation-checkpointing".split(),
            "Use --recompute-granularity full",
        ),
        **dict.fromkeys(
            "--seq-len --max-seq-length --block-size --context-length".split(), "Use --seq-length"
        ),
        **dict.fromkeys("--n-layers --n-layer --num-hidden-layers".split(), "Use --num-layers"),
        **dict.fromkeys("--n-heads --n-head --num-heads".split(), "Use --num-attention-heads"),
        **dict.fromkeys("--num-key-value-heads --num-kv-heads".split(), "Use --num-query-groups"),
        **dict.fromkeys("--hidden-dim --d-model --n-embd --dim".split(), "Use --hidden-size"),
        **dict.fromkeys("--output-dir --save-dir --checkpoint-dir".split(), "Use --save"),
        **dict.fromkeys("--resume --resume-from-checkpoint".split(), "Use --load"),
        "--save-steps": "Use --save-interval",
        "--eval-steps": "Use --eval-interval",
        "--logging-steps": "Use --log-interval",
        **dict.fromkeys(
            "--model-name-or-path --model-name --model-path".split(),
            "Use --model of pretrain_hf.py",
        ),
        "--tokenizer-name-or-path": "Use --tokenizer-type HuggingFaceTokenizer with "
        "--tokenizer-model",
        **dict.fromkeys(
            "--goldfish-loss --goldfish-k --goldfish-h".split(),
            "Leave it out: the loss counts every token",
        ),
        "--wandb": "Use --wandb-project, or --report-to wandb",
    }
)
