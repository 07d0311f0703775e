"""Flags of Megatron-LM that have another name here, or are refused, with the consequences and
remedies.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .taken import TAKEN

# Names of earlier versions.
_FORMER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "--activations-checkpoint-method": "--recompute-method",
        "--activations-checkpoint-num-layers": "--recompute-num-layers",
        "--checkpoint-num-layers": "--recompute-num-layers",
    }
)

# Name -> flag here. One with a value replaces a switch; others keep the value that was passed.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "--encoder-num-layers": "--num-layers",
        "--encoder-seq-length": "--seq-length",
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--warmup": "--lr-warmup-fraction",
        "--persistent-save-interval": "--save-interval",
        "--override-opt_param-scheduler": "--override-opt-param-scheduler",
        "--use-checkpoint-opt_param-scheduler": "--use-checkpoint-opt-param-scheduler",
        "--use-rotary-position-embeddings": "--position-embedding-type rope",
        "--recompute-activations": "--recompute-granularity selective",
        "--checkpoint-activations": "--recompute-granularity full",
        **_FORMER_NAMES,
    }
)

_SHAPE = "Use pretrain_hf.py with a model of that shape"
_TOKENIZER = (
    "Leave it out: the files of --tokenizer-model say which tokens there are and how text is cut"
)
_STATE = "Use --use-distributed-optimizer, or shard more with --data-parallel-sharding-strategy"
_FP8 = (
    "Leave it out: --fp8-format and --fp8-recipe say how products are computed, and weights stay "
    "in the type of the model"
)
_OVERLAP = "Leave it out: --tp-comm-overlap says what overlaps tensor-parallel collectives"
_NCCL = "Leave it out: NCCL is set up by its environment variables"
_DOCUMENTS = "Leave it out: attention and positions go on over the ends of documents"
_OTHER_MODEL = "Leave it out: it belongs to a kind of model that is not here"
_SERVER = (
    "Leave it out: there is no inference server; an Engine generates inside a loop of your own"
)
_RESTART = "Leave it out: a job that failed is started again, and goes on from --load"
_FORMAT = "Leave it out: checkpoints have one format, which loads under any layout"
_UNITS = "Leave it out: sharded weights are gathered one unit of the model at a time"
_BOARD = "Leave it out: --tensorboard-dir gets losses, rates, norms, times and perplexities"
_PROFILE = "Leave it out, or draw a step with --timeline"
_COLLECTOR = "Leave it out: Python decides when it collects garbage"
_LOOP = "Use an Engine: it has the parts of such a loop"
_EXPERTS = "Leave it out, or use pretrain_hf.py with a model of transformers that does this"
_DECAY = "Leave it out: biases and norms have no weight decay"

# (what is refused, remedy), with the flags that share it.
_GROUPS: tuple[tuple[str, str], ...] = (
    (
        "Leave it out: transfers between stages overlap with computing",
        "--no-overlap-p2p-communication",
    ),
    (
        "Leave it out: a checkpoint is loaded if all that the model needs is in it, and agrees "
        "with its digests",
        "--dist-ckpt-strictness --verify-integrity",
    ),
    (
        "Leave it out: there are no further timers",
        "--timing-log-option --no-barrier-with-level-1-timing",
    ),
    (
        "Leave it out: there is nothing like it here",
        """--logging-level --test-mode --result-rejected-tracker-filename --lazy-mpu-init
        --onnx-safe""",
    ),
    (
        "Leave it out: the embedding, the layers and the output head are cut into stages by cost",
        """--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        --standalone-embedding-stage""",
    ),
    (
        _SHAPE,
        """--window-size --window-attn-skip-freq --softmax-type --rotary-interleaved
        --rotary-seq-len-interpolation-factor --no-rope-freq --mrope-section --squared-relu --quick-geglu
        --activation-func-clamp-value --glu-linear-offset --apply-residual-connection-post-layernorm
        --multi-latent-attention --qk-l2-norm --relative-attention-num-buckets --relative-attention-max-distance
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor
        --mscale --mscale-all-dim --cache-mla-latents --linear-attention-freq --is-hybrid-model
        --disable-mamba-mem-eff-path --mla-down-proj-fusion --qk-clip --qk-clip-alpha --qk-clip-threshold
        --attention-output-gate --rotary-base-per-layer --head-wise-attn-gate --experimental-attention-variant
        --apply-dsa-kernel-fusion --enable-hyper-connections --num-residual-streams --use-fused-mhc
        --mrope-interleaved""",
    ),
    (
        "Leave it out: weights of norms are stored around 1 instead of 0, and round differently "
        "in bf16",
        "--apply-layernorm-1p",
    ),
    (
        _EXPERTS,
        """--moe-extended-tp
        --moe-latent-size --moe-use-upcycling
        --moe-router-num-groups --moe-router-group-topk --moe-router-topk-scaling-factor
        --moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-force-load-balancing
        --moe-router-padding-for-fp8 --moe-input-jitter-eps --moe-per-layer-logging --moe-deepep-num-sms
        --moe-apply-probs-on-input --moe-upcycling-granularity --moe-pad-experts-for-cuda-graph-inference
        --moe-shared-expert-glu-interleave-size --moe-enable-routing-replay
        --moe-router-padding-for-quantization --moe-router-force-biased --moe-n-hash-layers
        --moe-single-grouped-weight --moe-single-grouped-bias --moe-flex-dispatcher-backend
        --moe-permute-fusion-into-hybridep --moe-hybridep-pad-variable-tokens
        --moe-flex-dispatcher-num-sms --moe-hybridep-num-sms --moe-ncclep-static-shape
        --moe-mlp-glu-interleave-size --moe-paged-stash --moe-paged-stash-page-size
        --overlap-moe-expert-parallel-comm --use-fused-weighted-squared-relu
        --high-priority-a2a-comm-stream --use-grouped-gemm-for-shared-expert --use-mok-megakernel
        --actual-vocab-size --log-moe-overload-factor --overlap-dispatch-backward-with-experts-wgrad
        --ep-overlap-early-attn-memory-release""",
    ),
    ("Leave it out: learning rates and initial weights do not depend on the width", "--use-mup"),
    (
        "Leave it out, or use --deterministic-mode, which makes repeated runs equal",
        "--batch-invariant-mode",
    ),
    ("Leave it out: an MLP is computed in one piece", "--mlp-chunks-for-training"),
    ("Leave it out: torch chooses the attention kernel", "--fallback-to-eager-attn"),
    (
        "Leave it out: samples are not packed anew, each has the same length",
        "--thd-max-packed-sequences",
    ),
    (
        "Leave it out: NullTokenizer adds an id for the end of documents, and pads nothing",
        "--null-tokenizer-eod-id --null-tokenizer-pad-id",
    ),
    (
        "Leave it out: --context-parallel-size divides all sequences evenly, and exchanges heads",
        "--cp-partition-mode --hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
    ),
    (
        _FP8,
        """--no-fp8-wgrad --fp8-quantizer-factory --fp8-output-proj --keep-fp8-transpose-cache
        --reuse-grad-buf-for-mxfp8-param-ag --te-precision-config-file
        --use-kitchen-attention --dense-grouped-gemm --use-grouped-gemm-for-dense-mlp""",
    ),
    (
        "Leave it out: scales of fp8 are of the values of now, and keep no history",
        "--fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo",
    ),
    (
        "Leave it out: weights stay in the type of the model, and are rounded for each product",
        "--fp8-param-gather",
    ),
    ("Leave it out: losses are computed in fp32", "--fp16-lm-cross-entropy"),
    (
        "Leave it out: torch decides how products of bf16 are added up",
        "--disable-bf16-reduced-precision-matmul",
    ),
    (
        "Leave it out: random numbers depend on --seed, the iteration and the place in the model",
        "--te-rng-tracker --inference-rng-tracker --data-parallel-random-init",
    ),
    (
        "Leave it out: weights are drawn as in GPT-2, the embedding with the deviation of the "
        "layers",
        "--embedding-init-method-std --init-method-xavier-uniform",
    ),
    (
        "Leave it out: weights are drawn before a checkpoint is loaded, which takes seconds",
        "--no-initialization",
    ),
    ("Leave it out: there is one GPT model", "--use-legacy-models --spec"),
    (
        "Leave it out: --recompute-granularity says what is recomputed, full or selective",
        "--recompute-modules --distribute-saved-activations --moe-layer-recompute",
    ),
    (
        "Use --cpu-offloading-num-layers: activations are offloaded by layers",
        """--fine-grained-activation-offloading --no-clone-scatter-output-in-embedding --offload-modules
        --min-offloaded-tensor-size --delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks
        --activation-offload-fraction --fine-grained-offloading-max-inflight-offloads""",
    ),
    (
        "Use --cuda-graph-impl local",
        "--enable-cuda-graph --external-cuda-graph",
    ),
    (
        "Leave it out: --cuda-graph-impl local records whole ops of the schedule",
        "--cuda-graph-dynamic-microbatches --cuda-graph-modules --cuda-graph-scope",
    ),
    (
        "Leave it out: the optimizer's kernels are few, and launched one by one",
        "--optimizer-cuda-graph",
    ),
    (
        _OVERLAP,
        """--tp-comm-overlap-cfg --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
        --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag
        --disable-tp-comm-split-rs --tp-comm-bootstrap-backend""",
    ),
    ("Use --num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
    (
        "Leave it out, or use --pipeline-schedule zb-h1, which defers weight gradients of all "
        "layers",
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute",
    ),
    (
        "Leave it out: --distributed-backend carries everything",
        "--pipeline-model-parallel-comm-backend",
    ),
    (
        "Leave it out: communication of tensor and pipeline parallelism has high priority",
        "--high-priority-stream-groups",
    ),
    (
        _NCCL,
        """--use-nccl-ub --disable-symmetric-registration --fsdp-manual-registration --use-sharp
        --sharp-enabled-group --nccl-communicator-config-path --use-ring-exchange-p2p""",
    ),
    ("Leave it out: ranks agree on settings and files over gloo", "--disable-gloo-process-groups"),
    (
        "Leave it out: --distributed-timeout-minutes applies throughout",
        "--distributed-timeout-seconds-after-init",
    ),
    ("Start ranks with torchrun, which sets LOCAL_RANK", "--local-rank"),
    (
        "Use merak-plan or merak-memory, which need no GPU and no other ranks",
        "--fake-process-group",
    ),
    ("Use --ddp-bucket-size", "--ddp-num-buckets"),
    (
        "Leave it out: gradients are scaled before they are added up, in buckets of "
        "--ddp-bucket-size",
        "--ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw "
        "--no-gradient-reduce-div-fusion",
    ),
    (_STATE, "--overlap-param-gather-with-optimizer-step"),
    (
        "Use --offload-model-states: the optimizer's state is in host memory together with weights "
        "and gradients",
        """--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --offload-optimizer-states""",
    ),
    (
        "Use --data-parallel-sharding-strategy optim_grads_params, or optim_grads to keep "
        "weights replicated",
        "--use-torch-fsdp2",
    ),
    (
        "Use --data-parallel-sharding-strategy optim_grads to keep weights after the forward",
        "--torch-fsdp2-no-reshard-after-forward",
    ),
    (
        _UNITS,
        """--fsdp-double-buffer --suggested-communication-unit-size --create-all-gather-group
        --enable-full-sharding-in-hsdp""",
    ),
    (
        "Leave it out: all parameters have the same weight decay but biases and norms",
        "--dump-param-to-param-group-map",
    ),
    (_DECAY, "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type"),
    ("Leave it out: every batch is trained on", "--iterations-to-skip"),
    ("Leave it out: a rank waits for its device when it reads a loss", "--train-sync-interval"),
    (
        "Use --exit-interval, and --save-interval for checkpoints on the way",
        "--exit-duration-in-mins --exit-signal-handler-for-dataloader",
    ),
    (_COLLECTOR, "--manual-gc --manual-gc-interval --no-manual-gc-eval"),
    (
        _RESTART,
        "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters --adlr-autoresume "
        "--adlr-autoresume-interval",
    ),
    (
        "Leave it out: with --async-save a thread of each rank writes what the rank has",
        "--use-persistent-ckpt-worker --dist-ckpt-workers",
    ),
    (
        _FORMAT,
        """--ckpt-format --use-dist-ckpt --dist-ckpt-format --auto-detect-ckpt-format --ckpt-assume-constant-structure
        --dist-ckpt-save-pre-mcore-014 --dist-ckpt-optim-fully-reshardable
        --distrib-optim-fully-reshardable-mem-efficient --no-ckpt-fully-parallel-save --no-strict-fsdp-dtensor-load
        --load-main-params-from-ckpt""",
    ),
    (
        "Give the settings as flags or in a --config file: a checkpoint stores them only for "
        "comparison",
        """--use-checkpoint-args --use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
        --yaml-cfg""",
    ),
    ("Use --load with --finetune for the first start", "--pretrained-checkpoint"),
    (
        "Use --save-interval with --save-retain-interval: all checkpoints are written to --save",
        "--replication --replication-jump --replication-factor",
    ),
    (
        "Leave it out: gradients are not stored",
        "--save-wgrads-interval --save-dgrads-interval",
    ),
    (
        _TOKENIZER,
        """--vocab-extra-ids --tokenizer-metadata --tiktoken-special-tokens
        --tokenizer-special-tokens --tokenizer-sentencepiece-legacy --tokenizer-hf-use-fast
        --tokenizer-hf-include-special-tokens --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens""",
    ),
    (
        "Leave it out: SentencePieceTokenizer adds no ids to those of its file, and Llama2Tokenizer "
        "begins no document with <s>, as in Megatron-LM without it",
        "--legacy-tokenizer",
    ),
    ("Use --vocab-size with --make-vocab-size-divisible-by", "--padded-vocab-size"),
    (_DOCUMENTS, "--reset-position-ids --reset-attention-mask"),
    ("Leave it out: all samples are used", "--sample-rate"),
    ("Leave it out: padding is not a token here", "--allow-ambiguous-pad-tokens"),
    (
        "Leave it out: --eval-iters batches of the validation data are evaluated as one set",
        "--full-validation --multiple-validation-sets",
    ),
    (
        "Leave it out: indices are built once, and cached beside the data or in --data-cache-path",
        "--per-dataset-sequences-path --dataloader-fast-cache-load "
        "--dataloader-defer-npy-index-mmap",
    ),
    (
        "Leave it out, and copy objects to a disk: data is read from the file system",
        "--object-storage-cache-path",
    ),
    ("Start a run with --finetune for every phase", "--phase-transition-iterations"),
    (
        "Use MerakTrainer or TRL's SFTTrainer with a script",
        "--sft-tokenizer-prompt-format --sft-mock-dataset-config-json",
    ),
    (
        _BOARD,
        """--log-params-norm --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
        --log-memory-to-tensorboard --log-world-size-to-tensorboard --tensorboard-queue-size --log-progress
        --log-energy --log-memory-interval --log-device-memory-used --log-max-attention-logit
        --config-logger-dir --one-logger-project --one-logger-run-name --one-logger-async
        --app-tag-run-name --app-tag-run-version""",
    ),
    (
        _PROFILE,
        """--profile --use-pytorch-profiler --record-memory-history --memory-snapshot-path
        --disable-straggler-on-startup --straggler-ctrlr-port --run-workload-inspector-server
        --record-shapes --nvtx-ranges""",
    ),
    (_LOOP, "--perform-rl-step --refit-method"),
    (
        _SERVER,
        """--max-tokens-to-oom --flash-decode --use-legacy-static-engine --decode-only-cuda-graphs --symmetric-ar-type
        --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill --disable-chunked-prefill --enable-chunked-prefill
        --num-speculative-tokens""",
    ),
    (
        _OTHER_MODEL,
        """--decoder-num-layers --decoder-seq-length --mask-prob --short-seq-prob --output-bert-embeddings
        --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path --block-data-path
        --embedding-path --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction
        --data-per-class-fraction --no-data-sharding --head-lr-mult --mask-type --mask-factor --iter-per-epoch""",
    ),
)

# Remedies of flags without which the same numbers are computed.
_SAME_NUMBERS = frozenset(
    told
    for told, names in _GROUPS
    if any(
        name in names.split()
        for name in """
        --no-overlap-p2p-communication --dist-ckpt-strictness --timing-log-option --logging-level
        --decoder-first-pipeline-num-layers --no-initialization --recompute-modules
        --fine-grained-activation-offloading --enable-cuda-graph --tp-comm-overlap-cfg
        --defer-embedding-wgrad-compute --pipeline-model-parallel-comm-backend --high-priority-stream-groups
        --use-nccl-ub --disable-gloo-process-groups --distributed-timeout-seconds-after-init
        --optimizer-cpu-offload --fsdp-double-buffer --dump-param-to-param-group-map --train-sync-interval
        --manual-gc --enable-ft-package --use-persistent-ckpt-worker --ckpt-format --replication
        --save-wgrads-interval --object-storage-cache-path --per-dataset-sequences-path --log-params-norm --profile
        --max-tokens-to-oom
        """.split()
    )
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {name: told for told, names in _GROUPS for name in names.split()}
)

# Prefixes of related flags; a flag with a remedy of its own has that one.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys("--fp4- --kitchen-".split(), _FP8),
        "--mok-": _EXPERTS,
        "--mup-": "Leave it out: learning rates and initial weights do not depend on the width",
        "--mtp-": "Leave it out: the output head predicts the next token only",
        **dict.fromkeys(
            "--mamba- --hybrid- --heterogeneous- --linear- --gdn- --dsa- --csa- --mhc-".split(),
            _SHAPE,
        ),
        "--muon-": "Leave it out, or use MerakTrainer, which has Muon",
        **dict.fromkeys("--rl- --no-rl- --grpo- --langrl- --no-langrl-".split(), _LOOP),
        **dict.fromkeys("--inference- --no-inference-".split(), _SERVER),
        "--inprocess-": _RESTART,
        **dict.fromkeys(
            "--non-persistent- --ckpt-convert- --ckpt-fully-parallel-".split(), _FORMAT
        ),
        "--fim-": "Leave it out: samples are taken as they are in the data",
        **dict.fromkeys("--profile- --pytorch-profiler-".split(), _PROFILE),
        "--flight-recorder-": _NCCL,
        **dict.fromkeys(
            "--retro- --retriever- --bert- --biencoder- --ict- --indexer- --vision- --swin- "
            "--dino-".split(),
            _OTHER_MODEL,
        ),
    }
)

# Remedies by name: of refused flags, and of accepted ones with another value.
NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        **REFUSED,
        **{
            name: taken.otherwise
            or f"Leave it out, or use {' or '.join(taken.values)}: {taken.why}"
            for name, taken in TAKEN.items()
            if taken.values or taken.beside
        },
    }
)


def changes_numbers(name: str) -> bool:
    """Whether other numbers are computed without a flag that is refused, as far as is known.

    name: the flag, with a value that is refused.
    """
    if name in TAKEN:
        return not TAKEN[name].same_numbers
    told = remedy(name)
    return told not in _SAME_NUMBERS


def remedy(name: str) -> str | None:
    """Return the remedy for a refused flag of Megatron-LM; None if it is none.

    name: the flag, which is no setting here.
    """
    family = (text for start, text in FAMILIES.items() if name.startswith(start))
    return NOT_YET.get(name) or next(family, None)
