"""Checks for contradictory settings. Each raises ConfigError and names the nearest values that
work.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ConfigError
from .optimizer import OptimizerConfig
from .parallel import A2A, A2A_P2P, COMPILES_NOTHING, P2P, UNFLUSHED, ParallelConfig
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


def has_effect(metadata: Mapping[str, Any], section: Section) -> bool:
    """Whether other settings of a section let one with this ``metadata`` have an effect."""
    needs = metadata.get("needs", ())
    each = needs if isinstance(needs, tuple) else (needs,)
    return all(need.missing(getattr(section, need.name)) is None for need in each)


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
    of the MLP, or of each expert and of the shared one.

    whole_experts: whether no expert is sharded.
    """
    extents = [model.num_attention_heads, model.query_groups]
    if model.moe_shared_expert_intermediate_size is not None:
        extents.append(model.moe_shared_expert_intermediate_size)
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
    elif groups % size:
        reason = f"does not divide --num-query-groups {groups}"
    else:
        width = model.moe_shared_expert_intermediate_size
        reason = f"does not divide --moe-shared-expert-intermediate-size {width}"
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
        "num_distributed_optimizer_instances",
        "data_parallel_strategy",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "offload_model_states",
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
    if parallel.recomputes_activations and method not in (None, "capacity"):
        reason = "it chooses entire layers, and --recompute-granularity selective recomputes none"
        remedy = "Use --recompute-granularity full, or --recompute-method capacity"
        raise ConfigError("--recompute-method", method, reason, remedy)


def check_compiled(parallel: ParallelConfig) -> None:
    """Refuse to compile the GPT of flags."""
    if parallel.compile_pointwise:
        raise ConfigError("--compile-pointwise", True, *COMPILES_NOTHING)


def check_offloading(parallel: ParallelConfig) -> None:
    """Check that it is clear which activations are offloaded, and that they can be."""
    layers = parallel.cpu_offloading_num_layers
    if not layers and not parallel.cpu_offloading:
        return
    flag = "--cpu-offloading-num-layers" if layers else "--cpu-offloading"
    value = layers or "(given)"
    if (schedule := parallel.pipeline_schedule) in UNFLUSHED:
        reason = f"{schedule} changes weights while activations wait for their backward"
        raise ConfigError(flag, value, reason, "Leave it out, or use another schedule")
    whole = parallel.recompute_granularity == "full"
    method = parallel.recompute_method
    if layers and method in ("stage-aware", "capacity"):
        reason = f"--recompute-method {method} chooses among all layers what is recomputed"
        remedy = "Use uniform or block, or capacity with --cpu-offloading alone"
        raise ConfigError(flag, value, reason, remedy)
    if not layers and whole and method != "capacity":
        reason = "it offloads what does not fit, and --recompute-granularity full recomputes all"
        remedy = "Add --recompute-method capacity, or give --cpu-offloading-num-layers"
        raise ConfigError(flag, value, reason, remedy)


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
    if model.swiglu and not model.disable_bias_linear:
        raise ConfigError(
            "--recompute-granularity",
            "selective",
            "the activation of SwiGLU with biases is not recomputed by itself",
            "Add --disable-bias-linear, or use full",
        )


def refused_halves(whole: str) -> ConfigError:
    """Return the error for halves of a micro-batch whose samples are not computed apart.

    whole: what is of whole micro-batches.
    """
    reason = f"{whole} are of whole micro-batches"
    return ConfigError("--tp-comm-overlap", "sub-pipeline", reason, "Use pair, or weight-gradient")


