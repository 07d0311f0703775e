"""What torch's flight recorder wrote when a collective ran out of time, in words: which ranks did not
begin a collective that others wait in, or began another one.

A dump is a pickle of plain dictionaries, one file of each rank, whose name ends with the rank
(TORCH_FR_DUMP_TEMP_FILE, by default /tmp/nccl_trace_rank_0 and so on); see
torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..counting import named_ranks
from ..errors import DataError


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers: nothing that a pickle could call."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@dataclass(frozen=True)
class RecordedCall:
    """A collective, or a message of two ranks, that a rank has begun.

    number:   of its group's, from 1.
    what:     the operation, such as "all_reduce".
    values:   the shapes and types that the rank gave, in words.
    complete: whether it has ended on this rank.
    place:    the line of the program that began it; "" where that is unknown.
    """

    number: int
    what: str
    values: str
    complete: bool
    place: str

    def __str__(self) -> str:
        return f"{self.what} {self.number} of {self.values}"


@dataclass(frozen=True)
class GroupOfRank:
    """What a rank recorded of a group.

    name:     of the group, with its use where that is known.
    ranks:    its ranks of the job; empty where they were not recorded.
    calls:    its collectives by number.
    messages: its messages that have not ended.
    """

    name: str
    ranks: tuple[int, ...]
    calls: Mapping[int, RecordedCall]
    messages: tuple[RecordedCall, ...]


Dump = Mapping[str, GroupOfRank]


def read_dumps(place: Path) -> dict[int, Dump]:
    """Return what each rank recorded, by rank, and of each rank by the key of a group.

    place: a directory with the dumps of a job, or what their names begin with.

    Raises DataError where there is none, and for one that cannot be read.
    """
    directory, prefix = (place, "") if place.is_dir() else (place.parent, place.name)
    found: dict[int, Path] = {}
    for path in sorted(directory.glob(f"{prefix}*")):
        number = re.search(r"(\d+)$", path.name)
        if number and path.is_file():
            rank = int(number[1])
            if rank in found:
                reason = f"{found[rank].name} and {path.name} are both of rank {rank}"
                raise DataError("flight recorder", place, reason, "Name what one job's begin with")
            found[rank] = path
    if not found:
        reason = "there is no file whose name ends with a rank"
        remedy = "Name the directory of the dumps, or what their names begin with"
        raise DataError("flight recorder", place, reason, remedy)
    return {rank: _read(path) for rank, path in sorted(found.items())}


def _read(path: Path) -> Dump:
    try:
        with path.open("rb") as file:
            content = _Plain(file).load()
        return _groups(content)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    except pickle.UnpicklingError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    reason = f"it is no dump of torch's flight recorder ({' '.join(str(error).split())})"
    return DataError("flight recorder", path, reason, "Name the dumps of one job")


def _groups(content: Mapping[str, Any]) -> Dump:
    members = {}
    for key, group in content.get("pg_config", {}).items():
        members[str(key)] = tuple(int(rank) for rank in re.findall(r"\d+", str(group["ranks"])))
    calls: dict[str, dict[int, RecordedCall]] = {}
    messages: dict[str, list[RecordedCall]] = {}
    names: dict[str, str] = {}
    for entry in content["entries"]:
        name, use = entry["process_group"]
        key = str(name)
        names[key] = f"group {name}" if use in ("", "undefined") else f"group {name} ({use})"
        calls.setdefault(key, {})
        messages.setdefault(key, [])
        call = _call(entry)
        if not entry["is_p2p"]:
            calls[key][call.number] = call
        elif not call.complete:
            messages[key].append(call)
    return {
        key: GroupOfRank(names[key], members.get(key, ()), calls[key], tuple(messages[key]))
        for key in calls
    }


def _call(entry: Mapping[str, Any]) -> RecordedCall:
    shapes = ["x".join(map(str, shape)) or "one" for shape in entry["input_sizes"]]
    types = dict.fromkeys(entry.get("input_dtypes", ()))
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return RecordedCall(
        number=number,
        what=entry["profiling_name"].partition(":")[2],
        values=f"{', '.join(shapes) or 'nothing'} {' '.join(types)}".strip(),
        complete=bool(entry.get("retired")) or entry["state"] == "completed",
        place=_place(entry.get("frames", ())),
    )


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line that is not torch's."""
    for frame in frames:
        if "/torch/" not in frame["filename"]:
            return f"{frame['filename']}:{frame['line']}"
    return ""


def explained(dumps: Mapping[int, Dump]) -> list[str]:
    """Return lines on the groups whose ranks wait, the first collective that did not end of each.

    dumps: see `read_dumps`.
    """
    lines = []
    for key in dict.fromkeys(key for dump in dumps.values() for key in dump):
        told = {rank: dump[key] for rank, dump in dumps.items() if key in dump}
        lines += _of_group(told, dumps)
    return lines or ["every collective that was begun has ended on each of these ranks"]


def _of_group(told: Mapping[int, GroupOfRank], dumps: Mapping[int, Dump]) -> list[str]:
    first = next(iter(told.values()))
    # Members that recorded nothing of the group have begun none of its collectives.
    members = sorted({*told, *(rank for rank in first.ranks if rank in dumps)})
    lost = [rank for rank in first.ranks if rank not in dumps]
    numbers = sorted({number for group in told.values() for number in group.calls})
    lines = []
    for number in numbers:
        calls = {rank: told[rank].calls.get(number) for rank in members if rank in told}
        begun = {rank: call for rank, call in calls.items() if call is not None}
        absent = [rank for rank in members if rank not in begun and not _forgot(told, rank, number)]
        different = len({(call.what, call.values) for call in begun.values()}) > 1
        if all(call.complete for call in begun.values()) and not absent:
            continue
        lines = _told(first.name, number, begun, absent, told=told, different=different)
        break
    for rank, group in told.items():
        for call in group.messages:
            lines.append(f"{group.name}: rank {rank} waits in {call}{_at(call)}")
    if lines and lost:
        lines.append(f"{first.name}: there is no dump of {named_ranks(lost)}")
    return lines


def _forgot(told: Mapping[int, GroupOfRank], rank: int, number: int) -> bool:
    """Whether a rank's record begins behind a collective: its buffer holds the last ones only."""
    return rank in told and bool(told[rank].calls) and min(told[rank].calls) > number


def _told(
    name: str,
    number: int,
    begun: Mapping[int, RecordedCall],
    absent: Sequence[int],
    told: Mapping[int, GroupOfRank],
    different: bool,
) -> list[str]:
    lines = []
    for call in dict.fromkeys((each.what, each.values) for each in begun.values()):
        ranks = [rank for rank, each in begun.items() if (each.what, each.values) == call]
        each = begun[ranks[0]]
        verb = "has" if len(ranks) == 1 else "have"
        state = f"{verb} begun" if different or not each.complete else f"{verb} ended"
        lines.append(f"{name}: {named_ranks(ranks)} {state} {each}{_at(each)}")
    if different:
        lines.append(f"{name}: these differ, so that they wait for each other for ever")
    for rank in absent:
        calls = told[rank].calls if rank in told else {}
        last = calls[max(calls)] if calls else None
        after = f"; its last is {last}{_at(last)}" if last else ", nor any other of this group"
        lines.append(f"{name}: rank {rank} has not begun number {number}{after}")
    if not different and not absent:
        lines.append(f"{name}: all have begun it, so look at the links between these ranks")
    return lines


def _at(call: RecordedCall) -> str:
    return f" at {call.place}" if call.place else ""
