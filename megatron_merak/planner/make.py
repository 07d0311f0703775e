"""Makes a `Plan` from a chain of units, or from a configuration of the native model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_merak.cluster import CLUSTERS, Cluster
from megatron_merak.config import Config, ParallelConfig, RunConfig
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.search.placement import placements
from megatron_merak.plan import DTYPE_BYTES, Grid, Plan, TensorSharding, Unit, refused_together
from megatron_merak.plan.replicas import check_instances
from megatron_merak.planner.automatic import AUTO, REFERENCE, Automatic, starts
from megatron_merak.planner.cost import gpt_units
from megatron_merak.planner.layout import Layout
from megatron_merak.planner.predict import priced
from megatron_merak.planner.recompute import Recompute, check_limit
from megatron_merak.planner.tables import by_family
from megatron_merak.planner.written import FLAG, is_paired, written

GIB = 2**30
_DEFAULT = REFERENCE  # the schedule where none is configured
ProgressCallback = Callable[[float], object]  # called with the finished share of a search, 0 to 1


def plan(
    config: Config,
    world_size: int,
    cluster: Cluster = CLUSTERS["cpu"],
    shardings: tuple[TensorSharding, ...] = (),
    report_progress: ProgressCallback = lambda share: None,
) -> Plan:
    """Return the plan of a native model with the degrees and schedule of ``config``, cut into stages by cost.

    cluster:         where it runs, see ``cluster.find_cluster``.
    report_progress: called with the finished share of a search, 0 to 1.

    Raises ConfigError for degrees and sizes that do not fit ``world_size``, PlanError for more stages than units or too
    little memory, ScheduleError for a schedule that is not defined for these numbers of ranks and micro-batches.
    """
    config.validate(world_size, training=False)
    model = config.model
    parallel = config.parallel
    train = config.train
    grid = grid_of(config, world_size)
    microbatches = config.num_microbatches(world_size)
    return plan_chain(
        native_units(config, grid.tp, cluster),
        grid,
        microbatches=microbatches,
        micro_batch_size=train.micro_batch_size,
        sequence_length=model.seq_length,
        dtype=train.dtype,
        cluster=cluster,
        shardings=shardings,
        loss_chunk=model.cross_entropy_chunk_size,
        fp32_residual=model.fp32_residual_connection,
        state_bytes=config.optimizer.state_bytes,
        report_progress=report_progress,
        **choices(parallel, microbatches),
    )


def grid_of(config: RunConfig, world_size: int) -> Grid:
    """Return the grid of ``world_size`` ranks with the degrees of ``config``."""
    parallel = config.parallel
    return Grid(
        tp=parallel.tensor_model_parallel_size,
        dp=config.data_parallel_size(world_size),
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.order,
    )


def native_units(config: Config, tp: int, cluster: Cluster) -> tuple[Unit, ...]:
    """Return the chain of a native model on one of ``tp`` ranks of ``cluster``."""
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


def default_bucket_size(data_parallel_size: int) -> int:
    """Return Megatron-LM's bucket size in elements, which grows with the ranks to hide the latency of a ring."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def choices(parallel: ParallelConfig, microbatches: int) -> dict[str, Any]:
    """Return the arguments of ``plan_chain`` that are set by flags of parallelism.

    microbatches: per step and replica.

    Raises as ``written`` does.
    """
    return {
        "schedule": written(parallel, microbatches) or parallel.pipeline_schedule or _DEFAULT,
        "chunks": parallel.num_virtual_stages_per_pipeline_rank,
        "group": parallel.microbatch_group_size_per_virtual_pipeline_stage,
        "recompute": Recompute.of(
            parallel.recompute_granularity, parallel.recompute_method, parallel.recompute_num_layers
        ),
        "overlap": parallel.tp_comm_overlap,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute_activations": parallel.recomputes_activations,
        "overlap_grad_reduce": not parallel.no_overlap_grad_reduce,
        "bucket_size": parallel.ddp_bucket_size,
        "sharding": parallel.sharding,
        "sharding_instances": parallel.num_distributed_optimizer_instances,
        "overlap_param_gather": not parallel.no_overlap_param_gather,
        "grad_reduce_in_bf16": parallel.grad_reduce_in_bf16,
        "memory_gb": parallel.device_memory_gb,
    }


