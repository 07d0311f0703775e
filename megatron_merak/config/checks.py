"""Checks for contradictory settings. Each raises ConfigError and names the nearest values that
work.
"""

import dataclasses
from collections.abc import Iterable

from ..errors import ConfigError
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .sections import CheckpointConfig, DataConfig, ModelConfig, TrainConfig
from .settings import Section, flag_name
from .tokenizers import check_given, check_needed


def closest(value: int, candidates: Iterable[int]) -> str:
    """Return the nearest candidate below and the nearest above ``value``, as "4 or 8"."""
    candidates = sorted(candidates)
    below = [c for c in candidates if c < value]
    above = [c for c in candidates if c > value]
    return " or ".join(str(c) for c in below[-1:] + above[:1])


def multiples(value: int, step: int) -> str:
    """Return the positive multiples of ``step`` around ``value``, as "4 or 8"."""
    below = value // step * step
    return closest(value, [m for m in (below, below + step) if m > 0])


def divisors(value: int) -> list[int]:
    return [d for d in range(1, value + 1) if value % d == 0]


def degrees(value: int, fitting: Iterable[int], most: int | None) -> str:
    """Return what to use in place of a degree: the nearest that divide ``most``, and beside them
    nearer ones that do not.

    most: what the ranks of the job leave for it; None: the number of ranks is not known, or no
          degree divides it.
    """
    fitting = list(fitting)
    here = [each for each in fitting if most is not None and most % each == 0]
    near = closest(value, fitting)
    others = [each for each in near.split(" or ") if int(each) not in here]
    if not here or not others:
        return f"Use {near}"
    return f"Use {closest(value, here)}, or {' or '.join(others)} on another number of ranks"


def left(ranks: int, others: int) -> int | None:
    """Return what a number of ranks leaves for a degree beside the product of the others; None: it
    is not a multiple of theirs.
    """
    return ranks // others if ranks > 0 and ranks % others == 0 else None


def check_needs(section: Section) -> None:
    """Raise ConfigError for a setting that has no effect as long as another one is what it is; see
    ``Needs``.
    """
    for row in dataclasses.fields(section):
        value = getattr(section, row.name)
        needs = row.metadata.get("needs", ())
        for each in needs if isinstance(needs, tuple) else (needs,):
            words = each.missing(getattr(section, each.name))
            if value != row.default and words is not None:
                raise ConfigError(flag_name(row.name), value, *words)


def check_model(model: ModelConfig) -> None:
    check_needs(model)
    check_routed(model)
    heads = model.num_attention_heads
    groups = model.num_query_groups
    hidden = model.hidden_size
    if model.kv_channels is None and hidden % heads:
        raise ConfigError(
            "--hidden-size",
            hidden,
            f"is not a multiple of --num-attention-heads {heads}",
            f"Use {multiples(hidden, heads)}, or give --kv-channels",
        )
    if heads % model.query_groups:
        raise ConfigError(
            "--num-query-groups",
            groups,
            f"does not divide --num-attention-heads {heads}",
            f"Use {closest(groups, divisors(heads))}",
        )
    if _inner(model) == 0:
        raise ConfigError(
            "--hidden-size", hidden, "gives --swiglu an MLP of width 0", "Give --ffn-hidden-size"
        )
    if model.seq_length > model.max_positions:
        raise ConfigError(
            "--seq-length",
            model.seq_length,
            f"exceeds --max-position-embeddings {model.max_positions}",
            f"Use at most {model.max_positions}, or raise --max-position-embeddings",
        )
    if model.position_embedding_type == "rope" and (model.rotary_dim < 2 or model.rotary_dim % 2):
        raise ConfigError(
            "--rotary-percent",
            model.rotary_percent,
            f"rotates {model.rotary_dim} of a head's {model.head_dim} channels, an odd number or "
            "none",
            "Change it, --kv-channels or --num-attention-heads",
        )


