"""How far the streams of a run are read: what a checkpoint says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .documents import BEGINNING, Reached
from .stream_order import WindowStart


class LaneStart(NamedTuple):
    """Where the next sample of a lane begins in a source.

    turn:     of the window of the document that has its first token.
    document: of those of the window that went to the lane.
    token:    of the document.
    """

    turn: int
    document: int
    token: int


@dataclass(frozen=True)
class Position:
    """How far a run's streams are read.

    begin:   samples that the run had consumed when it began to read them.
    samples: consumed since.
    lanes:   number of lanes.
    windows: of each source, a window before which all lanes have read.
    starts:  of lanes, by number: where each source goes on. All of them, or those that a rank has.
    """

    begin: int
    samples: int
    lanes: int
    windows: Sequence[WindowStart]
    starts: Mapping[int, Sequence[LaneStart]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        windows = [[*each[:3], [*each.place], [*each.loads]] for each in self.windows]
        starts = {}
        for lane, places in self.starts.items():
            starts[str(lane)] = [[*each] for each in places]
        return {
            "begin": self.begin,
            "samples": self.samples,
            "lanes": self.lanes,
            "windows": windows,
            "starts": starts,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Position":
        """Return what `to_json` was given. Raises ValueError, TypeError or KeyError."""
        windows = []
        for turn, epoch, window, place, loads in values["windows"]:
            reached = Reached(*map(int, place))
            start = WindowStart(int(turn), int(epoch), int(window), reached, loads=(*loads,))
            windows.append(start)
        starts = {}
        for lane, places in values["starts"].items():
            starts[int(lane)] = [LaneStart(*map(int, each)) for each in places]
        position = cls(
            int(values["begin"]),
            int(values["samples"]),
            int(values["lanes"]),
            windows=windows,
            starts=starts,
        )
        if any(len(each.loads) != position.lanes for each in position.windows):
            raise ValueError("lanes without loads")
        return position


def beginning(begin: int, lanes: int, sources: int) -> Position:
    """Return the position of a run that has read nothing.

    begin: samples that it consumed of other data.
    """
    window = WindowStart(0, 0, 0, BEGINNING, loads=(0,) * lanes)
    start = LaneStart(0, 0, 0)
    return Position(
        begin,
        0,
        lanes,
        windows=[window] * sources,
        starts=dict.fromkeys(range(lanes), [start] * sources),
    )


def merged(parts: Sequence[Mapping[str, Any]], where: str) -> Position:
    """Return the position of a job, of what its ranks have. Raises CheckpointError if they do not
    agree.

    where: for the error.
    """
    positions = [Position.from_json(part) for part in parts]
    first = positions[0]
    windows = []
    for of_source in zip(*(each.windows for each in positions), strict=True):
        windows.append(min(of_source, key=lambda window: window.turn))
    starts: dict[int, Sequence[LaneStart]] = {}
    for position in positions:
        for lane, places in position.starts.items():
            if starts.setdefault(lane, places) != places:
                reason = f"ranks stand at different places of lane {lane} of the streams"
                remedy = "Give all hosts the same files, and resume from the last checkpoint"
                raise CheckpointError("--save", where, reason, remedy)
    assert len(starts) == first.lanes, "every lane was read by a rank"
    return Position(first.begin, first.samples, first.lanes, windows=windows, starts=starts)
