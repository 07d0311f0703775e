"""A plan for people to read: memory per stage, tensors and why they are sharded so, and what differs between two."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, fields
from math import prod
from typing import Any

from megatron_merak.plan import Plan, TensorSharding, Unit, bytes_text, held_parameters
from megatron_merak.planner.memory import StageMemory, rank_memory, stage_memory

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\b)")


def family(name: str) -> str:
    """A tensor's name with its layer left open: "model.layers.*.mlp.up_proj.weight"."""
    return _NUMBER.sub("*", name)


def by_family(reasons: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(name, reason) pairs, those of a family in one pair where they are all the same."""
    found: dict[str, dict[str, str]] = {}
    for name, reason in reasons:
        found.setdefault(family(name), {})[name] = family(reason)
    pairs: list[tuple[str, str]] = []
    for pattern, named in found.items():
        alike = len(dict.fromkeys(named.values())) == 1
        pairs += [(pattern, next(iter(named.values())))] if alike else named.items()
    return tuple(pairs)


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines with columns under each other; those in ``left`` start alike, the others end alike."""
    columns = list(zip(*rows, strict=True))
    padded = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        padded.append([cell.ljust(width) if index in left else cell.rjust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def memory_table(plan: Plan) -> str:
    """What each stage fills of its rank when that is at its peak, and the ranks where they hold several stages."""
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
    """How each family of tensors is sharded over the tensor-parallel ranks, and why."""
    reasons, grouped = dict(plan.reasons), {}
    for tensor in plan.shardings:
        reason = reasons.get(tensor.name) or reasons.get(family(tensor.name), "")
        key = (family(tensor.name), tensor.shape, _division(tensor), reason)
        grouped.setdefault(key, []).append(tensor)
    rows = [["tensors", "count", "shape", "a rank's part", "why"]]
    for (pattern, shape, _, reason), tensors in grouped.items():
        part = tensors[0].local_shape(0, plan.grid.tp)
        rows.append([pattern, str(len(tensors)), _shape(shape), _shape(part), reason or "-"])
    share = held_share(plan)
    return "\n".join([*align(rows, (0, 4)), f"a tensor-parallel rank holds {share:.1%} of the parameters"])


def held_share(plan: Plan) -> float:
    """The part of all parameters, without padding, that tensor rank 0 of all stages together holds."""
    held = sum(prod(tensor.local_shape(0, plan.grid.tp)) for tensor in plan.shardings)
    return held / (sum(prod(tensor.shape) for tensor in plan.shardings) or 1)


def _division(tensor: TensorSharding) -> tuple[object, ...]:
    return tensor.dim, tensor.blocks, tensor.padded


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def difference(one: Plan, other: Plan) -> str:
    """What the second plan does differently, a line for each; empty when they are equal."""
    lines = []
    for field in fields(Plan):
        before, after = getattr(one, field.name), getattr(other, field.name)
        if before != after:
            lines += _DIFFERENCES.get(field.name, _plain)(field.name, one, other)
    return "\n".join(lines)


def _plain(name: str, one: Plan, other: Plan) -> list[str]:
    return [f"{name.replace('_', ' ')}: {getattr(one, name)} -> {getattr(other, name)}"]


def _units(name: str, one: Plan, other: Plan) -> list[str]:
    lines = []
    if len(one.units) != len(other.units):
        lines.append(f"units: {len(one.units)} -> {len(other.units)}")
    for label, count in _UNIT_TOTALS.items():
        before, after = count(one.units), count(other.units)
        if before != after:
            lines.append(f"{label} of a tensor rank: {before:,} -> {after:,} ({after / before - 1:+.1%})")
    renamed = sum(a.name != b.name for a, b in zip(one.units, other.units, strict=False))
    lines += [f"units of another name: {renamed}"] if renamed else []
    return lines or ["units differ in what they send or start"]


def _total(field: str):
    return lambda units: sum(getattr(unit, field) for unit in units) or 1


_UNIT_TOTALS = {
    "parameters": lambda units: held_parameters(units) or 1,
    "forward FLOPs": _total("flops"),
    "saved bytes": _total("saved_bytes"),
    "bytes behind units": _total("output_bytes"),
}


def _stages(name: str, one: Plan, other: Plan) -> list[str]:
    lines = []
    for index in range(max(len(one.stages), len(other.stages))):
        before, after = _stage(one, index), _stage(other, index)
        if before != after:
            lines.append(f"stage {index}: {before} -> {after}")
    return lines


def _stage(plan: Plan, index: int) -> str:
    if index >= len(plan.stages):
        return "none"
    units, again = plan.stage_units(index), len(plan.stages[index].recompute)
    return f"{_span(units)}" + (f", {again} recomputed" if again else "")


def _span(units: Sequence[Unit]) -> str:
    return f"{units[0].name} .. {units[-1].name} ({len(units)})"


def _shardings(name: str, one: Plan, other: Plan) -> list[str]:
    before, after = ({tensor.name: tensor for tensor in plan.shardings} for plan in (one, other))
    changes: dict[tuple[str, str, str], int] = {}
    for key in dict.fromkeys([*before, *after]):
        texts = _held(before.get(key)), _held(after.get(key))
        if texts[0] != texts[1]:
            change = (family(key), *texts)
            changes[change] = changes.get(change, 0) + 1
    return [f"tensor {pattern} ({count}): {was} -> {now}" for (pattern, was, now), count in changes.items()]


def _held(tensor: TensorSharding | None) -> str:
    if tensor is None:
        return "none"
    if tensor.dim is None:
        return f"{_shape(tensor.shape)} replicated"
    blocks = "" if tensor.blocks == 1 else f" in {tensor.blocks} blocks"
    return f"{_shape(tensor.shape)} sharded along {tensor.dim}{blocks}" + (
        f", padded to {tensor.padded}" if tensor.padded else ""
    )


def _schedule(name: str, one: Plan, other: Plan) -> list[str]:
    before, after = (f"{plan.schedule.name} of {plan.num_microbatches} micro-batches" for plan in (one, other))
    same = one.schedule == other.schedule
    return [f"schedule: {before} -> {after}{', in another order' * (before == after)}"] if not same else []


def _time(name: str, one: Plan, other: Plan) -> list[str]:
    before, after = one.predicted_time, other.predicted_time
    return [f"predicted time: {before:.4g} s -> {after:.4g} s"]


def _bubble(name: str, one: Plan, other: Plan) -> list[str]:
    return [f"predicted bubble: {one.predicted_bubble:.1%} -> {other.predicted_bubble:.1%}"]


def _cluster(name: str, one: Plan, other: Plan) -> list[str]:
    before, after = (_facts(asdict(plan.cluster)) for plan in (one, other))
    return [f"cluster: {key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]


def _facts(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Nested values, each under its path: "inside.bandwidth"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _facts(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value}
    return found


def _peaks(name: str, one: Plan, other: Plan) -> list[str]:
    if not (one.predicted_bytes and other.predicted_bytes):
        return ["predicted bytes: only one plan has them"]
    before, after = (bytes_text(max(plan.predicted_bytes)) for plan in (one, other))
    return [f"largest peak of a rank: {before} -> {after}"]


_DIFFERENCES = {
    "units": _units,
    "stages": _stages,
    "shardings": _shardings,
    "cluster": _cluster,
    "schedule": _schedule,
    "predicted_time": _time,
    "predicted_bubble": _bubble,
    "predicted_bytes": _peaks,
    "reasons": lambda name, one, other: [],
    "schedule_note": lambda name, one, other: [],
}
