"""The Plan: every decision about how a model runs on a cluster, frozen, printable and storable.

Whatever is automatic ends in a ``Plan``; whatever runs reads only a ``Plan``. It is plain data: hashable, equal by
value, exact through JSON, small enough to be written by hand, and free of torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.ops import Schedule

AXES = ("tp", "cp", "dp", "pp")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Grid:
    """The rank grid: tensor, context, data and pipeline parallel extents, the first varying fastest over the ranks.

    This is Megatron's default order, so rank = ((p * dp + d) * cp + c) * tp + t.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise PlanError(f"grid extent {axis}", getattr(self, axis), "an extent counts ranks", "Use 1 or more")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """The (tp, cp, dp, pp) coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise PlanError("rank", rank, f"the grid has {self.size} ranks", f"Use 0 to {self.size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return tp, cp, dp, pp

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        for axis, place in zip(AXES, (tp, cp, dp, pp), strict=True):
            extent = getattr(self, axis)
            if not 0 <= place < extent:
                raise PlanError(f"{axis} coordinate", place, f"the extent is {extent}", f"Use 0 to {extent - 1}")
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ only along ``axis``, one ascending list per group, groups by their first rank.

        ``axis`` is "tp", "cp", "dp" or "pp", or several joined by a dash: "tp-pp" is one model replica's ranks.
        """
        free = axis.split("-")
        if unknown := [name for name in free if name not in AXES]:
            raise PlanError("grid axis", ", ".join(unknown), f"the axes are {', '.join(AXES)}", "Join axes by a dash")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = zip(AXES, self.coordinates(rank), strict=True)
            groups.setdefault(tuple(x for name, x in place if name not in free), []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class Unit:
    """One link of the chain that a model is: what one tensor-parallel rank holds and computes of it.

    ``parameters``: values that this unit alone uses. ``tied``: name and values of each tensor that it shares with other
    units; every stage with one of them holds a copy. ``flops``: of one micro-batch's forward, a multiply-add counting
    two. ``saved_bytes``: kept from its forward for its backward, beyond its input and its parameters.
    ``output_bytes``: what crosses a stage border behind it, ``passed_bytes`` of which earlier units made.
    ``transient_bytes``: live only while it runs (the logits and their gradient). In pairs of (forward, backward):
    ``reduces``, its all-reduces over the tensor-parallel ranks, their ``reduced_bytes`` together, and ``operations``
    that the host starts.
    """

    name: str
    kind: str
    parameters: int
    flops: int
    saved_bytes: int
    output_bytes: int
    tied: tuple[tuple[str, int], ...] = ()
    transient_bytes: int = 0
    passed_bytes: int = 0
    reduces: tuple[int, int] = (0, 0)
    reduced_bytes: tuple[int, int] = (0, 0)
    operations: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class StagePlan:
    """Units [first, last) of the chain; ``recompute`` names those (by index in the chain) that keep no tape."""

    first: int
    last: int
    recompute: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 <= self.first < self.last:
            raise PlanError("stage", f"[{self.first}, {self.last})", "a stage holds one unit or more", "Move the cuts")
        if outside := [unit for unit in self.recompute if not self.first <= unit < self.last]:
            raise PlanError("recompute", outside, f"the stage holds units [{self.first}, {self.last})", "Drop them")

    @property
    def units(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True)
class TensorSharding:
    """How one tensor of the model, under its HuggingFace name, is divided over the tensor-parallel ranks.

    ``shape`` is the full shape, without padding. ``dim`` is the divided dimension, None for a tensor every rank holds.
    ``blocks`` fused blocks lie along ``dim`` (3 in a fused query-key-value), each divided evenly by itself; a tuple
    gives their extents where they differ (fewer key-value heads). ``padded`` is the extent of ``dim`` with padding (a
    vocabulary): the padded extent is what is divided evenly.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    padded: int | None = None

    def __post_init__(self):
        if self.dim is None:
            return
        if not 0 <= self.dim < len(self.shape):
            raise PlanError(f"dim of {self.name}", self.dim, f"its shape is {self.shape}", "Name one of its dimensions")
        if self.padded is not None and (self.blocks != 1 or self.padded < self.shape[self.dim]):
            reason = f"padding extends one block of {self.shape[self.dim]}, and there are {self.blocks} blocks"
            raise PlanError(f"padded extent of {self.name}", self.padded, reason, "Pad one block upwards")
        if isinstance(self.blocks, tuple) and sum(self.blocks) != self.shape[self.dim]:
            reason = f"dimension {self.dim} of {self.shape} does not consist of them"
            raise PlanError(f"blocks of {self.name}", self.blocks, reason, "Let them add up to it")

    def intervals(self, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
        """The index ranges [start, stop) along ``dim`` that a rank holds, ascending, in the order it stores them.

        ``()`` means the whole tensor (``dim`` is None). Padding is clipped away; a rank that holds only padding gets
        one empty range.
        """
        if self.dim is None:
            return ()
        extent = self.shape[self.dim]
        ranges: list[tuple[int, int]] = []
        begin = 0
        for block in self._block_extents(tp):
            start = begin + tp_rank * (block // tp)
            start, stop = min(start, extent), min(start + block // tp, extent)
            begin += block
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return tuple(ranges)

    def _block_extents(self, tp: int) -> tuple[int, ...]:
        divided = self.shape[self.dim] if self.padded is None else self.padded
        blocks = self.blocks
        if isinstance(blocks, int) and divided % blocks == 0:
            blocks = (divided // blocks,) * blocks
        if isinstance(blocks, int) or any(block % tp for block in blocks):
            reason = f"{self.blocks} block(s) do not divide evenly over {tp} tensor-parallel ranks"
            raise PlanError(f"extent of {self.name}", divided, reason, "Use a tensor-parallel size that divides it")
        return blocks

    def local_shape(self, tp_rank: int, tp: int) -> tuple[int, ...]:
        """The shape of a rank's part, without padding."""
        if self.dim is None:
            return self.shape
        held = sum(stop - start for start, stop in self.intervals(tp_rank, tp))
        return self.shape[: self.dim] + (held,) + self.shape[self.dim + 1 :]


@dataclass(frozen=True)
class Plan:
    """Rank grid, chain of units, stages, tensor-parallel table and schedule of one training step.

    ``schedule`` holds compute operations only; communication is derived from it. ``dtype`` is that of activations and
    parameters ("float32", "bfloat16"). ``sequence_length`` is 0 where samples are no token sequences. Predictions
    describe one step on ``device``: ``predicted_time`` in seconds, ``predicted_bubble`` the idle fraction of its
    forwards and backwards, ``predicted_bytes`` each stage's peak on one rank. ``reasons``: why tensors are divided as
    they are, by pattern of their names. Printing a plan gives its table.
    """

    grid: Grid
    units: tuple[Unit, ...]
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    micro_batch_size: int
    sequence_length: int
    dtype: str = "float32"
    shardings: tuple[TensorSharding, ...] = ()
    device: str = ""
    predicted_time: float = 0.0
    predicted_bubble: float = 0.0
    predicted_bytes: tuple[int, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        cuts = [0] + [stage.last for stage in self.stages]
        if [stage.first for stage in self.stages] != cuts[:-1] or cuts[-1] != len(self.units):
            reason = f"they must cover the {len(self.units)} units once, in order"
            raise PlanError("stages", [(s.first, s.last) for s in self.stages], reason, "Start each where one ends")
        if self.schedule.stages != len(self.stages) or len(self.schedule.ranks) != self.grid.pp:
            reason = f"it has {self.schedule.stages} stages on {len(self.schedule.ranks)} ranks, but the plan has "
            reason += f"{len(self.stages)} stages on {self.grid.pp}"
            raise PlanError("schedule", self.schedule.name, reason, "Build the schedule for the plan's stages")
        if len(self.predicted_bytes) not in (0, len(self.stages)):
            reason = f"there is one for each of the {len(self.stages)} stages, or none"
            raise PlanError("predicted bytes", self.predicted_bytes, reason, "Correct the plan")
        if self.dtype not in DTYPE_BYTES:
            raise PlanError("dtype", self.dtype, f"known types are {', '.join(DTYPE_BYTES)}", "Use one of them")

    @property
    def num_microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.grid.dp

    def stage_units(self, stage: int) -> tuple[Unit, ...]:
        return self.units[self.stages[stage].first : self.stages[stage].last]

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages that one pipeline rank runs, ascending."""
        return tuple(stage for stage in range(len(self.stages)) if self.schedule.rank_of(stage) == pp_rank)

    def stage_parameters(self, stage: int) -> int:
        """The values one rank of a stage holds, its own copies of tied tensors included."""
        return held_parameters(self.stage_units(stage))

    def __str__(self) -> str:
        return _table(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; inverse of ``from_dict``."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("units", "stages", "shardings"):
            plain[name] = [_record(item) for item in plain[name]]
        return plain | {"grid": _record(self.grid), "schedule": self.schedule.to_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Plan":
        """Raises PlanError when a key is unknown or missing, or the values do not make a plan."""
        rows = {"units": Unit, "stages": StagePlan, "shardings": TensorSharding}
        values = dict(plain)
        for name, kind in rows.items():
            if name in values:
                values[name] = _build(_rows, {"kind": kind, "rows": values[name]})
        if "grid" in values and "schedule" in values:
            values["grid"] = _build(Grid, values["grid"])
            values["schedule"] = _build(Schedule.from_dict, {"values": values["schedule"]})
        return _build(cls, values)

    def to_json(self) -> str:
        """One row of data per line."""
        lines = []
        for name, value in self.to_dict().items():
            if name in ("units", "stages", "shardings") and value:
                text = "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"
            else:
                text = json.dumps(value)
            lines.append(f"  {json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        try:
            plain = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError("plan", "JSON", f"it does not parse: {error}", "Correct the text") from error
        if not isinstance(plain, dict):
            raise PlanError("plan", "JSON", "it is not an object", "Start from a stored plan")
        return cls.from_dict(plain)


def held_parameters(units: Sequence[Unit]) -> int:
    """The values of some units on one rank, tied ones once."""
    tied = dict(pair for unit in units for pair in unit.tied)
    return sum(unit.parameters for unit in units) + sum(tied.values())


def _record(item: object) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}  # type: ignore[arg-type]


def _build(make: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """``make`` called with a JSON object as keywords, lists becoming tuples; a dataclass only with what it declares."""
    try:
        values = {name: _tuples(value) for name, value in row.items()}
        for name, hint in get_type_hints(make).items() if isinstance(make, type) else ():
            if name in values and not _fits(values[name], hint):
                raise TypeError(f"{name} is {str(values[name])[:40]!r}")
        return make(**values)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        what = getattr(make, "__qualname__", str(make))
        raise PlanError("plan", what, f"the stored values do not fit ({error})", "Correct the stored plan") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type; a whole number is a float, too."""
    arms = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, arm) for arm in arms)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        arms = arms[:1] * len(value) if arms[-1] is Ellipsis else arms
        return len(value) == len(arms) and all(map(_fits, value, arms))
    return type(value) is hint or (hint is float and type(value) is int)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rows(kind: type, rows: tuple[Mapping[str, Any], ...]) -> tuple[Any, ...]:
    return tuple(_build(kind, row) for row in rows)


def _table(plan: Plan, width: int = 120) -> str:
    grid = plan.grid
    tokens = f" x {plan.sequence_length} tokens" if plan.sequence_length else ""
    total_flops = sum(unit.flops for unit in plan.units) or 1
    header = ("stage", "pp rank", "units", "parameters/rank", "FLOPs", "peak bytes/rank", "recomputed")
    rows = []
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
            )
        )
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        f"{grid.size} ranks = tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}",
        f"global batch {plan.global_batch_size} = {plan.num_microbatches} micro-batches of {plan.micro_batch_size}"
        f"{tokens} on each of {grid.dp} replicas, {plan.dtype}",
    ]
    if plan.shardings:
        divided = sum(sharding.dim is not None for sharding in plan.shardings)
        lines.append(f"{len(plan.shardings)} tensors, {divided} of them divided over {grid.tp} tensor-parallel ranks")
    lines.append("")
    for row in [header, *rows]:
        aligned = [x.ljust(w) if i == 2 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(aligned).rstrip())
    lines += ["", f"schedule {plan.schedule.name}" + _prediction_text(plan)]
    program = str(plan.schedule).splitlines()[1:]
    for line in program[:8]:
        lines.append(line if len(line) <= width else line[: width - 4].rsplit(" ", 1)[0] + " ...")
    if len(program) > 8:
        lines.append(f"... and {len(program) - 8} ranks more")
    return "\n".join(lines)


def _prediction_text(plan: Plan) -> str:
    if not plan.predicted_time:
        return ""
    time = f"{plan.predicted_time:.3f} s" if plan.predicted_time >= 1 else f"{plan.predicted_time * 1e3:.3g} ms"
    return f", predicted on {plan.device}: {time} per step, bubble {plan.predicted_bubble:.1%}"


def bytes_text(count: int) -> str:
    """A size as people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
