"""The history of a run, iteration by iteration, read from lines of metrics.

A run that was killed and resumed did some iterations twice. A line of kind "start" says where
training began; what earlier lines say of later iterations was lost with the process, and the page
shows the repeated ones.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LoggedStep:
    """One iteration; None for unknown and not finite values.

    seconds: its duration.
    samples: trained on.
    skipped: whether the gradient was not finite, and not applied.
    """

    iteration: int
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    samples: int | None = None
    loss_scale: float | None = None
    skipped: bool = False

    @property
    def rate(self) -> float | None:
        """Samples per second."""
        return self.samples / self.seconds if self.samples and self.seconds else None


@dataclass(frozen=True)
class Start:
    """Training began after ``iteration``.

    number:   index of this start in run.json; None if unknown.
    repeated: iterations that were done before and were lost.
    """

    iteration: int
    number: int | None = None
    repeated: int = 0


@dataclass
class History:
    """The values of a run.

    steps:       by iteration.
    evaluations: losses by iteration, of "valid" and "test".
    metrics:     other values of evaluations, by name, then iteration.
    modelled:    whether seconds are those of an emulated cluster.
    consumed:    samples so far.
    """

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    modelled: bool = False
    consumed: int | None = 0

    @property
    def last(self) -> int:
        """The last iteration with a value."""
        places = [*self.steps, *(place for points in self.evaluations.values() for place in points)]
        return max(places, default=self.starts[-1].iteration if self.starts else 0)

    def begin(self, iteration: int, number: int | None = None, consumed: int | None = None) -> None:
        """Record that training begins after ``iteration``."""
        lost = [place for place in self.steps if place > iteration]
        recorded: list[dict[int, Any]] = [self.steps, *self.evaluations.values()]
        for points in recorded:
            for place in [place for place in points if place > iteration]:
                del points[place]
        self.starts.append(Start(iteration, number, len(lost)))
        self.consumed = consumed

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line. Raises ValueError if it is not of a run."""
        kind = row.get("kind")
        iteration = row.get("iteration")
        if type(iteration) is not int or iteration < 0:
            raise ValueError("it has no iteration")
        if kind == "start":
            self.begin(iteration, _count(row, "start"), _count(row, "consumed_samples"))
        elif kind == "train":
            self._train(iteration, row)
        elif kind in ("valid", "test"):
            loss = _number(row, "loss")
            if loss is not None:
                self.evaluations.setdefault(kind, {})[iteration] = loss
        else:
            raise ValueError("its kind is none of train, valid, test and start")

    def _train(self, iteration: int, row: Mapping[str, Any]) -> None:
        latest = max(self.steps, default=0)
        if iteration < latest:  # a file without starts
            self.begin(iteration - 1)
        before = self.consumed
        self.consumed = _count(row, "consumed_samples")
        samples = None
        if before is not None and self.consumed is not None and self.consumed > before:
            samples = self.consumed - before
        if not self.starts and iteration > 1 and not self.steps:
            samples = None
        self.modelled = self.modelled or "modelled_seconds" in row
        self.steps[iteration] = LoggedStep(
            iteration,
            loss=_number(row, "loss"),
            learning_rate=_number(row, "learning_rate"),
            grad_norm=_number(row, "grad_norm"),
            seconds=_number(row, "modelled_seconds" if "modelled_seconds" in row else "seconds"),
            samples=samples,
            loss_scale=_number(row, "loss_scale"),
            skipped=row.get("skipped") is True,
        )


def history_of(rows: Iterable[Mapping[str, Any]]) -> History:
    """Return the history in lines. Raises ValueError for one that is not of a run."""
    history = History()
    for row in rows:
        history.add(row)
    return history


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise ValueError(f"its {name} is no number")
    return float(value) if math.isfinite(value) else None


def _count(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is not None and type(value) is not int:
        raise ValueError(f"its {name} is no whole number")
    return value