def plan_chain(
    units: Sequence[Unit],
    grid: Grid,
    *,
    microbatches: int,
    micro_batch_size: int,
    sequence_length: int = 0,
    dtype: str = "float32",
    cluster: Cluster = CLUSTERS["cpu"],
    schedule: str | Schedule = "1f1b",
    chunks: int | None = None,
    group: int | None = None,
    recompute: Recompute | None = None,
    overlap: str = "weight-gradient",
    sequence_parallel: bool = False,
    overlap_grad_reduce: bool = True,
    bucket_size: int | None = None,
    sharding: str = "no_shard",
    sharding_instances: int = 1,
    overlap_param_gather: bool = True,
    loss_chunk: int = 0,
    recompute_activations: bool = False,
    graph_sharding: str = "",
    memory_gb: float | None = None,
    shardings: tuple[TensorSharding, ...] = (),
    reasons: Iterable[tuple[str, str]] = (),
    report_progress: ProgressCallback = lambda share: None,
    **others: Any,
) -> Plan:
    """Return the plan that runs a chain on a grid: stages balanced by cost, each within the memory of a rank.

    microbatches: per step and replica.
    schedule:     a name, "auto" for the fastest by the model, or compute ops, which are run unchanged.
    overlap:      of tensor-parallel collectives; "auto" for the fastest by the model.
    memory_gb:    memory of a rank in GiB. None: what is usable of the device's, exceeded only if no cut fits.
    reasons:      (tensor, why it is sharded as it is).
    For ``chunks`` and ``group`` see ``build_schedule``; other arguments, with ``others``, are fields of ``Plan``.
    Raises PlanError for contradictory arguments and if no cut fits, ScheduleError as ``build_schedule`` does.
    """
    check_instances(sharding_instances, grid.dp, sharding)
    units = tuple(units)
    recompute = recompute or Recompute()
    limit = cluster.device.usable if memory_gb is None else memory_gb * GIB
    check_limit(recompute, limit, cluster.device.name)
    custom = isinstance(schedule, Schedule)
    automatic = schedule == AUTO
    homes = placements(grid.pp, chunks, len(units)) if automatic else ()
    built = (
        starts(homes, microbatches, group) if homes else (_build(schedule, grid.pp, microbatches, chunks, group=group),)
    )
    _check_stages(built[0], len(units), custom)
    draft = {"grid": grid, "units": units, "dtype": dtype, "cluster": cluster, "sequence_length": sequence_length}
    draft |= {"micro_batch_size": micro_batch_size, "sharding": sharding, "sharding_instances": sharding_instances}
    draft |= {"overlap_grad_reduce": overlap_grad_reduce, "overlap_param_gather": overlap_param_gather}
    draft |= {"bucket_size": bucket_size or default_bucket_size(grid.dp), "graph_sharding": graph_sharding}
    draft |= {"recompute_activations": recompute_activations, "loss_chunk": loss_chunk, "shardings": shardings}
    modes = _modes(overlap, grid, built[0], micro_batch_size, custom=custom, sharding=sharding)
    orders = [(mode, pair(each) if mode == "pair" and not custom else each) for mode in modes for each in built]
    drafts = [draft | others | {"schedule": order, "overlap": mode} for mode, order in orders]
    plans, errors = _plans(drafts, recompute, limit, memory_gb)
    best = Automatic(plans, limit, homes, report_progress).choose() if automatic else _fastest(plans)
    if best is None or (errors and not automatic):
        raise errors[0]
    return replace(best, sequence_parallel=sequence_parallel and grid.tp > 1, reasons=by_family(reasons))


def _modes(
    overlap: str, grid: Grid, schedule: Schedule, micro_batch_size: int, custom: bool, sharding: str
) -> tuple[str, ...]:
    """Return the overlaps to compare, the default first: it is used unless another one is faster.

    custom: whether the schedule was passed as ops; then forwards and backwards are paired as in it.

    Raises PlanError for halves of one sample, and for an overlap that ``sharding`` does not support.
    """
    requested = overlap if grid.tp > 1 else "weight-gradient"
    if error := refused_together(sharding, grid.dp, requested, custom and is_paired(schedule)):
        raise error
    if grid.tp == 1:
        return ("weight-gradient",)
    if overlap == "sub-pipeline" and micro_batch_size == 1:
        reason = "a micro-batch of one sample has no halves, as attention reads the whole of its sequence"
        raise PlanError("--tp-comm-overlap", overlap, reason, "Use a micro-batch of 2 or more, or pair")
    if overlap != "auto":
        return (overlap,)
    paired = custom and is_paired(schedule)
    halves = ("sub-pipeline",) if micro_batch_size > 1 and not paired else ()
    pairs = paired if custom else schedule.microbatches > 1
    modes = ("weight-gradient", "none", *halves, *(("pair",) if pairs else ()))
    return tuple(mode for mode in modes if refused_together(sharding, grid.dp, mode) is None)


def _plans(
    drafts: Iterable[dict[str, Any]], recompute: Recompute, limit: float, memory_gb: float | None
) -> tuple[list[Plan], list[PlanError]]:
    """Return the priced plans of drafts, and the errors of drafts without a plan."""
    plans: list[Plan] = []
    errors: list[PlanError] = []
    for draft in drafts:
        try:
            plans += map(priced, Layout(draft, recompute, limit).plans(memory_gb))
        except PlanError as error:
            errors.append(error)
    return plans, errors


def _fastest(plans: Sequence[Plan]) -> Plan | None:
    return min(plans, key=lambda plan: plan.predicted_time, default=None)


def _build(name: str | Schedule, ranks: int, microbatches: int, chunks: int | None, group: int | None) -> Schedule:
    """Return the schedule: ``name`` itself if it is one, or the built-in one of that name."""
    if isinstance(name, Schedule):
        return name
    if name == AUTO:  # there are fewer units than stages, for which `_check_stages` raises with any schedule
        name = "interleaved" if chunks and chunks > 1 else REFERENCE
    if name not in BUILDERS:
        raise PlanError("--pipeline-schedule", name, "there is no such one", f"Use one of {', '.join(BUILDERS)}, auto")
    return build_schedule(name, ranks, microbatches, chunks, group=group)


def _check_stages(schedule: Schedule, units: int, custom: bool) -> None:
    """Raise PlanError for more stages than units."""
    stages = schedule.stages
    ranks = len(schedule.ranks)
    name = schedule.name
    if stages <= units:
        return
    reason = f"{stages} stages ({name} on {ranks} ranks) need as many units, and the model is a chain of {units}"
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
    raise PlanError(flag, value, reason, f"Use at most {most}" if most else "Use fewer pipeline ranks")
