"""The sections of the configuration. A field is a command-line flag (``num_layers`` is
``--num-layers``) and the string below it is the flag's help text. A value that is wrong by itself
raises ConfigError where the section is built."""

import dataclasses
import math

from ..errors import ConfigError
from .fp8 import FP8_FORMATS, FP8_RECIPES, Fp8
from .settings import InPlan, Needs, Section, setting
from .tokenizers import FILES, TIKTOKEN_PATTERNS, TOKENIZERS

ON_FULL_DISK = ("wait", "stop")  # what a run does that cannot save for want of space
RERUN_MODES = ("disabled", "validate_results", "report_stats")
INJECTIONS = ("correct_result", "transient_error", "persistent_error")
FP32_MATMULS = ("auto", "highest", "high", "medium")
_QUERY_GROUPS = Needs(
    "group_query_attention", remedy="Add --group-query-attention, or leave --num-query-groups out"
)
_ROTARY = Needs(
    "position_embedding_type", ("rope",), reason="has no effect without rotary embedding"
)
_SCALING = Needs("use_rope_scaling", reason="has no effect without scaling")
_EXPERTS = Needs("num_experts")
_SHARED = Needs("moe_shared_expert_intermediate_size")
_CAPACITY = Needs("moe_expert_capacity_factor")
_BALANCED = Needs("moe_router_load_balancing_type", ("aux_loss",))
_FP16 = Needs("fp16")
_FP8 = Needs("fp8_format")
_ENDS = Needs("first_last_layers_bf16")
_STRAGGLER = Needs("log_straggler")
_LOAD = Needs("load", remedy="Give --load DIRECTORY, or leave it out")
_SAVE = Needs("save", remedy="Give --save DIRECTORY, or leave it out")