def check_routed(model: ModelConfig) -> None:
    """Check the shape of a model with routed experts."""
    experts = model.num_experts
    if experts is None:
        return
    if not model.swiglu:
        reason = "is needed with --num-experts: experts are gated"
        raise ConfigError("--swiglu", "off", reason, "Add it")
    if not model.disable_bias_linear:
        reason = "is needed with --num-experts: experts have no biases"
        raise ConfigError("--disable-bias-linear", "off", reason, "Add it")
    if model.moe_router_topk > experts:
        reason = f"is more than --num-experts {experts}"
        raise ConfigError(
            "--moe-router-topk", model.moe_router_topk, reason, f"Use at most {experts}"
        )
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        reason = "the weight of a token's one expert is 1, from which its router learns nothing"
        raise ConfigError("--moe-router-topk", 1, reason, "Add --moe-router-pre-softmax")


def check_rows_of_experts(model: ModelConfig, train: TrainConfig) -> None:
    """Check that a product of all experts in bf16 has rows of whole 16 bytes, as torch wants them."""
    if model.num_experts is None or not train.bf16:
        return
    flag = "--ffn-hidden-size" if model.moe_ffn_hidden_size is None else "--moe-ffn-hidden-size"
    for name, width in (("--hidden-size", model.hidden_size), (flag, model.expert_ffn_size)):
        if width % 8:
            reason = "is not a multiple of 8, which the products of experts in bf16 need"
            raise ConfigError(name, width, reason, f"Use {multiples(width, 8)}")


def tensor_parallel_fits(model: ModelConfig, size: int, whole_experts: bool = False) -> bool:
    """Whether ``size`` ranks can shard a layer evenly: query heads, key-value heads and the width
    of the MLP, or of each expert.

    whole_experts: whether no expert is sharded.
    """
    extents = [model.num_attention_heads, model.query_groups]
    if not whole_experts:
        extents.append(_inner(model))
    return all(extent % size == 0 for extent in extents)


def _inner(model: ModelConfig) -> int:
    """Return the width of the MLP, or of each expert."""
    return model.ffn_size if model.num_experts is None else model.expert_ffn_size


def check_tensor_parallel(
    model: ModelConfig, size: int, most: int | None = None, whole_experts: bool = False
) -> None:
    """Raise ConfigError for a degree that the model's layers cannot be sharded by.

    most:          see ``degrees``.
    whole_experts: see ``tensor_parallel_fits``.
    """
    if tensor_parallel_fits(model, size, whole_experts):
        return
    heads = model.num_attention_heads
    groups = model.query_groups
    if heads % size:
        reason = f"does not divide --num-attention-heads {heads}"
    elif _inner(model) % size and not whole_experts:
        of = "MLP" if model.num_experts is None else "expert"
        reason = f"does not divide the {of} width {_inner(model)}"
    else:
        reason = f"does not divide --num-query-groups {groups}"
    fitting = (d for d in divisors(heads) if tensor_parallel_fits(model, d, whole_experts))
    remedy = degrees(size, fitting, most)
    raise ConfigError("--tensor-model-parallel-size", size, reason, remedy)