def check_room(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse room for rows of experts if a model has none, whatever a search may choose."""
    room = parallel.moe_expert_rank_capacity_factor
    if model.num_experts is None and room is not None:
        reason = "has an effect on rows of experts, and the model has none"
        remedy = "Leave it out, or add --num-experts and --expert-model-parallel-size"
        raise ConfigError("--moe-expert-rank-capacity-factor", room, reason, remedy)


def check_divided_experts(
    model: ModelConfig, parallel: ParallelConfig, copies: int | None = None
) -> None:
    """Check that ranks that are to divide experts, or to shard each, can.

    copies: ranks with the same weights of a layer; None: their number is not known.
    """
    size = parallel.expert_model_parallel_size
    shards = parallel.expert_shards
    if size * shards == 1:
        check_room(model, parallel)
        return
    flag = "--expert-model-parallel-size"
    of_shards = "--expert-tensor-parallel-size"
    if model.num_experts is None:
        remedy = "Add --num-experts, or leave it out"
        given = (flag, size) if size > 1 else (of_shards, shards)
        raise ConfigError(*given, "the model has no experts", remedy)
    ranks = parallel.tensor_model_parallel_size
    if model.num_experts % size:
        reason = f"does not divide --num-experts {model.num_experts}"
        if copies is None:
            remedy = f"Use {closest(size, divisors(model.num_experts))}"
        else:
            remedy = _other_experts(size, ranks, copies, shards, model.num_experts)
        raise ConfigError(flag, size, reason, remedy)
    if model.expert_ffn_size % shards:
        reason = f"does not divide the expert width {model.expert_ffn_size}"
        fitting = divisors(model.expert_ffn_size)
        if copies is not None:
            fitting = [each for each in fitting if _divide_experts(size * each, ranks, copies)]
        near = closest(shards, [each for each in fitting if each * size > 1])
        raise ConfigError(of_shards, shards, reason, f"Use {near}" if near else "Leave it out")


def _divide_experts(together: int, ranks: int, copies: int) -> bool:
    """Whether so many ranks have all experts of a layer together; see ``refused_experts``."""
    return together % ranks == 0 and copies % (together // ranks) == 0


def _other_experts(experts: int, ranks: int, copies: int, shards: int, of: int | None) -> str:
    """Return what to use in place of a degree of experts; see ``refused_experts``."""
    together = [ranks * several for several in divisors(copies)]
    sizes = [size // shards for size in together if size % shards == 0 and size > 1]
    if near := closest(experts, [size for size in sizes if of is None or of % size == 0]):
        return f"Use {near}"
    return "Leave it out" if shards == 1 else "Leave --expert-tensor-parallel-size out"


def refused_experts(
    experts: int, ranks: int, copies: int, shards: int = 1, of: int | None = None
) -> tuple[str, str] | None:
    """Return why the experts of a layer cannot be divided over so many ranks, and the remedy; None
    if they can. Without experts that are divided it is of the number of shards.

    experts: parts that they are to be divided into.
    ranks:   tensor-parallel ranks of the layer.
    copies:  ranks with the same weights of the layer, as replicas and contexts have.
    shards:  ranks that shard each expert.
    of:      experts that the layer has; None: not known.
    """
    if experts * shards == 1 or _divide_experts(experts * shards, ranks, copies):
        return None
    if ranks * copies == 1:
        return "no two ranks have the same layer", "Leave it out, or use more ranks"
    if experts == 1:
        what = "each expert is"
    else:
        what = "experts are" if shards == 1 else f"experts, over {shards} ranks each, are"
    if ranks == 1:
        where = f"divided over some of the {copies} ranks that have the same layer"
    elif copies == 1:
        where = f"divided over the {ranks} tensor-parallel ranks of their layer"
    else:
        where = (
            f"divided over the {ranks} tensor-parallel ranks of a layer, in some of its "
            f"{copies} copies"
        )
    if experts == 1:
        remedy = _other_experts(shards, ranks, copies, 1, None)
    else:
        remedy = _other_experts(experts, ranks, copies, shards, of)
    return f"{what} {where}", remedy


def check_experts(parallel: ParallelConfig, copies: int, of: int | None = None) -> None:
    """Check the two degrees of experts against those of layers.

    copies: ranks with the same weights of a layer.
    of:     experts that a layer has; None: not known.
    """
    experts = parallel.expert_model_parallel_size
    shards = parallel.expert_shards
    ranks = parallel.tensor_model_parallel_size
    together = parallel.expert_ranks
    if together == 1:
        searched = parallel.parallel is not None  # degrees of experts too
        if parallel.moe_expert_rank_capacity_factor is not None and not searched:
            reason = "has an effect on rows that ranks exchange, and none divide experts"
            raise ConfigError(
                "--moe-expert-rank-capacity-factor",
                parallel.moe_expert_rank_capacity_factor,
                reason,
                "Leave it out, or add --expert-model-parallel-size",
            )
        if parallel.expert_tensor_parallel_size not in (None, ranks):
            reason = (
                f"without expert parallelism experts are sharded over all {ranks} ranks of a layer"
            )
            remedy = f"Leave it out, or add --expert-model-parallel-size {ranks}"
            raise ConfigError("--expert-tensor-parallel-size", 1, reason, remedy)
        return
    if refused := refused_experts(experts, ranks, copies, shards, of):
        if experts == 1:
            raise ConfigError("--expert-tensor-parallel-size", shards, *refused)
        raise ConfigError("--expert-model-parallel-size", experts, *refused)
    if parallel.expert_group > 1 and parallel.served:
        reason = "workers of parameter servers exchange no rows of tokens"
        if shards > 1:
            raise ConfigError("--expert-tensor-parallel-size", shards, reason, "Leave it out")
        raise ConfigError("--expert-model-parallel-size", experts, reason, f"Use at most {ranks}")
    if together > ranks and parallel.num_distributed_optimizer_instances > 1:
        reason = f"has an effect on weights that all copies of a layer have, and {together} ranks divide its experts"
        raise ConfigError(
            "--num-distributed-optimizer-instances",
            parallel.num_distributed_optimizer_instances,
            reason,
            f"Leave it 1, or use --expert-model-parallel-size {ranks}",
        )
    if ranks > 1 and not parallel.sequence_parallel:
        flag = "--expert-model-parallel-size" if experts > 1 else "--expert-tensor-parallel-size"
        reason = f"is needed with {flag} {experts if experts > 1 else shards}, so that ranks have tokens of their own"
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
    if parallel.cp_comm_type == A2A_P2P and size > 1:
        _check_hierarchy(parallel.hierarchical_context_parallel_sizes, size)


def _check_hierarchy(sizes: tuple[str, ...], ranks: int) -> None:
    """Check the sizes of the two levels of a hierarchy of context-parallel ranks."""
    flag = "--hierarchical-context-parallel-sizes"
    possible = [f"{inner} {ranks // inner}" for inner in divisors(ranks)[1:-1]]
    remedy = f"Use {' or '.join(possible)}" if possible else f"Use --cp-comm-type {P2P} or {A2A}"
    if not sizes:
        reason = f"nothing says how many of the {ranks} context-parallel ranks exchange heads"
        add = f"Add {flag} {' or '.join(possible)}" if possible else remedy
        raise ConfigError("--cp-comm-type", A2A_P2P, reason, add)
    given = " ".join(sizes)
    if len(sizes) != 2 or not all(re.fullmatch("[0-9]{1,6}", size) for size in sizes):
        reason = (
            "these are not two numbers, of neighbours that exchange heads and of groups of these"
        )
        raise ConfigError(flag, given, reason, remedy)
    inner, outer = map(int, sizes)
    if inner * outer != ranks:
        reason = f"their product is {inner * outer}, and --context-parallel-size is {ranks}"
        raise ConfigError(flag, given, reason, remedy)
    if 1 in (inner, outer):
        alone = P2P if inner == 1 else A2A
        reason = f"with one of them 1 ranks do what --cp-comm-type {alone} does"
        raise ConfigError(flag, given, reason, f"Use --cp-comm-type {alone}, without sizes")


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