# What takes the place of Megatron-LM's other tokenizers, for people.
_WORD_PIECES = (
    "Use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model DIR, a directory that has the "
    'vocabulary as vocab.txt, and a tokenizer_config.json of {"tokenizer_class": "BertTokenizer"}'
)
_TEXT_ONLY = "Use HuggingFaceTokenizer with --tokenizer-model: data is text without roles or images"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model's shape. GELU models use the tanh formula, as GPT-2 does."""

    num_layers: int = setting(least=1, most=65536)
    """Number of transformer layers."""
    hidden_size: int = setting(least=1, most=1 << 20)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = setting(None, least=1, most=1 << 22)
    """Width of the MLP (unset: 4 x hidden size; with --swiglu 8/3 x hidden size, rounded down to a
    multiple of 64).
    """
    num_attention_heads: int = setting(least=1, most=65536)
    """Number of attention heads."""
    group_query_attention: bool = setting(False)
    """Let each group of query heads share one key-value head; see --num-query-groups."""
    num_query_groups: int = setting(1, least=1, needs=_QUERY_GROUPS)
    """Number of key-value heads; needs --group-query-attention."""
    kv_channels: int | None = setting(None, least=1, most=1 << 20)
    """Width of one attention head (unset: hidden size / attention heads)."""
    seq_length: int = setting(least=1, plan=InPlan("sequence_length"))
    """Tokens per training sample."""
    max_position_embeddings: int | None = setting(None, least=1)
    """Longest sequence that the position embedding supports (unset: --seq-length)."""
    position_embedding_type: str = setting(
        "learned_absolute",
        choices=("learned_absolute", "rope", "none"),
        not_yet={"yarn": "", "mrope": "", "relative": ""},
    )
    """Position embedding: a learned table, rotary embedding, or none."""
    rotary_base: int = setting(10000, least=1, needs=_ROTARY)
    """Base of the rotary frequencies."""
    rotary_percent: float = setting(1.0, above=0, most=1, needs=_ROTARY)
    """Fraction of a head's channels that are rotated."""
    use_rope_scaling: bool = setting(False, needs=_ROTARY)
    """Scale the rotary frequencies as in Llama 3.1."""
    rope_scaling_factor: float = setting(8.0, least=1, needs=(_ROTARY, _SCALING))
    """Factor by which --use-rope-scaling scales the low frequencies."""
    normalization: str = setting("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Normalization before attention, MLP and output layer."""
    norm_epsilon: float = setting(1e-5, above=0)
    """Epsilon added to the variance in normalizations."""
    qk_layernorm: bool = setting(False)
    """Normalize the queries and keys of each head."""
    swiglu: bool = setting(False)
    """Use SiLU(gate) x up instead of GELU in the MLP."""
    disable_bias_linear: bool = setting(False)
    """Build all linear layers without biases."""
    add_qkv_bias: bool = setting(False)
    """Keep the bias of queries, keys and values with --disable-bias-linear."""
    num_experts: int | None = setting(None, least=2, most=65536)
    """Number of experts of each layer, which take the place of its MLP; needs --swiglu and
    --disable-bias-linear.
    """
    moe_ffn_hidden_size: int | None = setting(None, least=1, most=1 << 22, needs=_EXPERTS)
    """Width of an expert (unset: that of the MLP)."""
    moe_shared_expert_intermediate_size: int | None = setting(
        None, least=1, most=1 << 22, needs=_EXPERTS
    )
    """Width of a shared expert, which computes every token beside its experts (unset: there is
    none); of several, the sum of theirs.
    """
    moe_shared_expert_gate: bool = setting(False, needs=(_EXPERTS, _SHARED))
    """Multiply the output of the shared expert with the sigmoid of a product of the token."""
    moe_router_topk: int = setting(2, least=1, needs=_EXPERTS)
    """Number of experts that each token is sent to."""
    moe_router_pre_softmax: bool = setting(False, needs=_EXPERTS)
    """Weigh a token's experts by their probabilities among all experts, instead of among those of
    the token.
    """
    moe_router_dtype: str | None = setting(
        None, choices=("fp32",), not_yet={"fp64": ""}, needs=_EXPERTS
    )
    """Type in which routers compute logits (unset: that of the weights); probabilities are fp32."""
    moe_router_load_balancing_type: str = setting(
        "aux_loss",
        choices=("aux_loss", "none"),
        not_yet={"seq_aux_loss": "", "global_aux_loss": "", "sinkhorn": ""},
        needs=_EXPERTS,
    )
    """What balances the load of experts: an auxiliary loss of each micro-batch, or nothing."""
    moe_aux_loss_coeff: float = setting(0.0, least=0, needs=(_EXPERTS, _BALANCED))
    """Factor of the auxiliary loss of load balancing; 1e-2 is a good start."""
    moe_z_loss_coeff: float | None = setting(None, least=0, needs=_EXPERTS)
    """Factor of the loss that keeps the logits of routers small; 1e-3 is a good start."""
    moe_expert_capacity_factor: float | None = setting(None, above=0, needs=_EXPERTS)
    """Let an expert compute so many times the tokens of a micro-batch that it would have if all had
    as many; what is more, it leaves out (unset: it computes all).
    """
    moe_token_drop_policy: str = setting(
        "probs", choices=("probs", "position"), needs=(_EXPERTS, _CAPACITY)
    )
    """What an expert computes of more tokens than it has room for: those with the largest weights,
    or the first.
    """
    untie_embeddings_and_output_weights: bool = setting(False)
    """Give the output layer its own weight instead of sharing the token embedding's."""
    hidden_dropout: float = setting(0.1, least=0, below=1)
    """Dropout probability of the outputs of the embedding and of each sublayer."""
    attention_dropout: float = setting(0.1, least=0, below=1)
    """Dropout probability of the attention probabilities."""
    init_method_std: float = setting(0.02, above=0)
    """Standard deviation of the initial weights."""
    make_vocab_size_divisible_by: int = setting(128, least=1)
    """Pad the vocabulary to a multiple of this times the tensor-parallel degree."""
    vocab_size: int | None = setting(None, least=1)
    """Vocabulary size before padding (unset: the tokenizer's); NullTokenizer adds an
    end-of-document id.
    """
    fp32_residual_connection: bool = setting(False, plan=InPlan("fp32_residual"))
    """Keep the residual stream of a 16-bit model in fp32: embeddings and sublayer outputs are cast
    to fp32, sums and tensors sent between stages are fp32, and normalizations return 16 bits."""
    cross_entropy_chunk_size: int = setting(0, least=0, ours=True, plan=InPlan("loss_chunk"))
    """Compute the loss for this many tokens at a time; logits are recomputed in the backward
    instead of stored (0: store all logits)."""

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // (3 * 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def couples_samples(self) -> str:
        """What is of whole micro-batches, so that the loss of one is not the sum of those of its
        samples; empty: nothing.
        """
        if self.moe_aux_loss_coeff or self.moe_z_loss_coeff:
            return "losses of routers"
        if self.moe_expert_capacity_factor is not None:
            return "capacities of experts"
        return ""

    @property
    def head_dim(self) -> int:
        return (
            self.kv_channels
            if self.kv_channels is not None
            else self.hidden_size // self.num_attention_heads
        )

    @property
    def query_groups(self) -> int:
        """The effective number of key-value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head; 0 without rotary embedding."""
        return (
            int(self.head_dim * self.rotary_percent)
            if self.position_embedding_type == "rope"
            else 0
        )

    @property
    def max_positions(self) -> int:
        return (
            self.seq_length
            if self.max_position_embeddings is None
            else self.max_position_embeddings
        )

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return ``vocab_size`` rounded up to a multiple of ``make_vocab_size_divisible_by`` x
        ``tensor_parallel_size``. Raise ConfigError if the vocabulary size is not known yet."""
        if self.vocab_size is None:
            raise ConfigError(
                "--vocab-size",
                "(unset)",
                "is needed to size the embedding",
                "Give it, or a tokenizer, which defines it",
            )
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Batch, length and precision of the run."""

    micro_batch_size: int = setting(least=1, plan=InPlan("micro_batch_size"))
    """Samples per micro-batch of one replica."""
    global_batch_size: int | None = setting(None, least=1, plan=InPlan("global_batch_size"))
    """Samples per optimizer step over all replicas (unset: micro-batch size x
    data-parallel size).
    """
    train_iters: int | None = setting(None, least=1)
    """Optimizer steps of the run."""
    train_samples: int | None = setting(None, least=1)
    """Samples of the run, instead of --train-iters; the learning-rate and weight-decay schedules
    then also count samples."""
    rampup_batch_size: tuple[str, ...] = setting(())
    """Batch-size ramp 'START INCREMENT SAMPLES': grow from START to --global-batch-size in steps of
    INCREMENT over the first SAMPLES of --train-samples."""
    step_batch_size_schedule: str | None = setting(None)
    """Batch sizes by consumed tokens, such as '0:768 250B:1536 500B:3072' (K, M, B, T), instead of
    --global-batch-size."""
    decrease_batch_size_if_needed: bool = setting(False)
    """Round batch sizes down to a multiple of micro-batch size x data-parallel size instead of
    raising an error.
    """
    exit_interval: int | None = setting(None, least=1)
    """Stop after an iteration that is divisible by this."""
    eval_interval: int | None = setting(None, least=1)
    """Iterations between evaluations on the validation set (unset: only after training)."""
    eval_iters: int = setting(100, least=0)
    """Global batches per evaluation; 0 disables evaluation."""
    seed: int = setting(1234, least=0, most=2**32 - 1)
    """Seed of initialization, data order and dropout."""
    deterministic_mode: bool = setting(False)
    """Use only deterministic algorithms; repeated runs are then bitwise equal."""
    bf16: bool = setting(False, plan=InPlan("dtype", on="bfloat16"))
    """bfloat16 weights and activations, with fp32 master weights and fp32 gradients."""
    fp16: bool = setting(False, plan=InPlan("dtype", on="float16"))
    """float16 weights and activations, with fp32 master weights, fp32 gradients and a loss
    scale.
    """
    fp8_format: str | None = setting(None, choices=FP8_FORMATS, plan=InPlan("fp8_format"))
    """Compute the products of linear layers with operands of 8 bits, added up in fp32: e4m3, or
    hybrid, with gradients in e5m2 (unset: in the type of the model)."""
    fp8_recipe: str = setting(
        FP8_RECIPES[0],
        choices=FP8_RECIPES,
        not_yet={
            "delayed": "Use tensorwise: scales are of the values of now, and keep no history",
            "mxfp8": "Use blockwise: scales of 32 values take other devices",
            "custom": "Use tensorwise or blockwise",
        },
        megatron="delayed",
        plan=InPlan("fp8_recipe"),
        needs=_FP8,
    )
    """What has a scale of its own: an operand, or each 1 x 128 of its values, 128 x 128 of a
    weight."""
    first_last_layers_bf16: bool = setting(False, makes_plan=True, needs=_FP8)
    """Leave layers at both ends of the model in its own type."""
    num_layers_at_start_in_bf16: int = setting(1, least=0, makes_plan=True, needs=_ENDS)
    """Layers at the start that --first-last-layers-bf16 leaves."""
    num_layers_at_end_in_bf16: int = setting(1, least=0, makes_plan=True, needs=_ENDS)
    """Layers at the end that --first-last-layers-bf16 leaves."""
    loss_scale: float | None = setting(None, least=0, most=2**127, needs=_FP16)
    """Fixed loss scale of --fp16 (unset or 0: dynamic, controlled by the next four flags)."""
    initial_loss_scale: float = setting(2.0**32, least=2.0**-126, most=2.0**127, needs=_FP16)
    """Initial dynamic loss scale of --fp16."""
    min_loss_scale: float = setting(1.0, least=2.0**-126, most=2.0**127, needs=_FP16)
    """Smallest dynamic loss scale of --fp16; a run whose gradients overflow at it ends by
    --max-consecutive-skipped-steps."""
    loss_scale_window: float = setting(1000.0, least=1, needs=_FP16)
    """Steps without overflow after which the loss scale of --fp16 is doubled."""
    hysteresis: int = setting(2, least=1, needs=_FP16)
    """Overflows after which the loss scale of --fp16 is halved; each further overflow halves it
    again until it has been doubled."""
    fp32_matmul_precision: str = setting("auto", choices=FP32_MATMULS, ours=True)
    """torch's precision of fp32 matrix products; auto: on CPUs the fastest one that a probe finds
    exact, else highest."""
    calculate_per_token_loss: bool = setting(False)
    """Divide the loss by the tokens of the global batch instead of averaging micro-batch means."""
    check_weight_hash_across_dp_replicas_interval: int = setting(100, least=0, megatron=0)
    """Iterations between comparisons of the weight digests of data-parallel replicas; 0
    for none.
    """
    max_consecutive_skipped_steps: int = setting(20, least=1, ours=True)
    """End the run with an error after this many consecutive steps were skipped because the gradient
    was not finite. In fp16, count only steps at which the loss scale could not be lowered."""
    rerun_mode: str = setting("disabled", choices=RERUN_MODES, megatron="validate_results")
    """Steps to compute twice: those with unexpected results, to tell faults from data
    (validate_results), all, to report differences (report_stats), or none."""
    check_for_spiky_loss: bool = setting(False)
    """Report a micro-batch whose loss is at least 10 times the largest of the first 100; see
    --rerun-mode.
    """
    check_for_large_grads: bool = setting(False)
    """Report a rank whose gradient has at least 10 times the largest norm of the first 100 steps;
    see --rerun-mode.
    """
    no_check_for_nan_in_loss_and_grad: bool = setting(False)
    """With --rerun-mode validate_results, do not compute a step again because its loss or gradient
    is not finite. Its update is skipped in any case."""
    error_injection_rate: int = setting(0, least=0)
    """With --rerun-mode, treat one result in this many as unexpected, for tests; 0: none."""
    error_injection_type: str = setting("transient_error", choices=INJECTIONS)
    """What --error-injection-rate pretends to be the cause."""
    skip_train: bool = setting(False)
    """Evaluate without training."""

    @property
    def dtype(self) -> str:
        """Name of the compute dtype: ``bfloat16``, ``float16`` or ``float32``."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def fp8(self) -> Fp8 | None:
        """How linear layers compute in fp8; None: they do not."""
        if self.fp8_format is None:
            return None
        ends = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)
        return Fp8(
            self.fp8_format, self.fp8_recipe, ends if self.first_last_layers_bf16 else (0, 0)
        )

    @property
    def is_half(self) -> bool:
        """Whether it computes in 16 bits."""
        return self.bf16 or self.fp16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Datasets and tokenizer."""

    data_path: tuple[str, ...] = setting(())
    """PREFIX of an indexed dataset, or WEIGHT PREFIX pairs to blend; --split divides it
    into parts.
    """
    split: str = setting("969, 30, 1", megatron=None)
    """Weights of the training, validation and test parts of --data-path."""
    train_data_path: tuple[str, ...] = setting(())
    """Training data in the form of --data-path, instead of --data-path."""
    valid_data_path: tuple[str, ...] = setting(())
    """Validation data in the form of --data-path."""
    test_data_path: tuple[str, ...] = setting(())
    """Test data in the form of --data-path."""
    data_args_path: str | None = setting(None)
    """File with the words of --data-path, where they are too many for a command line."""
    per_split_data_args_path: str | None = setting(None)
    """JSON file with the words of --train-data-path, --valid-data-path and --test-data-path under
    the keys train, valid and test.
    """
    data_cache_path: str | None = setting(None)
    """Directory for cached sample indices (unset: beside each dataset)."""
    mock_data: bool = setting(False)
    """Train on generated tokens; for benchmarks and tests."""
    num_workers: int = setting(0, least=0, megatron=2)
    """Loader threads per rank that prepare batches in advance; 0 loads each batch when it is
    needed.
    """
    no_mmap_bin_files: bool = setting(False)
    """Read the token files instead of memory-mapping them."""
    eod_mask_loss: bool = setting(False)
    """Exclude end-of-document tokens from the loss."""
    mid_level_dataset_surplus: float = setting(0.005, least=0)
    """Fraction of extra samples built per blended dataset, so that rounding never exhausts one."""
    num_dataset_builder_threads: int = setting(1, least=1)
    """Threads per rank that build the sample indices of blended datasets."""
    tokenizer_type: str | None = setting(
        None,
        choices=tuple(TOKENIZERS),
        not_yet={
            "BertWordPieceLowerCase": _WORD_PIECES,
            "BertWordPieceCase": _WORD_PIECES,
            "MultimodalTokenizer": _TEXT_ONLY,
            "NullMultimodalTokenizer": _TEXT_ONLY,
            "SFTTokenizer": _TEXT_ONLY,
        },
    )
    """GPT2BPETokenizer reads --vocab-file and --merge-file, others --tokenizer-model; NullTokenizer
    is for data of numbers below --vocab-size (unset: GPT2BPETokenizer if its files are given).
    """
    tokenizer_model: str | None = setting(None)
    """Directory or tokenizer.json for HuggingFaceTokenizer, .model file of sentencepiece, or .json
    file for TikTokenizer.
    """
    vocab_file: str | None = setting(None)
    """The vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = setting(None)
    """The merges.txt for GPT2BPETokenizer."""
    tiktoken_pattern: str = setting("v2", choices=TIKTOKEN_PATTERNS)
    """How TikTokenizer cuts text into words; other tokenizers do not read it."""
    tiktoken_num_special_tokens: int = setting(1000, least=1)
    """Ids before those of TikTokenizer's vocabulary; other tokenizers do not read it."""

    @property
    def tokenizer(self) -> str | None:
        """The kind of tokenizer: --tokenizer-type, or that of the two files if they are given."""
        if self.tokenizer_type is None and (self.vocab_file or self.merge_file):
            return "GPT2BPETokenizer"
        return self.tokenizer_type

    @property
    def by_part(self) -> bool:
        """Whether training, validation and test data are given apart, so that nothing is split."""
        parts = (self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(parts) or self.per_split_data_args_path is not None

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Training, validation and test weights as written, missing ones 0. Raises ConfigError."""
        try:
            weights = [float(part) for part in self.split.split(",")]
        except ValueError:
            weights = []
        if not 1 <= len(weights) <= 3 or not all(0 <= w < math.inf for w in weights):
            raise ConfigError(
                "--split",
                repr(self.split),
                "is not a list of one to three weights separated by commas",
                "Write it like '969, 30, 1'",
            )
        train, valid, test = (weights + [0.0, 0.0])[:3]
        return train, valid, test

    @property
    def tokenizer_files(self) -> dict[str, str | None]:
        """The flags that name files of a tokenizer, with their values."""
        values = (self.tokenizer_model, self.vocab_file, self.merge_file)
        return dict(zip(FILES, values, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFDataConfig(DataConfig):
    """Datasets and tokenizer."""

    sft: bool = setting(False)
    """Train on conversations, as merak-preprocess --chat writes them: whole ones are packed
    into samples, each is read by itself, and the targets are the tokens of the assistant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Saving and resuming."""

    save: str | None = setting(None)
    """Directory to write checkpoints to."""
    load: str | None = setting(None)
    """Directory to resume from; the newest complete checkpoint is used."""
    save_interval: int | None = setting(None, least=1, needs=_SAVE)
    """Iterations between checkpoints (unset: only at the end)."""
    save_retain_interval: int | None = setting(None, least=1, needs=_SAVE)
    """Keep checkpoints of iterations divisible by this, and the newest of the others (unset: keep
    all).
    """
    async_save: bool = setting(False, needs=_SAVE)
    """Write checkpoints while training goes on: it waits while they are copied to memory of the
    host, as much as they have.
    """
    save_increment_interval: int | None = setting(None, least=1, ours=True, needs=_SAVE)
    """Write the gradient of every step between checkpoints, so that a resume repeats the updates and
    loses at most this many steps and the one under way; 4 bytes a parameter and step, until
    --save-retain-interval removes them.
    """
    on_full_disk: str = setting("wait", choices=ON_FULL_DISK, ours=True)
    """If there is no space for a checkpoint, wait for it, at most 12 hours, and save then; or stop
    with an error.
    """
    ckpt_step: int | None = setting(None, least=0, needs=_LOAD)
    """Resume from this iteration instead of the newest."""
    finetune: bool = setting(False, needs=_LOAD)
    """Load only the weights and start at iteration 0."""
    no_load_optim: bool = setting(False, needs=_LOAD)
    """Do not load the optimizer's state."""
    no_load_rng: bool = setting(False, needs=_LOAD)
    """Accepted without effect: random numbers depend on --seed and the iteration, and no state is
    loaded.
    """
    no_save_optim: bool = setting(False, needs=_SAVE)
    """Do not save the optimizer's state."""
    no_save_rng: bool = setting(False, needs=_SAVE)
    """Accepted without effect: random numbers depend on --seed and the iteration, and no state is
    saved.
    """
    use_checkpoint_opt_param_scheduler: bool = setting(False, needs=_LOAD)
    """Use the learning-rate and weight-decay schedule of the checkpoint instead of the flags."""
    override_opt_param_scheduler: bool = setting(False, needs=_LOAD)
    """Use the schedule of the flags instead of the checkpoint's. This is the default; a difference
    is reported.
    """
    override_dataset: bool = setting(False, ours=True, needs=_LOAD)
    """Allow resuming with training data other than the checkpoint's, which is otherwise an
    error.
    """
    exit_on_missing_checkpoint: bool = setting(False, needs=_LOAD)
    """Stop if --load has no checkpoint, instead of starting from iteration 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFCheckpointConfig(CheckpointConfig):
    """Saving and resuming."""

    save_hf: str | None = setting(None, ours=True)
    """Directory to save the trained model to, in HuggingFace's format for from_pretrained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Progress output and logs."""

    log_interval: int = setting(100, least=1)
    """Iterations between console lines."""
    log_format: str = setting("auto", choices=("auto", "megatron", "short"), ours=True)
    """Form of the console line: Megatron-LM's, or a short one of at most 120 columns; auto: short
    where standard output is a terminal, else Megatron-LM's."""
    log_throughput: bool = setting(False)
    """Add TFLOP/s per GPU and MFU to the console line."""
    tensorboard_dir: str | None = setting(None)
    """Directory for TensorBoard event files."""
    report_to: tuple[str, ...] = setting(
        (), ours=True, choices=("tensorboard", "wandb", "mlflow", "opentelemetry")
    )
    """Trackers that get the numbers of every iteration, beside those whose own settings are given.
    opentelemetry gets spans of steps, evaluations and saves. Their libraries read the rest, such as
    WANDB_MODE, MLFLOW_TRACKING_URI and OTEL_EXPORTER_OTLP_ENDPOINT, from the environment."""
    wandb_project: str | None = setting(None)
    """Project of Weights & Biases that gets the numbers of every iteration."""
    wandb_exp_name: str | None = setting(None)
    """Name of the run in Weights & Biases."""
    wandb_entity: str | None = setting(None)
    """User or team of the project."""
    wandb_save_dir: str | None = setting(None)
    """Directory for what Weights & Biases keeps on this machine (default: wandb in --save)."""
    log_num_zeros_in_grad: bool = setting(False)
    """Count the zeros in the gradient."""
    log_straggler: bool = setting(False)
    """Tell at each log interval which ranks computed longest and shortest beside those that compute
    the same, waits for other ranks left out. On a GPU ranks that compute a layer together have
    one time, and each step waits for the device once more.
    """
    straggler_minmax_count: int = setting(1, least=1, needs=_STRAGGLER)
    """Ranks that --log-straggler names on either side."""
    timeline: str | None = setting(None, ours=True)
    """Draw the timeline of the last step: a .png, a zoomable .html page, or a .json trace for
    Perfetto.
    """
    metrics: str | None = setting(None, ours=True)
    """Append the loss of every iteration to this JSON-lines file."""
    run_dir: str | None = setting(None, ours=True)
    """Directory for plan, metrics, measured timeline, settings and library versions of the run;
    merak-report shows it as a page."""
    curve: str | None = setting(None, ours=True)
    """Draw the loss curve into this PNG file."""