def check_sequence_parallel(length: int, most: int | None, parallel: ParallelConfig) -> None:
    """Check the flag; with one tensor-parallel rank it has no effect, as in Megatron-LM, which is
    reported.

    most: positions that the model has; None: not known.
    """
    size = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and length % size:
        fitting = [m for m in (length // size * size, -(-length // size) * size) if m > 0]
        if most is not None:
            fitting = [m for m in fitting if m <= most]
        use = f"Use {closest(length, fitting)}, or leave" if fitting else "Leave"
        raise ConfigError(
            "--seq-length",
            length,
            f"is not a multiple of --tensor-model-parallel-size {size}, and --sequence-parallel "
            "divides it",
            f"{use} --sequence-parallel out",
        )


def check_pipeline(model: ModelConfig, size: int, most: int | None = None) -> None:
    """Raise ConfigError for more stages than the model has units. most: see ``degrees``."""
    if size > model.num_layers + 2:
        fitting = range(1, model.num_layers + 3)
        raise ConfigError(
            "--pipeline-model-parallel-size",
            size,
            f"is more stages than the {model.num_layers + 2} units (embedding, "
            f"{model.num_layers} layers, output head)",
            degrees(size, fitting, most),
        )


def check_schedule(parallel: ParallelConfig) -> None:
    """Refuse flags of schedule builders beside a schedule file."""
    if parallel.schedule_file is None:
        return
    for name in (
        "pipeline_schedule",
        "num_virtual_stages_per_pipeline_rank",
        "microbatch_group_size_per_virtual_pipeline_stage",
    ):
        if (value := getattr(parallel, name)) is not None:
            reason = (
                f"contradicts --schedule-file {parallel.schedule_file}, which contains the "
                "complete schedule"
            )
            raise ConfigError(flag_name(name), value, reason, "Give only one of them")


def check_searched(parallel: ParallelConfig, train: TrainConfig) -> None:
    """Refuse what no search of a plan tries."""
    for name in (
        "plan",
        "schedule_file",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "data_parallel_strategy",
    ):
        value = getattr(parallel, name)
        if value != getattr(ParallelConfig, name):
            raise ConfigError(flag_name(name), value, "no search tries it", "Leave it out")
    sized = train.global_batch_size is not None or train.step_batch_size_schedule is not None
    if not sized or train.decrease_batch_size_if_needed:
        flag = "--decrease-batch-size-if-needed" if sized else "--global-batch-size"
        value = "(given)" if sized else "(missing)"
        reason = "a search compares layouts of one batch"
        raise ConfigError(flag, value, reason, "Leave it out" if sized else "Give it")


def check_recompute(parallel: ParallelConfig) -> None:
    method = parallel.recompute_method
    if method in ("uniform", "block") and parallel.recompute_num_layers is None:
        reason = f"is needed with --recompute-method {method}"
        raise ConfigError("--recompute-num-layers", "(missing)", reason, "Give a number of layers")


def check_ranks(parallel: ParallelConfig, world_size: int) -> None:
    replica = parallel.ranks_of_replica
    if world_size < 1 or world_size % replica:
        degrees = {
            "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
            "--context-parallel-size": parallel.context_parallel_size,
            "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        }
        if parallel.context_parallel_size == 1:
            del degrees["--context-parallel-size"]
        product = " x ".join(f"{flag} {size}" for flag, size in degrees.items())
        raise ConfigError(
            "the number of ranks",
            world_size,
            f"is not a multiple of {product} = {replica}",
            f"Start {multiples(world_size, replica)} ranks, or change the degrees",
        )


def check_recomputed_activations(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the feed-forward part of the GPT has an activation that is recomputed alone."""
    if not parallel.recomputes_activations:
        return
    if model.num_experts is not None:
        reason = "the activations of experts are not recomputed by themselves"
        raise ConfigError("--recompute-granularity", "selective", reason, "Use full")
    if model.swiglu and not model.disable_bias_linear:
        raise ConfigError(
            "--recompute-granularity",
            "selective",
            "the activation of SwiGLU with biases is not recomputed by itself",
            "Add --disable-bias-linear, or use full",
        )


def check_divided_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that ranks that are to divide experts can."""
    size = parallel.expert_model_parallel_size
    if size == 1:
        return
    flag = "--expert-model-parallel-size"
    if model.num_experts is None:
        remedy = "Add --num-experts, or leave it out"
        raise ConfigError(flag, size, "the model has no experts", remedy)
    if model.num_experts % size:
        reason = f"does not divide --num-experts {model.num_experts}"
        remedy = f"Use {closest(size, divisors(model.num_experts))}"
        raise ConfigError(flag, size, reason, remedy)


def refused_experts(experts: int, ranks: int, copies: int) -> tuple[str, str] | None:
    """Return why the experts of a layer cannot be divided over so many ranks, and the remedy; None
    if they can.

    experts: ranks that are to divide them.
    ranks:   tensor-parallel ranks of the layer.
    copies:  ranks with the same weights of the layer, as replicas and contexts have.
    """
    if experts == 1 or experts % ranks == 0 and copies % (experts // ranks) == 0:
        return None
    sizes = [1, *(ranks * several for several in divisors(copies) if ranks * several > 1)]
    if sizes == [1]:
        return "no two ranks have the same layer", "Leave it out, or use more ranks"
    if ranks == 1:
        reason = f"experts are divided over some of the {copies} ranks that have the same layer"
    elif copies == 1:
        reason = f"experts are divided over the {ranks} tensor-parallel ranks of their layer"
    else:
        reason = (
            f"experts are divided over the {ranks} tensor-parallel ranks of a layer, in some of its "
            f"{copies} copies"
        )
    return reason, f"Use {closest(experts, sizes)}"


def check_experts(parallel: ParallelConfig, copies: int) -> None:
    """Check the two degrees of experts against those of layers.

    copies: ranks with the same weights of a layer.
    """
    experts = parallel.expert_model_parallel_size
    shards = parallel.expert_tensor_parallel_size
    ranks = parallel.tensor_model_parallel_size
    if experts == 1:
        if shards not in (None, ranks):
            reason = (
                f"without expert parallelism experts are sharded over all {ranks} ranks of a layer"
            )
            remedy = f"Leave it out, or add --expert-model-parallel-size {ranks}"
            raise ConfigError("--expert-tensor-parallel-size", shards, reason, remedy)
        return
    if refused := refused_experts(experts, ranks, copies):
        raise ConfigError("--expert-model-parallel-size", experts, *refused)
    if experts > ranks and parallel.served:
        reason = "workers of parameter servers exchange no rows of tokens"
        raise ConfigError("--expert-model-parallel-size", experts, reason, f"Use at most {ranks}")
    if experts > ranks and parallel.num_distributed_optimizer_instances > 1:
        reason = f"has an effect on weights that all copies of a layer have, and {experts} ranks divide its experts"
        raise ConfigError(
            "--num-distributed-optimizer-instances",
            parallel.num_distributed_optimizer_instances,
            reason,
            f"Leave it 1, or use --expert-model-parallel-size {ranks}",
        )
    if shards not in (None, 1):
        reason = f"with --expert-model-parallel-size {experts} no expert is sharded"
        raise ConfigError("--expert-tensor-parallel-size", shards, reason, "Set it to 1")
    if ranks > 1 and not parallel.sequence_parallel:
        reason = f"is needed with --expert-model-parallel-size {experts}, so that ranks have tokens of their own"
        raise ConfigError("--sequence-parallel", False, reason, "Add it")


def check_context_parallel(parallel: ParallelConfig) -> None:
    """Check what context parallelism can be combined with."""
    size = parallel.context_parallel_size
    if size > 1 and parallel.served:
        reason = (
            f"--data-parallel-strategy {parallel.data_parallel_strategy} does not divide sequences"
        )
        remedy = "Leave one of them out"
        raise ConfigError("--context-parallel-size", size, reason, remedy)


def check_sharding(parallel: ParallelConfig) -> None:
    """Check the two flags for sharding, which may both be set if they agree."""
    if parallel.use_distributed_optimizer and parallel.sharding == "no_shard":
        reason = "contradicts --use-distributed-optimizer, which shards the optimizer's state"
        raise ConfigError(
            "--data-parallel-sharding-strategy",
            "no_shard",
            reason,
            "Leave one of them out, or use optim",
        )


def check_precision(train: TrainConfig) -> None:
    if train.fp16 and train.bf16:
        raise ConfigError(
            "--fp16", True, "contradicts --bf16", "Give only one of them; a --plan decides it"
        )
    check_needs(train)
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        value = getattr(train, name)
        if train.loss_scale and value != getattr(TrainConfig, name):
            reason = f"has no effect with --loss-scale {train.loss_scale}, which is fixed"
            raise ConfigError(flag_name(name), value, reason, "Leave one of them out")
    if train.min_loss_scale > train.initial_loss_scale:
        reason = f"exceeds --initial-loss-scale {train.initial_loss_scale}"
        remedy = f"Use at most {train.initial_loss_scale}"
        raise ConfigError("--min-loss-scale", train.min_loss_scale, reason, remedy)


def check_optimizer(optimizer: OptimizerConfig, train: TrainConfig) -> None:
    if train.skip_train:
        return
    if train.train_iters is None and train.train_samples is None:
        remedy = "Give it, --train-samples or --skip-train"
        raise ConfigError("--train-iters", "(missing)", "is needed to train", remedy)
    if optimizer.lr is None:
        raise ConfigError(
            "--lr",
            "(missing)",
            "is needed to train",
            "Give the peak learning rate, or --skip-train",
        )
    for name in ("min_lr", "lr_warmup_init"):
        if (value := getattr(optimizer, name)) is not None and value > optimizer.lr:
            raise ConfigError(
                flag_name(name),
                value,
                f"exceeds --lr {optimizer.lr}",
                f"Use at most {optimizer.lr}",
            )
    floor = "min_lr" if optimizer.decoupled_min_lr is None else "decoupled_min_lr"
    for name in (floor, "lr_warmup_init"):
        value = getattr(optimizer, name)
        peak = optimizer.decoupled_lr
        if None not in (value, peak) and value > peak:
            raise ConfigError(
                flag_name(name), value, f"exceeds --decoupled-lr {peak}", f"Use at most {peak}"
            )
    unit, other = ("iters", "samples") if train.train_samples is None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(optimizer, f"{name}_{other}"):
            reason = f"is not in the unit of --train-{unit}"
            raise ConfigError(
                flag_name(f"{name}_{other}"), value, reason, f"Give {flag_name(f'{name}_{unit}')}"
            )
    check_needs(optimizer)
    _check_decay(optimizer, optimizer.decay or train.train_samples or train.train_iters or 0, unit)
    _check_weight_decay(optimizer)


def _check_decay(optimizer: OptimizerConfig, decay: int, unit: str) -> None:
    """Check the end of the decay, in ``unit``."""
    warmup = optimizer.warmup
    anneal = optimizer.anneal
    word = "iterations" if unit == "iters" else unit
    if warmup and optimizer.lr_warmup_fraction is not None:
        raise ConfigError(
            "--lr-warmup-fraction",
            optimizer.lr_warmup_fraction,
            f"contradicts --lr-warmup-{unit}",
            "Give only one of them",
        )
    if warmup >= decay:
        raise ConfigError(
            f"--lr-warmup-{unit}",
            warmup,
            f"leaves nothing of the {decay} decay {word}",
            f"Use at most {decay - 1}, or raise --lr-decay-{unit}",
        )
    flag = f"--lr-wsd-decay-{unit}"
    if optimizer.lr_decay_style != "WSD":
        return
    if anneal is None:
        remedy = "Give the length of the final decay"
        raise ConfigError(flag, "(missing)", "is needed with --lr-decay-style WSD", remedy)
    if anneal > decay:
        raise ConfigError(flag, anneal, f"exceeds the {decay} decay {word}", f"Use at most {decay}")


def _check_weight_decay(optimizer: OptimizerConfig) -> None:
    style = optimizer.weight_decay_incr_style
    start = optimizer.start_weight_decay
    end = optimizer.end_weight_decay
    for name, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
        if style != "constant" and value is None:
            raise ConfigError(
                name, "(missing)", f"is needed with --weight-decay-incr-style {style}", "Give it"
            )
    if start is not None and end is not None and end < start:
        raise ConfigError(
            "--end-weight-decay",
            end,
            f"is below --start-weight-decay {start}",
            f"Use at least {start}",
        )


def check_data(data: DataConfig, model: ModelConfig, streams: bool) -> None:
    check_sources(data, streams)
    _check_tokenizer(data, model)


def check_conversations(data: DataConfig, train: TrainConfig) -> None:
    """Check a run on conversations (--sft). Raises ConfigError."""
    if data.eod_mask_loss:
        reason = "the targets of conversations are the tokens of the assistant"
        raise ConfigError("--eod-mask-loss", "on", reason, "Leave it out")
    if not train.calculate_per_token_loss:
        reason = "micro-batches of conversations have unequal numbers of targets"
        raise ConfigError("--sft", "on", reason, "Add --calculate-per-token-loss")


def check_sources(data: DataConfig, streams: bool) -> None:
    """Check where samples come from. streams: whether those of training are not in ``data``. Raises
    ConfigError.
    """
    parts = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    alone = {
        "--data-path": bool(data.data_path),
        "--data-args-path": data.data_args_path is not None,
        "--per-split-data-args-path": data.per_split_data_args_path is not None,
        "--mock-data": data.mock_data,
    }
    sources = [flag for flag, given in alone.items() if given]
    sources += [flag for flag, paths in parts.items() if paths]
    if not sources and not streams:
        raise ConfigError(
            "--data-path",
            "(missing)",
            "there is no data to train on",
            "Give --data-path, --train-data-path, --stream-path or --mock-data",
        )
    if len(sources) > 1 and any(alone.values()):
        raise ConfigError(
            sources[0],
            "(given)",
            f"contradicts {', '.join(sources[1:])}",
            "Give only one source of data",
        )
    if data.by_part and data.split != type(data).split:
        raise ConfigError(
            "--split",
            repr(data.split),
            "has no effect on data given part by part",
            "Leave it out, or use --data-path",
        )
    if not any(data.split_weights):
        raise ConfigError(
            "--split", repr(data.split), "gives every part weight 0", "Write it like '969, 30, 1'"
        )


def _check_tokenizer(data: DataConfig, model: ModelConfig) -> None:
    kind = data.tokenizer
    check_given(kind, data.tokenizer_files)
    if kind is not None:
        check_needed(kind, {**data.tokenizer_files, "--vocab-size": model.vocab_size})
    elif not (data.mock_data and model.vocab_size is not None):
        remedy = "Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer"
        remedy += " with --vocab-size" if model.vocab_size is None else ""
        reason = "is needed to know the vocabulary"
        raise ConfigError("--tokenizer-type", "(missing)", reason, remedy)


def check_tokenizer_files(data: DataConfig) -> None:
    """Check the tokenizer of a run whose model's directory has one, and knows its vocabulary."""
    kind = data.tokenizer
    check_given(kind, data.tokenizer_files)
    if kind is not None and kind not in ("HuggingFaceTokenizer", "NullTokenizer"):
        check_needed(kind, data.tokenizer_files)


def check_checkpoint(checkpoint: CheckpointConfig, parallel: ParallelConfig) -> None:
    check_needs(checkpoint)
    if checkpoint.async_save and parallel.distributed_backend == "mpi":
        reason = "its thread needs a group of its own, and --distributed-backend mpi has one of all ranks"
        raise ConfigError("--async-save", True, reason, "Leave it out, or use gloo")
    if checkpoint.save_increment_interval is not None:
        _check_increments(checkpoint, parallel)
    if checkpoint.use_checkpoint_opt_param_scheduler and checkpoint.override_opt_param_scheduler:
        reason = "contradicts --override-opt-param-scheduler"
        raise ConfigError("--use-checkpoint-opt-param-scheduler", True, reason, "Give one of them")
    interval = checkpoint.save_interval
    retain = checkpoint.save_retain_interval
    if retain is not None and (interval is None or retain % interval):
        remedy = (
            "Give --save-interval" if interval is None else f"Use {multiples(retain, interval)}"
        )
        raise ConfigError(
            "--save-retain-interval",
            retain,
            f"is not a multiple of --save-interval {interval}",
            remedy,
        )


def _check_increments(checkpoint: CheckpointConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError where the steps between checkpoints cannot be written."""
    flag = "--save-increment-interval"
    interval = checkpoint.save_increment_interval
    if parallel.distributed_backend == "mpi":
        reason = "its thread needs a group of its own, and --distributed-backend mpi has one of all ranks"
        raise ConfigError(flag, interval, reason, "Leave it out, or use gloo")
    if checkpoint.no_save_optim:
        reason = "steps are repeated on the optimizer's state, which --no-save-optim leaves out"
        raise ConfigError(flag, interval, reason, "Give one of them")
    if checkpoint.save_interval is None:
        reason = "increments take space until the next checkpoint, and without --save-interval there is none"
        raise ConfigError(flag, interval, reason, "Give --save-interval")
    if interval is not None and interval >= checkpoint.save_interval:
        reason = f"is not less than --save-interval {checkpoint.save_interval}: each checkpoint comes first"
        raise ConfigError(flag, interval, reason, "Give a smaller one, such as a tenth")
