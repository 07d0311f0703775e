"""Readable tables of a plan: memory per stage, shardings of tensors with reasons, and differences
of two plans.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields
from math import prod
from typing import Any

from megatron_merak.plan import Plan, TensorSharding, Unit, bytes_text, held_parameters
from megatron_merak.planner.memory import StageMemory, rank_memory, stage_memory

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\b)")


def family(name: str) -> str:
    """Return a tensor's name with layer numbers replaced by "*":
    "model.layers.*.mlp.up_proj.weight".
    """
    return _NUMBER.sub("*", name)


def by_family(reasons: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Merge (name, reason) pairs of a family into one where all its reasons are equal."""
    families: dict[str, dict[str, str]] = {}
    for name, reason in reasons:
        families.setdefault(family(name), {})[name] = family(reason)
    pairs: list[tuple[str, str]] = []
    for pattern, reason_of in families.items():
        equal = len(dict.fromkeys(reason_of.values())) == 1
        pairs += [(pattern, next(iter(reason_of.values())))] if equal else reason_of.items()
    return tuple(pairs)


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return lines with aligned columns: those in ``left`` are left-aligned, the others
    right-aligned.
    """
    columns = list(zip(*rows, strict=True))
    padded = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        padded.append(
            [cell.ljust(width) if index in left else cell.rjust(width) for cell in column]
        )
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def memory_table(plan: Plan) -> str:
    """Return the table of each stage's memory at the peak of its rank, and of ranks where these
    have several stages.
    """
    parts = [field.name for field in fields(StageMemory)]
    rows = [["stage", *parts, "peak"]]
    for index, memory in enumerate(stage_memory(plan)):
        rows.append([str(index), *map(bytes_text, (*astuple(memory), memory.total))])
    tables = ["\n".join(align(rows, ()))]
    if len(plan.stages) > plan.grid.pp:
        rows = [["rank", "stages", *parts, "peak"]]
        for rank, memory in enumerate(rank_memory(plan)):
            stages = ",".join(map(str, plan.stages_of(rank)))
            rows.append([str(rank), stages, *map(bytes_text, (*astuple(memory), memory.total))])
        tables.append("\n".join(align(rows, ())))
    return "\n\n".join(tables)


def tensor_table(plan: Plan) -> str:
    """Return the table of how each family of tensors is sharded over the tensor-parallel ranks, and
    why.
    """
    reasons = dict(plan.reasons)
    grouped: dict[tuple[Any, ...], list[TensorSharding]] = {}
    for tensor in plan.shardings:
        reason = reasons.get(tensor.name) or reasons.get(family(tensor.name), "")
        key = (family(tensor.name), tensor.shape, _layout(tensor), reason)
        grouped.setdefault(key, []).append(tensor)
    rows = [["tensors", "count", "shape", "a rank's part", "why"]]
    for (pattern, shape, _, reason), tensors in grouped.items():
        part = tensors[0].local_shape(0, plan.ranks_of(tensors[0]))
        rows.append([pattern, str(len(tensors)), _shape(shape), _shape(part), reason or "-"])
    share = rank_share(plan)
    return "\n".join(
        [*align(rows, (0, 4)), f"a tensor-parallel rank holds {share:.1%} of the parameters"]
    )


def rank_share(plan: Plan) -> float:
    """Return the share of all parameters, without padding, on tensor-parallel rank 0 of all stages
    together.
    """
    local = sum(prod(tensor.local_shape(0, plan.ranks_of(tensor))) for tensor in plan.shardings)
    return local / (sum(prod(tensor.shape) for tensor in plan.shardings) or 1)


def _layout(tensor: TensorSharding) -> tuple[object, ...]:
    return tensor.dim, tensor.blocks, tensor.padded, tensor.experts


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def difference(first: Plan, second: Plan) -> str:
    """Return a line for each difference of the second plan from the first; empty when they are
    equal.
    """
    lines = []
    for field in fields(Plan):
        before = getattr(first, field.name)
        after = getattr(second, field.name)
        if before != after:
            lines += _DIFFERENCES.get(field.name, _plain)(field.name, first, second)
    return "\n".join(lines)


def _plain(name: str, first: Plan, second: Plan) -> list[str]:
    return [f"{name.replace('_', ' ')}: {getattr(first, name)} -> {getattr(second, name)}"]


def _units(name: str, first: Plan, second: Plan) -> list[str]:
    lines = []
    if len(first.units) != len(second.units):
        lines.append(f"units: {len(first.units)} -> {len(second.units)}")
    for label, count in _UNIT_TOTALS.items():
        before = count(first.units)
        after = count(second.units)
        if before != after:
            lines.append(
                f"{label} of a tensor rank: {before:,} -> {after:,} ({after / before - 1:+.1%})"
            )
    renamed = sum(a.name != b.name for a, b in zip(first.units, second.units, strict=False))
    lines += [f"units of another name: {renamed}"] if renamed else []
    return lines or [_first_unit(first.units, second.units)]


def _first_unit(first: Sequence[Unit], second: Sequence[Unit]) -> str:
    """Name the first unit that differs, and what of it does."""
    before, after = next(pair for pair in zip(first, second, strict=True) if pair[0] != pair[1])
    names = [
        field.name
        for field in fields(Unit)
        if getattr(before, field.name) != getattr(after, field.name)
    ]
    changes = [
        f"{name.replace('_', ' ')} {getattr(before, name)} -> {getattr(after, name)}"
        for name in names
    ]
    return f"unit {before.name}: {', '.join(changes)}"


def _total(field: str):
    return lambda units: sum(getattr(unit, field) for unit in units) or 1


_UNIT_TOTALS = {
    "parameters": lambda units: held_parameters(units) or 1,
    "forward FLOPs": _total("flops"),
    "saved bytes": _total("saved_bytes"),
    "bytes behind units": _total("output_bytes"),
}


def _stages(name: str, first: Plan, second: Plan) -> list[str]:
    lines = []
    for index in range(max(len(first.stages), len(second.stages))):
        before = _stage(first, index)
        after = _stage(second, index)
        if before != after:
            lines.append(f"stage {index}: {before} -> {after}")
    return lines


def _stage(plan: Plan, index: int) -> str:
    if index >= len(plan.stages):
        return "none"
    units = plan.stage_units(index)
    recomputed = len(plan.stages[index].recompute)
    offloaded = len(plan.stages[index].offload)
    return (
        _span(units)
        + (f", {recomputed} recomputed" if recomputed else "")
        + (f", {offloaded} offloaded" if offloaded else "")
    )


def _span(units: Sequence[Unit]) -> str:
    return f"{units[0].name} .. {units[-1].name} ({len(units)})"


def _shardings(name: str, first: Plan, second: Plan) -> list[str]:
    before, after = ({tensor.name: tensor for tensor in plan.shardings} for plan in (first, second))
    changes: dict[tuple[str, str, str], int] = {}
    for key in dict.fromkeys([*before, *after]):
        texts = _sharding(before.get(key)), _sharding(after.get(key))
        if texts[0] != texts[1]:
            change = (family(key), *texts)
            changes[change] = changes.get(change, 0) + 1
    return [
        f"tensor {pattern} ({count}): {was} -> {now}"
        for (pattern, was, now), count in changes.items()
    ]


def _sharding(tensor: TensorSharding | None) -> str:
    if tensor is None:
        return "none"
    if tensor.dim is None or tensor.experts:
        return f"{_shape(tensor.shape)} {tensor.describe()}"
    blocks = "" if tensor.blocks == 1 else f" in {tensor.blocks} blocks"
    return f"{_shape(tensor.shape)} sharded along {tensor.dim}{blocks}" + (
        f", padded to {tensor.padded}" if tensor.padded else ""
    )


def _schedule(name: str, first: Plan, second: Plan) -> list[str]:
    before, after = (
        f"{plan.schedule.name} of {plan.num_microbatches} micro-batches" for plan in (first, second)
    )
    same = first.schedule == second.schedule
    if same:
        return []
    order = ", in another order" if before == after else ""
    return [f"schedule: {before} -> {after}{order}"]


def _time(name: str, first: Plan, second: Plan) -> list[str]:
    before = first.predicted_time
    after = second.predicted_time
    return [f"predicted time: {before:.4g} s -> {after:.4g} s"]


def _bubble(name: str, first: Plan, second: Plan) -> list[str]:
    return [f"predicted bubble: {first.predicted_bubble:.1%} -> {second.predicted_bubble:.1%}"]


def _cluster(name: str, first: Plan, second: Plan) -> list[str]:
    before, after = (
        _flatten(
            asdict(plan.cluster) | {"nodes": ", ".join(map(str, plan.cluster.nodes)) or "alike"}
        )
        for plan in (first, second)
    )
    return [
        f"cluster: {key} {before[key]} -> {after[key]}"
        for key in before
        if before[key] != after[key]
    ]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values, each under its path: "inside.bandwidth"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _peaks(name: str, first: Plan, second: Plan) -> list[str]:
    if not (first.predicted_bytes and second.predicted_bytes):
        return ["predicted bytes: only one plan has them"]
    before, after = (
        bytes_text(max(plan.by_rank(plan.predicted_bytes))) for plan in (first, second)
    )
    return [f"largest peak of a rank: {before} -> {after}"]


def _host_peaks(name: str, first: Plan, second: Plan) -> list[str]:
    before, after = (
        bytes_text(max(plan.by_rank(plan.predicted_host_bytes), default=0))
        for plan in (first, second)
    )
    return [f"largest peak of host memory: {before} -> {after}"]


_DIFFERENCES = {
    "units": _units,
    "stages": _stages,
    "shardings": _shardings,
    "cluster": _cluster,
    "schedule": _schedule,
    "predicted_time": _time,
    "predicted_bubble": _bubble,
    "predicted_bytes": _peaks,
    "predicted_host_bytes": _host_peaks,
    "reasons": lambda name, first, second: [],
    "schedule_note": lambda name, first, second: [],
}
