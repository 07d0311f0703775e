"""Schedules from files, in the text form of ``Schedule`` or as torch.distributed.pipelining writes
and loads them: a CSV with a row per rank, a cell per time slot, and empty cells where a rank
waits::

    0F0,0F1,,0I0,0W0,,0B1
    ,1F0,1I0,1F1,1W0,1B1
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import Entry, Kind, Op, Schedule, entry_text, ops_of
from megatron_merak.pipeline_parallel.passes import add_communication

_OP = re.compile(r"\d+(?:SEND_F|RECV_F|SEND_B|RECV_B|F|B|W|R)\d+")
_CELL = re.compile(r"([0-9]{1,9})([FIBW])([0-9]{1,9})")
_GROUP = re.compile(r"\((.*)\)OVERLAP_F_B")
_DERIVED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_BACKWARDS = {"I": "input gradient", "B": "full backward", "W": "weight gradient"}
_EITHER = (
    "Start with a line like '1f1b stages=4 microbatches=8', or write CSV with a row per "
    "rank and cells like 0F3, 0B3"
)
Cell = tuple[int, int, str]  # row and column, from 1, and what is written there


def read_schedule(path: str | Path, what: str = "schedule file") -> Schedule:
    """Return the checked schedule of a file; the first line determines the format.

    path: of the file.
    what: the flag or argument that named it, for messages.

    Raises ScheduleError, with the position in the file, for another format, and for a schedule that
    ``check`` refuses.
    """
    places: dict[str, str] = {}
    try:
        text = _content(Path(path))
        first = next((line for line in text.splitlines() if line.strip()), "")
        if "stages=" in first:
            places.update(_places_of_text(text))
            schedule = Schedule.parse(text)
        else:
            cells = list(_cells(text))
            places.update(_places_of_cells(cells))
            schedule = _from_cells(cells, re.sub(r"\s+", "-", Path(path).stem) or "schedule")
        check(schedule)
    except ScheduleError as error:
        named = "" if error.what == "schedule" else f"{error.what} {error.value}: "
        reason = named + error.reason + _where(error.reason, places)
        raise ScheduleError(what, path, reason, error.remedy) from None
    return schedule


def executable(schedule: Schedule, what: str, path: str | Path) -> Schedule:
    """Return the compute ops of a schedule from a file, from which the runtime derives the rest.

    what, path: see ``read_schedule``.

    Raises ScheduleError for what would not run as written: transfers in other places than the
    derived ones, groups that are not a forward and a backward, and forwards out of order
    (statistics that forwards update, such as those of batch norm, would depend on it).
    """
    compute = tuple(
        tuple(e for e in program if ops_of(e)[0].kind.is_compute) for program in schedule.ranks
    )
    bare = replace(schedule, ranks=compute)
    if schedule.has_communication and add_communication(bare) != schedule:
        reason = (
            "its transfers stand elsewhere than where this library derives them from the "
            "compute ops"
        )
        raise ScheduleError(what, path, reason, "Remove the SEND and RECV ops")
    latest: dict[int, Op] = {}
    for entry in bare.entries():
        ops = ops_of(entry)
        if len(ops) > 1 and sorted(op.kind for op in ops) != [Kind.B, Kind.F]:
            reason = (
                f"it runs {entry_text(entry)} together, and only a forward and a backward can be"
            )
            raise ScheduleError(what, path, reason, "Write the others one after another")
        for op in (op for op in ops if op.kind is Kind.F):
            before = latest.setdefault(op.stage, op)
            if before.microbatch > op.microbatch:
                reason = (
                    f"rank {bare.rank_of(op.stage)} runs {op} after {before}: its forwards "
                    "are out of order"
                )
                raise ScheduleError(
                    what, path, reason, "Run them in the order of the micro-batches"
                )
            latest[op.stage] = op
    return bare


def _content(path: Path) -> str:
    """Return the text of a file. Raises ScheduleError if it is no text, or cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = f"it cannot be read as text ({error})"
        raise ScheduleError(
            "schedule", path, reason, "Name a file with a schedule, as text or CSV"
        ) from None


def _where(reason: str, places: Mapping[str, str]) -> str:
    """Return the positions of the ops that a reason names."""
    named = [f"{op}: {places[op]}" for op in dict.fromkeys(_OP.findall(reason)) if op in places]
    return f" ({'; '.join(named)})" if named else ""


def _places_of_text(text: str) -> Iterator[tuple[str, str]]:
    for at, line in enumerate(text.splitlines(), 1):
        for match in _OP.finditer(line):
            yield match[0], f"line {at}, column {match.start() + 1}"


