"""Makes a `Plan` from a chain of units, or from the flags of a GPT."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_merak.cluster import CLUSTERS, GIB, Cluster, reserving
from megatron_merak.config import Config
from megatron_merak.config.checks import refused_halves
from megatron_merak.config.fp8 import Fp8
from megatron_merak.config.table import taken
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.search.placement import placements
from megatron_merak.plan import (
    DTYPE_BYTES,
    LAYERS,
    Plan,
    StagePlan,
    TensorSharding,
    Unit,
    refused_together,
)
from megatron_merak.plan.replicas import check_instances
from megatron_merak.planner.automatic import AUTO, REFERENCE, Automatic, starts
from megatron_merak.planner.cost import gpt_units
from megatron_merak.planner.layout import StageLayouts
from megatron_merak.planner.offload import NOTHING
from megatron_merak.planner.predict import priced
from megatron_merak.planner.recompute import check_layers, check_limit
from megatron_merak.planner.request import Request, request_of
from megatron_merak.planner.tables import by_family
from megatron_merak.planner.written import FLAG, is_paired, written

ProgressCallback = Callable[[float], object]  # called with the finished share of a search, 0 to 1


def plan(
    config: Config,
    world_size: int,
    cluster: Cluster = CLUSTERS["cpu"],
    report_progress: ProgressCallback = lambda share: None,
) -> Plan:
    """Return the plan of the GPT of flags with the degrees and schedule of ``config``, cut into
    stages by cost.

    cluster:         where it runs, see ``cluster.find_cluster``.
    report_progress: called with the finished share of a search, 0 to 1.

    Raises ConfigError for degrees and sizes that do not fit ``world_size``, PlanError for more
    stages than units or too little memory, ScheduleError for a schedule that is not defined for
    these numbers of ranks and micro-batches.
    """
    config.validate(world_size, training=False)
    request = replace(
        request_of(config, world_size),
        graph_sharding=LAYERS,
        fp32_residual=config.model.fp32_residual_connection,
    )
    units = gpt_chain(config, request.grid.tp, cluster)
    return plan_chain(units, request, cluster, report_progress=report_progress)


def gpt_chain(config: Config, tp: int, cluster: Cluster) -> tuple[Unit, ...]:
    """Return the chain of the GPT of flags on one of ``tp`` ranks of ``cluster``."""
    train = config.train
    bytes_per_value = DTYPE_BYTES[train.dtype]
    fused = cluster.device.fused_attention
    return gpt_units(
        config.model,
        train.micro_batch_size,
        bytes_per_value,
        tp,
        fused_dropout=fused,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute_activations=config.parallel.recomputes_activations,
    )


def plan_chain(
    units: Sequence[Unit],
    request: Request,
    cluster: Cluster = CLUSTERS["cpu"],
    *,
    shardings: tuple[TensorSharding, ...] = (),
    reasons: Iterable[tuple[str, str]] = (),
    frozen_bytes: float = 0.0,
    report_progress: ProgressCallback = lambda share: None,
) -> Plan:
    """Return the plan that runs a chain as requested: stages balanced by cost, each within the
    memory of a rank.

    The memory of a rank is ``--device-memory-gb`` or, if that is unset, what is usable of the
    device's without ``--memory-reserve-gb``; the latter is exceeded if no cut fits. Where nodes
    differ no rank uses more than is usable of its own device.

    cluster:         where it runs.
    shardings:       of all tensors.
    reasons:         (tensor, why it is sharded as it is).
    frozen_bytes:    see ``Plan``.
    report_progress: called with the finished share of a search, 0 to 1.

    Raises PlanError for contradictory settings and if no cut fits, ScheduleError as
    ``build_schedule`` does, and what ``written`` raises for a schedule file.
    """
    parallel = request.parallel
    grid = request.grid
    ops = request.schedule or written(parallel, request.microbatches)
    check_instances(parallel.num_distributed_optimizer_instances, grid.copies, parallel.sharding)
    units = tuple(units)
    cluster = reserving(cluster, parallel.memory_reserve_gb).used_by(grid.size)
    memory_gb = parallel.device_memory_gb
    limit = cluster.most_usable if memory_gb is None else memory_gb * GIB
    check_limit(request.recompute, limit, cluster.device_names, request.offload)
    check_layers(request.offload, units)
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    automatic = ops is None and parallel.pipeline_schedule == AUTO
    homes = placements(grid.pp, chunks, len(units)) if automatic else ()
    built = starts(homes, request.microbatches, group) if homes else (ops or _build(request),)
    custom = ops is not None
    _check_stages(built[0], len(units), custom)
    modes = _modes(request, built[0], custom)
    orders = [
        (mode, pair(each) if mode == "pair" and not custom else each)
        for mode in modes
        for each in built
    ]
    draft = replace(
        _draft(units, request, cluster, built[0]),
        shardings=shardings,
        reasons=by_family(reasons),
        frozen_bytes=frozen_bytes,
    )
    plans, errors = _plans(draft, orders, request, limit)
    best = (
        Automatic(plans, limit, homes, report_progress).choose() if automatic else _fastest(plans)
    )
    if best is None or (errors and not automatic):
        raise errors[0]
    return best


def _draft(units: tuple[Unit, ...], request: Request, cluster: Cluster, schedule: Schedule) -> Plan:
    """Return a plan as requested whose stages have equal numbers of units."""
    parallel = request.parallel
    draft = Plan(
        request.grid,
        units,
        stages=_even(schedule.stages, len(units)),
        schedule=schedule,
        micro_batch_size=request.micro_batch_size,
        sequence_length=request.sequence_length or 0,
        dtype=request.dtype,
        cluster=cluster,
        sequence_parallel=parallel.sequence_parallel and request.grid.tp > 1,
        bucket_size=request.bucket_size,
        sharding=parallel.sharding,
        loss_chunk=request.loss_chunk,
        recompute_activations=parallel.recomputes_activations,
        graph_sharding=request.graph_sharding,
        fp32_residual=request.fp32_residual,
        state_bytes=request.state_bytes,
        **fields_of(request.fp8),
    )
    return replace(
        draft,
        **taken(parallel),
        cp_inner=parallel.cp_inner,
        expert_shards=parallel.expert_shards,
    )


def fields_of(fp8: Fp8 | None) -> dict[str, Any]:
    """Return the fields of a plan that say how linear layers compute in fp8."""
    if fp8 is None:
        return {}
    return {
        "fp8_format": fp8.format,
        "fp8_recipe": fp8.recipe,
        "bf16_layers": fp8.bf16_layers,
    }


def _plans(
    draft: Plan, orders: Iterable[tuple[str, Schedule]], request: Request, limit: float
) -> tuple[list[Plan], list[PlanError]]:
    """Return the priced plans of each overlap with a schedule, and the errors of those without a
    plan.
    """
    plans: list[Plan] = []
    errors: list[PlanError] = []
    memory_gb = request.parallel.device_memory_gb
    for mode, order in orders:
        stages = _even(order.stages, len(draft.units))
        try:
            own = replace(draft, stages=stages, schedule=order, overlap=mode)
            layouts = StageLayouts(own, request.recompute, limit, request.offload)
            plans += [priced(made, layouts.ledger) for made in layouts.plans(memory_gb)]
            if request.offload.automatic:
                plans += _without_offloading(own, request, limit)
        except PlanError as error:
            errors.append(error)
    return plans, errors


def _without_offloading(draft: Plan, request: Request, limit: float) -> list[Plan]:
    """Return the priced plans that fit without what the planner may offload."""
    layouts = StageLayouts(draft, request.recompute, limit, NOTHING)
    try:
        plans = layouts.plans(limit / GIB)
    except PlanError:
        return []
    return [priced(made, layouts.ledger) for made in plans]


def _even(stages: int, units: int) -> tuple[StagePlan, ...]:
    """Return stages of as equal numbers of units as possible."""
    bounds = [units * stage // stages for stage in range(stages + 1)]
    return tuple(StagePlan(first, last) for first, last in pairwise(bounds))


def _modes(request: Request, schedule: Schedule, custom: bool) -> tuple[str, ...]:
    """Return the overlaps to compare, the default first: it is used unless another one is faster.

    custom: whether the schedule was given as ops; then forwards and backwards are paired as in it.

    Raises PlanError for halves of one sample, and for an overlap that the sharding strategy does
    not support; ConfigError for halves of a micro-batch that is computed as a whole.
    """
    grid = request.grid
    parallel = request.parallel
    sharding = parallel.sharding
    requested = parallel.tp_comm_overlap if parallel.exchanges_in_layers else "weight-gradient"
    paired = custom and is_paired(schedule)
    on_host = parallel.offload_model_states
    if error := refused_together(sharding, grid.copies, requested, paired, on_host):
        raise error
    if requested == "sub-pipeline" and request.micro_batch_size == 1:
        reason = (
            "a micro-batch of one sample has no halves, as attention reads the whole of its "
            "sequence"
        )
        raise PlanError(
            "--tp-comm-overlap", requested, reason, "Use a micro-batch of 2 or more, or pair"
        )
    if requested == "sub-pipeline" and request.whole:
        raise refused_halves(request.whole)
    if requested != "auto":
        return (requested,)
    halvable = not request.whole and request.micro_batch_size > 1 and not paired
    halves = ("sub-pipeline",) if halvable else ()
    pairs = paired if custom else schedule.microbatches > 1
    modes = ("weight-gradient", "none", *halves, *(("pair",) if pairs else ()))
    return tuple(
        mode
        for mode in modes
        if refused_together(sharding, grid.copies, mode, on_host=on_host) is None
    )


def _fastest(plans: Sequence[Plan]) -> Plan | None:
    return min(plans, key=lambda plan: plan.predicted_time, default=None)


def _build(request: Request) -> Schedule:
    """Return the built-in schedule of the requested name."""
    parallel = request.parallel
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    name = parallel.pipeline_schedule or REFERENCE
    # there are fewer units than stages, for which `_check_stages` raises with any schedule
    if name == AUTO:
        name = "interleaved" if chunks and chunks > 1 else REFERENCE
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    return build_schedule(
        name,
        request.grid.pp,
        request.microbatches,
        chunks,
        group=group,
        every=parallel.pipeline_update_interval,
    )


def _check_stages(schedule: Schedule, units: int, custom: bool) -> None:
    """Raise PlanError for more stages than units."""
    stages = schedule.stages
    ranks = len(schedule.ranks)
    name = schedule.name
    if stages <= units:
        return
    reason = (
        f"{stages} stages ({name} on {ranks} ranks) need as many units, and the model is a "
        f"chain of {units}"
    )
    each = stages // ranks
    if custom:
        raise PlanError(FLAG, name, reason, f"Write a schedule of at most {units} stages")
    if each > 1:
        flag = "--num-virtual-stages-per-pipeline-rank"
        value = each
        most = units // ranks
    else:
        flag = "--pipeline-model-parallel-size"
        value = ranks
        most = units
    raise PlanError(
        flag, value, reason, f"Use at most {most}" if most else "Use fewer pipeline ranks"
    )
