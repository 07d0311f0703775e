"""Plans as text."""

from megatron_merak.config.parallel import A2A, A2A_P2P, ALL_GATHER, P2P
from megatron_merak.counting import counted
from megatron_merak.pipeline_parallel.pictures.table import bytes_text
from megatron_merak.pipeline_parallel.unflushed import updates_text
from megatron_merak.plan.frozen import Plan
from megatron_merak.plan.hardware import hardware_of, limits_of
from megatron_merak.plan.placement import placement

_SHARDED = {
    "optim": "optimizer state",
    "optim_grads": "optimizer state and gradients",
    "optim_grads_params": "optimizer state, gradients and weights",
}
_EXCHANGED = {
    A2A: "exchange heads",
    A2A_P2P: "exchange heads and pass keys and values around",
    ALL_GATHER: "gather keys and values",
    P2P: "pass keys and values around",
}


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row per stage; the first is the header. Where nodes differ, the last column says on
    how many of which a stage is.
    """
    total_flops = sum(unit.flops for unit in plan.units) or 1
    header = (
        "stage",
        "pp rank",
        "units",
        "parameters/rank",
        "FLOPs",
        "peak bytes/rank",
        "recomputed",
        *(("offloaded",) if plan.offloads else ()),
        *(("nodes",) if plan.cluster.nodes else ()),
    )
    hardware = hardware_of(plan.cluster, plan.grid)
    rows: list[tuple[str, ...]] = [header]
    for index, stage in enumerate(plan.stages):
        units = plan.stage_units(index)
        rows.append(
            (
                str(index),
                str(plan.schedule.rank_of(index)),
                units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}",
                f"{plan.stage_parameters(index):,}",
                f"{sum(unit.flops for unit in units) / total_flops:.1%}",
                bytes_text(plan.predicted_bytes[index]) if plan.predicted_bytes else "-",
                f"{len(stage.recompute)} of {len(units)}",
                *((f"{len(stage.offload)} of {len(units)}",) if plan.offloads else ()),
                *((str(hardware[plan.schedule.rank_of(index)]),) if plan.cluster.nodes else ()),
            )
        )
    return rows


def layout(plan: Plan) -> str:
    """Return the rank grid in one line."""
    grid = plan.grid
    return (
        f"{counted(grid.size, 'rank')} = tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}"
    )


def batch(plan: Plan) -> str:
    """Return the batch in one line."""
    tokens = f" x {plan.sequence_length:,} tokens" if plan.sequence_length else ""
    replicas = f"each of {plan.grid.dp:,} replicas" if plan.grid.dp > 1 else "1 replica"
    return (
        f"global batch {plan.global_batch_size:,} = "
        f"{counted(plan.num_microbatches, 'micro-batch')} of "
        f"{plan.micro_batch_size:,}{tokens} on {replicas}, {plan.dtype}{_precision(plan)}"
    )


def plan_table(plan: Plan, width: int = 120) -> str:
    """Return a plan as text; lines of the schedule are cut at ``width``."""
    grid = plan.grid
    rows = stage_rows(plan)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [layout(plan), batch(plan)]
    lines += [line] if (line := placement(grid, plan.cluster.ranks_per_node)) else []
    lines += [line] if (line := nodes_text(plan)) else []
    if plan.shardings:
        # what one rank pads has a dimension, too
        own = [sharding for sharding in plan.shardings if not sharding.experts]
        sharded = sum(sharding.dim is not None for sharding in own) * (grid.tp > 1)
        tensors = counted(len(plan.shardings), "tensor")
        over = counted(grid.tp, "tensor-parallel rank")
        lines.append(f"{tensors}, {sharded:,} of them sharded over {over}")
    if grid.cp > 1:
        kinds = dict.fromkeys(unit.cp_comm_type for unit in plan.units if unit.cp_comm_type)
        exchanged = "".join(f", which {_EXCHANGED[kind]} ({kind})" for kind in kinds)
        if plan.cp_sizes:
            exchanged += ", {1} groups of {0} that exchange heads".format(*plan.cp_sizes)
        ranks = counted(grid.cp, "context-parallel rank")
        lines.append(f"sequences divided over {ranks}{exchanged}")
    if plan.expert_ranks > 1:
        each = f", each expert over {plan.expert_shards}" if plan.expert_shards > 1 else ""
        copies = f", of {plan.expert_copies} copies of a layer" if plan.expert_copies > 1 else ""
        over = counted(plan.expert_ranks, "rank")
        room = f", with room for {plan.expert_room:g} times as many" if plan.expert_room else ""
        lines.append(
            f"experts divided over {over}{copies}{each}; as many tokens for each rank{room}"
        )
    if grid.layer_ranks > 1 or plan.expert_ranks > 1:
        axes = {"tensor": grid.tp, "context": grid.cp, "expert": plan.expert_ranks}
        kind = next(name for name, ranks in axes.items() if ranks > 1)
        along_sequence = ", sequence parallelism" if plan.sequence_parallel else ""
        lines.append(f"overlap of {kind}-parallel collectives: {plan.overlap}{along_sequence}")
    lines += [*filter(None, [sharding_text(plan)]), ""]
    for row in rows:
        aligned = [
            x.ljust(w) if rows[0][i] in ("units", "nodes") else x.rjust(w)
            for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(aligned).rstrip())
    predicted = prediction(plan)
    lines += ["", f"schedule {plan.schedule.name}" + (f", {predicted}" if predicted else "")]
    notes = [updates_text(plan.schedule), memory_text(plan), host_text(plan)]
    lines += [*filter(None, notes), *plan.schedule_note.splitlines()]
    program = str(plan.schedule).splitlines()[1:]
    for line in program[:8]:
        lines.append(line if len(line) <= width else line[: width - 4].rsplit(" ", 1)[0] + " ...")
    if len(program) > 8:
        lines.append(f"... and {counted(len(program) - 8, 'rank')} more")
    return "\n".join(lines)


def nodes_text(plan: Plan) -> str:
    """Return which nodes have which devices; "" where all are alike."""
    texts = []
    first = 0
    for group in plan.cluster.nodes:
        last = first + group.count - 1
        span = f"node {first}" if group.count == 1 else f"nodes {first}-{last}"
        texts.append(f"{span}: {group.rated.name}")
        first += group.count
    return ", ".join(texts)


def sharding_text(plan: Plan) -> str:
    """Return what the replicas shard, and over how many; "" for no sharding."""
    if plan.sharding == "no_shard":
        return ""
    if plan.offload_model_states and plan.grid.copies == 1:
        return f"{_SHARDED[plan.sharding]}: in host memory"
    sharded = (
        f"sharded over {counted(plan.shard_ranks, 'rank' if plan.grid.cp > 1 else 'replica')}"
        if plan.grid.copies > 1
        else "not sharded, as there is one replica"
    )
    sharded += (
        f", in each of {plan.sharding_instances} instances" if plan.sharding_instances > 1 else ""
    )
    sharded += ", in host memory" if plan.offload_model_states else ""
    return f"{_SHARDED[plan.sharding]}: {sharded}"


def _precision(plan: Plan) -> str:
    """Return what has another dtype than the rest."""
    stream = ", residual stream in fp32" if plan.fp32_residual else ""
    if plan.fp8_format is not None:
        first, last = plan.bf16_layers
        ends = f", not in the first {first} and the last {last} layers" if first + last else ""
        stream += f", linear layers in fp8 ({plan.fp8_format}, {plan.fp8_recipe}{ends})"
    stream += ", pointwise operations compiled" if plan.compile_pointwise else ""
    return stream + (
        ", gradients sent in bf16" if plan.grad_reduce_in_bf16 and plan.grid.copies > 1 else ""
    )


def prediction(plan: Plan) -> str:
    """Return what a plan predicts for a step; "" without a prediction."""
    if not plan.predicted_time:
        return ""
    range_text = ""
    if found := interval(plan):
        range_text = f" (p10 to p90: {time_text(found[0])} to {time_text(found[1])})"
    factor = plan.cluster.devices[0].step_factor
    calibrated = "" if factor == 1 else f", {factor:.2f} times the model's: as runs took"
    return (
        f"predicted on {plan.cluster}: {time_text(plan.predicted_time)} per step{range_text}, "
        f"bubble {plan.predicted_bubble:.1%}{calibrated}"
    )


def interval(plan: Plan) -> tuple[float, float] | None:
    """Return the seconds between which eight of ten steps are expected; None where nothing of the
    device was compared with measurements (see ``Practice.low``), and where nodes differ.
    """
    practice = plan.cluster.practice
    if practice is None or not practice.high or not plan.predicted_time or plan.cluster.nodes:
        return None
    return practice.low * plan.predicted_time, practice.high * plan.predicted_time


def memory_text(plan: Plan) -> str:
    """Return the largest peak of a rank beside what plans use of the device's memory, where nodes
    differ that of the rank with least left; "" where either is unknown.
    """
    limits = limits_of(plan.cluster, plan.grid, plan.cluster.most_usable)
    if not plan.predicted_bytes or not all(limits):
        return ""
    peaks = [
        sum(plan.predicted_bytes[stage] for stage in plan.stages_of(rank))
        for rank in range(plan.grid.pp)
    ]
    fullest = min(range(plan.grid.pp), key=lambda rank: limits[rank] - peaks[rank])
    most = peaks[fullest]
    device = hardware_of(plan.cluster, plan.grid)[fullest].smallest
    which = f"fullest rank, pipeline rank {fullest}," if plan.cluster.nodes else "largest rank"
    compared = " of" if most <= device.usable else ", more than"
    kept = bytes_text(device.memory - device.usable)
    left = f", {bytes_text(device.usable - most)} left" if most <= device.usable else ""
    return (
        f"{which} {bytes_text(most)}{compared} the {bytes_text(device.usable)} of "
        f"{device.name} that plans use{left} "
        f"({kept} are kept for what they do not count)"
    )


def host_text(plan: Plan) -> str:
    """Return the host memory of the rank and the node that need most for what is there; "" where
    nothing is, or it is not predicted.
    """
    if not plan.predicted_host_bytes:
        return ""
    ranks = plan.by_rank(plan.predicted_host_bytes)
    size = plan.cluster.ranks_per_node
    of_ranks = [ranks[plan.grid.coordinates(rank)[3]] for rank in range(plan.grid.size)]
    nodes = [sum(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size)]
    rank, node = bytes_text(max(ranks)), bytes_text(max(nodes))
    kinds = ["offloaded activations"] if plan.offloads else []
    kinds += ["weights, gradients and optimizer state"] if plan.offload_model_states else []
    what = " and of ".join(kinds)
    return f"host memory of {what}: {rank} of the largest rank, {node} of a node"


def time_text(seconds: float) -> str:
    """Return a time as tables show it."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
