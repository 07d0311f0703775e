"""Megatron-LM flags that request what happens here anyway: accepted with a notice."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Taken:
    """An accepted flag that changes nothing.

    why: the reason, as a sentence for the user.
    values: values that change nothing; empty for a switch.
    beside: the flag that must also be given; without it this flag would request something.
    otherwise: the remedy where the flag would request something (empty: leave it out, or use one of
               the values).
    same_numbers: whether the same numbers are computed with any other value, too.
    any_value: whether the flag has a value, and every one changes nothing.
    """

    why: str
    values: tuple[str, ...] = ()
    beside: str = ""
    otherwise: str = ""
    same_numbers: bool = False
    any_value: bool = False

    @property
    def has_value(self) -> bool:
        return self.any_value or bool(self.values)

    def takes(self, value: str) -> bool:
        """Whether the flag changes nothing with this value."""
        return value in self.values or self.any_value and value[:2] not in ("", "--")

    def fits(self, flags: Container[str]) -> bool:
        """Whether this flag changes nothing beside the other flags of a command line."""
        return not self.beside or self.beside in flags


_ONE = ("1",)
_FP32 = ("fp32",)
_STRATEGY = "--data-parallel-sharding-strategy"
_FUSED = Taken("fused and plain operations compute the same formula here")
_ALWAYS = Taken("this is the only behaviour here")
_GPT = Taken("there is one GPT model")
_WHEN_FULL = Taken("each stage communicates a bucket as soon as it can")
_MASTER = Taken("master weights and accumulated gradients are fp32", _FP32)

# Flags of earlier versions of Megatron-LM, in scripts that were written for those.
FORMER: Mapping[str, Taken] = MappingProxyType(
    {
        "--data-impl": Taken(
            "it was Megatron-LM's, and data files are mapped into memory",
            ("mmap", "infer", "lazy", "cached"),
        ),
        "--mmap-warmup": Taken("it was Megatron-LM's, and files are read when they are needed"),
        "--DDP-impl": Taken(
            "it was Megatron-LM's, and there is one implementation", ("local", "torch")
        ),
        "--fp32-allreduce": Taken(
            "it was Megatron-LM's, and gradients are sent in fp32 unless --grad-reduce-in-bf16"
        ),
        "--no-query-key-layer-scaling": Taken(
            "it was Megatron-LM's, and scores of fp16 queries and keys are fp32"
        ),
        **dict.fromkeys(
            """--use-contiguous-buffers-in-local-ddp --no-contiguous-buffers-in-local-ddp
        --delay-grad-reduce --delay-param-gather --no-delay-grad-reduce""".split(),
            Taken("it was Megatron-LM's, and gradients are reduced in buckets as they get ready"),
        ),
        **dict.fromkeys(
            """--scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion
        --no-scaled-masked-softmax-fusion --bias-gelu-fusion --bias-dropout-fusion""".split(),
            Taken("it was Megatron-LM's, and operations are fused or plain with the same formula"),
        ),
        **dict.fromkeys(
            """--encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size""".split(),
            Taken("it was Megatron-LM's, and there is no encoder", ("0",)),
        ),
    }
)

TAKEN: Mapping[str, Taken] = MappingProxyType(
    {
        **FORMER,
        "--overlap-grad-reduce": Taken(
            "gradients are reduced during the backward unless --no-overlap-grad-reduce"
        ),
        "--overlap-param-gather": Taken(
            "parameters are gathered during the forward unless --no-overlap-param-gather"
        ),
        "--use-megatron-fsdp": Taken(
            "there is one implementation of sharded weights",
            beside=_STRATEGY,
            otherwise=f"Use {_STRATEGY} optim_grads_params, or optim_grads to keep weights "
            "replicated",
        ),
        "--accumulate-allreduce-grads-in-fp32": Taken(
            "gradients are accumulated in fp32, and sent in fp32 unless --grad-reduce-in-bf16"
        ),
        "--ddp-reduce-scatter-with-fp32-accumulation": Taken(
            "gradients of all ranks are added up in fp32"
        ),
        "--ddp-param-name-patterns-for-fp32-local-accumulation": Taken(
            "gradients are accumulated in fp32", ("all",)
        ),
        "--attention-softmax-in-fp32": _ALWAYS,
        "--apply-query-key-layer-scaling": Taken(
            "it keeps scores in the range of fp16, and here the scores of fp16 queries and keys "
            "are fp32"
        ),
        "--exit-signal-handler": Taken(
            "a run with --save saves and stops on SIGTERM, on Ctrl-C and on other signals that "
            "ask it to",
            beside="--save",
            otherwise="Give --save: such a run saves on SIGTERM, on Ctrl-C and on other signals "
            "that ask it to",
        ),
        "--exit-signal": Taken(
            "a run with --save saves and stops on each of these signals",
            ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
            beside="--save",
            otherwise="Give --save: such a run saves on each of SIGTERM, SIGINT, SIGHUP, "
            "SIGQUIT, SIGUSR1 and SIGUSR2",
        ),
        "--use-mcore-models": _GPT,
        "--enable-experimental": Taken("no feature here needs it"),
        "--openai-gelu": Taken("GELU is computed by that formula"),
        "--use-flash-attn": Taken("attention uses torch's fused kernel where one exists"),
        "--use-cpu-initialization": Taken("the initial weights do not depend on device or layout"),
        "--init-model-with-meta-device": Taken("a rank allocates its own parameters only"),
        "--no-position-embedding": Taken(
            "--position-embedding-type says which one there is",
            beside="--position-embedding-type",
            otherwise="Say which position embedding the model has, or that it has none",
        ),
        "--rope-type": Taken("there is one kind of rotary embedding", ("rope",)),
        **dict.fromkeys(
            """
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
        --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --cross-entropy-loss-fusion
        --use-te-activation-func --disable-jit-fuser --use-transformer-engine-op-fuser --fused-residual-rmsnorm
        """.split(),
            _FUSED,
        ),
        **dict.fromkeys(
            "--moe-grouped-gemm --moe-use-legacy-grouped-gemm".split(),
            Taken("the products of all experts of a layer are one"),
        ),
        **dict.fromkeys("--moe-permute-fusion --moe-router-fusion".split(), _FUSED),
        "--moe-token-dispatcher-type": Taken(
            "ranks exchange the rows of each other's experts, which computes the same",
            ("allgather", "alltoall", "flex"),
        ),
        "--moe-enable-deepep": Taken("ranks exchange the rows of each other's experts in any case"),
        "--moe-shared-expert-overlap": Taken(
            "a shared expert is computed while ranks exchange rows in any case"
        ),
        "--moe-pad-expert-input-to-capacity": Taken(
            "rows of zeros up to an expert's capacity would compute the same",
            beside="--moe-expert-capacity-factor",
            otherwise="Leave it out: without a capacity there is nothing to fill",
        ),
        "--moe-layer-freq": Taken("every layer has experts", _ONE),
        "--moe-router-score-function": Taken("probabilities are a softmax", ("softmax",)),
        "--cross-entropy-fusion-impl": Taken("there is one implementation", ("native", "te")),
        "--no-async-tensor-model-parallel-allreduce": Taken("Megatron-LM ignores it, too"),
        "--no-align-grad-reduce": _WHEN_FULL,
        "--no-align-param-gather": _WHEN_FULL,
        "--no-scatter-gather-tensors-in-pipeline": Taken(
            "each rank sends its tensors to the next stage as they are"
        ),
        "--overlap-p2p-communication-warmup-flush": Taken(
            "transfers overlap with computing in the whole schedule"
        ),
        "--outer-dp-sharding-strategy": Taken(
            "groups of replicas have full copies of the state", ("no_shard",)
        ),
        **dict.fromkeys(
            """
        --main-grads-dtype --main-params-dtype --megatron-fsdp-main-params-dtype
        --megatron-fsdp-main-grads-dtype""".split(),
            _MASTER,
        ),
        "--megatron-fsdp-grad-comm-dtype": Taken(
            "gradients are sent in fp32 unless --grad-reduce-in-bf16", _FP32
        ),
        "--transformer-impl": Taken("there is one implementation", ("local", "transformer_engine")),
        "--attention-backend": Taken("torch chooses the attention kernel", ("auto",)),
        "--dataloader-type": Taken("samples are always read in that order", ("single",)),
        "--no-create-attention-mask-in-dataloader": Taken(
            "attention is causal, and no mask is loaded"
        ),
        "--disable-msc": Taken("files are read from the file system"),
        "--timing-log-level": Taken("there are no further timers", ("0",), same_numbers=True),
        "--tensorboard-log-interval": Taken("every iteration is written", _ONE, same_numbers=True),
        "--log-validation-ppl-to-tensorboard": Taken(
            "the perplexity of every evaluation is written"
        ),
        "--no-one-logger": Taken("there is no one_logger"),
        "--empty-unused-memory-level": Taken(
            "the memory cache of the device is kept", ("0",), same_numbers=True
        ),
    }
)


def without_effect(
    tokens: Sequence[str], table: Mapping[str, Taken] = TAKEN
) -> tuple[list[str], tuple[str, ...]]:
    """Remove the flags that change nothing from a command line; return the rest, and a notice for
    each removed flag.

    table: the flags that change nothing.
    """
    rest: list[str] = []
    notices: dict[str, None] = {}
    left = list(tokens)
    names = {token.partition("=")[0] for token in tokens}
    while left:
        token = left.pop(0)
        name, equals, value = token.partition("=")
        taken = table.get(name)
        if taken is None or bool(equals) > taken.has_value or not taken.fits(names):
            rest.append(token)
            continue
        if taken.has_value:
            value = value if equals else left[0] if left else ""
            if not taken.takes(value):
                rest.append(token)
                continue
            name = f"{name} {value}"
            del left[: 0 if equals else 1]
        notices[f"{name} changes nothing: {taken.why}."] = None
    return rest, tuple(notices)
