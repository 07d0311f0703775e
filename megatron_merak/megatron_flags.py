"""Megatron-LM flags without a setting here: accepted if they request the existing behaviour, else an error."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Taken:
    """An accepted flag that changes nothing.

    why: the reason, as a sentence for the user.
    values: values that change nothing; empty for a switch.
    beside: the flag that must also be given; without it this flag would request something.
    against: words on the command line with which it would request something.
    """

    why: str
    values: tuple[str, ...] = ()
    beside: str = ""
    against: tuple[str, ...] = ()

    def fits(self, flags: Container[str], tokens: Sequence[str]) -> bool:
        """Whether the rest of a command line, by its flags and as tokens, lets this flag change nothing."""
        words = {word for token in tokens for word in (token, token.partition("=")[2])}
        return (not self.beside or self.beside in flags) and not words & {*self.against}


_ONE = ("1",)
_SERVED = ("ps-sync", "ps-async")
_STRATEGY = "--data-parallel-sharding-strategy"
_FUSED = Taken("fused and plain operations compute the same formula here")
_ALWAYS = Taken("this is the only behaviour here")

TAKEN: Mapping[str, Taken] = MappingProxyType(
    {
        "--overlap-grad-reduce": Taken("gradients are reduced during the backward unless --no-overlap-grad-reduce"),
        "--overlap-param-gather": Taken("parameters are gathered during the forward unless --no-overlap-param-gather"),
        "--use-megatron-fsdp": Taken("there is one implementation of sharded weights", beside=_STRATEGY),
        "--accumulate-allreduce-grads-in-fp32": Taken(
            "gradients are accumulated in fp32, and sent in fp32 unless --grad-reduce-in-bf16"
        ),
        "--attention-softmax-in-fp32": _ALWAYS,
        "--apply-query-key-layer-scaling": Taken(
            "it keeps scores in the range of fp16, and here the scores of fp16 queries and keys are fp32"
        ),
        "--exit-signal-handler": Taken(
            "a run with --save saves and stops on SIGTERM, and on Ctrl-C", beside="--save", against=_SERVED
        ),
        "--use-mcore-models": Taken("there is one GPT model"),
        "--use-flash-attn": Taken("attention uses torch's fused kernel where one exists"),
        "--use-cpu-initialization": Taken("the initial weights do not depend on device or layout"),
        "--no-masked-softmax-fusion": _FUSED,
        "--no-bias-gelu-fusion": _FUSED,
        "--no-bias-swiglu-fusion": _FUSED,
        "--no-bias-dropout-fusion": _FUSED,
        "--no-gradient-accumulation-fusion": _FUSED,
        "--cross-entropy-loss-fusion": _FUSED,
        "--context-parallel-size": Taken("sequences are not sharded over ranks", _ONE),
        "--expert-model-parallel-size": Taken("there are no experts", _ONE),
        "--expert-tensor-parallel-size": Taken("there are no experts", _ONE),
        "--transformer-impl": Taken("there is one implementation", ("local", "transformer_engine")),
        "--attention-backend": Taken("torch chooses the attention kernel", ("auto",)),
        "--dataloader-type": Taken("samples are always read in that order", ("single",)),
        "--timing-log-level": Taken("there are no further timers", ("0",)),
    }
)

_BY_COST = "Leave it out: the embedding, the layers and the output head are cut into stages by cost"

# Remedies for flags that are errors; for accepted flags, with other values.
NOT_YET: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            """
        --num-experts --moe-router-topk --no-overlap-p2p-communication
        --no-check-for-nan-in-loss-and-grad
        --reset-position-ids --reset-attention-mask --ckpt-format --use-checkpoint-args --async-save
        --dist-ckpt-strictness --dist-ckpt-optim-fully-reshardable --verify-integrity --timing-log-option
        --profile --profile-step-start --profile-step-end""".split(),
            "Leave it out",
        ),
        **dict.fromkeys(
            """
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split""".split(),
            _BY_COST,
        ),
        "--exit-signal-handler": "Give --save, and no parameter servers: such a run saves on SIGTERM and on Ctrl-C",
        "--window-size": "Use pretrain_hf.py with a model that has sliding windows",
        "--wandb-project": "Use --tensorboard-dir, --metrics for JSON lines, or --run-dir for merak-report",
        "--recompute-modules": "Leave it out: --recompute-granularity full recomputes entire layers",
        "--num-layers-per-virtual-pipeline-stage": "Use --num-virtual-stages-per-pipeline-rank",
        "--fp16-lm-cross-entropy": "Leave it out: losses are computed in fp32",
        **dict.fromkeys(
            """
        --overlap-param-gather-with-optimizer-step --use-precision-aware-optimizer""".split(),
            "Use --use-distributed-optimizer",
        ),
        **dict.fromkeys(
            "--use-megatron-fsdp --use-torch-fsdp2".split(),
            f"Use {_STRATEGY} optim_grads_params, or optim_grads to keep weights replicated",
        ),
        "--vocab-file": "Use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model",
        "--merge-file": "Use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model",
        **{
            name: f"Leave it out, or use {' or '.join(taken.values)}: {taken.why}"
            for name, taken in TAKEN.items()
            if taken.values
        },
    }
)


def without_effect(tokens: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Remove the flags that change nothing from a command line; return the rest, and a notice for each removed flag."""
    rest: list[str] = []
    notices: dict[str, None] = {}
    left, given = list(tokens), {token.partition("=")[0] for token in tokens}
    while left:
        token = left.pop(0)
        name, equals, value = token.partition("=")
        taken = TAKEN.get(name)
        if taken is None or bool(equals) > bool(taken.values) or not taken.fits(given, tokens):
            rest.append(token)
            continue
        if taken.values:
            value = value if equals else left[0] if left else ""
            if value not in taken.values:
                rest.append(token)
                continue
            name = f"{name} {value}"
            del left[: 0 if equals else 1]
        notices[f"{name} changes nothing: {taken.why}."] = None
    return rest, tuple(notices)