def _places_of_cells(cells: Iterable[Cell]) -> Iterator[tuple[str, str]]:
    """Return positions by this package's names of the ops: an I is a B."""
    for row, column, text in cells:
        for part in _parts(text):
            if _CELL.fullmatch(part):
                op = part.replace("I", "B")
                yield op, ("" if op == part else f"{part} in ") + f"row {row}, column {column}"


def _cells(text: str) -> Iterator[Cell]:
    """Return the cells that are not empty. Raises ScheduleError if the text is no CSV."""
    rows = csv.reader(text.splitlines())
    try:
        for at, row in enumerate(rows, 1):
            yield from (
                (at, column, cell.strip()) for column, cell in enumerate(row, 1) if cell.strip()
            )
    except csv.Error as error:
        reason = f"row {rows.line_num} is no CSV ({error})"
        raise ScheduleError("schedule", "(CSV)", reason, _EITHER) from None


def _parts(text: str) -> list[str]:
    """Return the steps in a cell, several if they run together."""
    group = _GROUP.fullmatch(text)
    return [part.strip() for part in group[1].split(";")] if group else [text]


def _from_cells(cells: list[Cell], name: str) -> Schedule:
    if not cells:
        raise ScheduleError("schedule", name, "it is empty", _EITHER)
    # (stage, micro-batch) -> backward step -> its place
    steps: dict[tuple[int, int], dict[str, str]] = {}
    homes: dict[int, tuple[int, str]] = {}  # stage -> its row, and the first cell that tells
    programs: dict[int, list[Entry]] = {}
    for row, column, text in cells:
        ops = []
        for part in _parts(text):
            stage, kind, microbatch = _step(part, row, column)
            home, first = homes.setdefault(stage, (row, part))
            if home != row:
                reason = (
                    f"stage {stage} is on two ranks: {first} in row {home}, {part} in row "
                    f"{row}, column {column}"
                )
                raise ScheduleError(
                    "schedule", name, reason, "Keep all steps of a stage in one row"
                )
            if kind in _BACKWARDS:
                steps.setdefault((stage, microbatch), {})[kind] = (
                    f"{part} in row {row}, column {column}"
                )
            ops.append(Op(stage, Kind.B if kind == "I" else Kind(kind), microbatch))
        programs.setdefault(row, []).append(ops[0] if len(ops) == 1 else tuple(ops))
    empty = next((row for row in range(1, max(programs)) if row not in programs), None)
    if empty is not None:
        reason = f"row {empty} is empty: rank {empty - 1} has nothing to do"
        raise ScheduleError("schedule", name, reason, "Give every rank a stage, or remove the row")
    _check_backwards(steps, name)
    stages = max(homes) + 1
    microbatches = 1 + max(
        op.microbatch for program in programs.values() for entry in program for op in ops_of(entry)
    )
    missing = next((stage for stage in range(stages) if stage not in homes), None)
    if missing is not None:
        reason = f"no row has a step of stage {missing}, and there is a stage {stages - 1}"
        raise ScheduleError("schedule", name, reason, "Number the stages from 0, without gaps")
    placement = tuple(homes[stage][0] - 1 for stage in range(stages))
    usual = tuple(stage % len(programs) for stage in range(stages))
    ranks = tuple(tuple(programs[row]) for row in sorted(programs))
    return Schedule(
        name, stages, microbatches, ranks, placement=() if placement == usual else placement
    )


def _step(text: str, row: int, column: int) -> tuple[int, str, int]:
    """Return stage, letter and micro-batch of a step. Raises ScheduleError."""
    if match := _CELL.fullmatch(text):
        return int(match[1]), match[2], int(match[3])
    what = f"{text[:40]!r} in row {row}, column {column}"
    where = "schedule"
    if _DERIVED.fullmatch(text):
        reason = (
            f"{what} is a step of torch's runtime: here transfers and reductions follow "
            "from the compute steps"
        )
        raise ScheduleError(
            where, text, reason, "Dump it with format='compute_only', or remove such cells"
        )
    remedy = "Write 0F3, 0B3, 0I3 and 0W3 (stage, step, micro-batch), or (0F4;0B3)OVERLAP_F_B"
    raise ScheduleError(
        where,
        text,
        f"{what} is no step of a schedule",
        remedy if column > 1 or row > 1 else _EITHER,
    )


def _check_backwards(steps: Mapping[tuple[int, int], Mapping[str, str]], name: str) -> None:
    """Check that each backward is one step (B), or two (I and W)."""
    for (stage, microbatch), kinds in steps.items():
        if kinds.keys() in ({"B"}, {"I", "W"}):
            continue
        listed = ", ".join(f"{place} ({_BACKWARDS[kind]})" for kind, place in sorted(kinds.items()))
        reason = f"of stage {stage} and micro-batch {microbatch} it has {listed}"
        raise ScheduleError("schedule", name, reason, "Give each a B, or both an I and a W")
