"""Predicted steps beside those that were measured, of the starts of runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron_merak.errors import ReportError
from megatron_merak.report.facts import Facts, facts_of

_WARM_UPS = 2  # steps of a start that do not count
_REMEDY = "Name directories that --run-dir of merak-pretrain or merak-pretrain-hf wrote"


@dataclass(frozen=True)
class HeldPrediction:
    """One start of a run whose plan predicted a step.

    layout:    of its plan, as a plan prints it.
    device:    that it ran on, and that it was planned for where that has another name.
    planned:   name of the device that it was planned for.
    predicted: seconds of a step, by the model without a factor of earlier runs.
    measured:  the median of its steps, in seconds, after the first ones.
    steps:     that were measured.
    """

    layout: str
    device: str
    planned: str
    predicted: float
    measured: float
    steps: int

    @property
    def ratio(self) -> float:
        """Measured, in predictions."""
        return self.measured / self.predicted


def predictions_of(directory: Path) -> list[HeldPrediction]:
    """Return the starts in the directory of a run that have a prediction and steps of its batch.

    Raises ReportError for a directory without one, and for damaged files.
    """
    facts = facts_of(directory)
    if facts.history.modelled:
        reason = "its steps are of an emulated cluster, whose time is a model's, too"
        raise ReportError("RUN_DIR", directory, reason, _REMEDY)
    found = [*_held(facts)]
    if not found:
        reason = f"it has no prediction with more than {_WARM_UPS} measured steps"
        raise ReportError("RUN_DIR", directory, reason, _REMEDY)
    return found


def _held(facts: Facts) -> Iterable[HeldPrediction]:
    history = facts.history
    if not history.starts:  # of a trainer, or of other lines than a run's
        return
    places = [start.iteration for start in history.starts]
    ends = [*places[1:], history.last]
    for start, (before, last) in zip(history.starts, zip(places, ends, strict=True), strict=True):
        number = start.number
        if number is None or number >= len(facts.starts):
            continue
        record = facts.starts[number]
        predicted = record.get("predicted_seconds")
        batch = record.get("planned_samples")
        rows = [
            history.steps[place] for place in range(before + 1, last + 1) if place in history.steps
        ]
        seconds = [
            row.seconds for row in rows[_WARM_UPS:] if row.seconds and row.samples in (None, batch)
        ]
        factor = record.get("step_factor", 1.0)
        if type(predicted) is not float or predicted <= 0 or not seconds or not factor > 0:
            continue
        device = str(record.get("device_name", "?"))
        planned = str(record.get("planned_on", device))
        yield HeldPrediction(
            str(record.get("layout", "?")),
            device if planned in device else f"{device}, planned as {planned}",
            planned,
            predicted / factor,
            measured=median(seconds),
            steps=len(seconds),
        )


@dataclass(frozen=True)
class DeviceFactor:
    """By how much steps on a device are longer than predicted: the median of starts, the least and
    the most.
    """

    device: str
    factor: float
    least: float
    most: float
    starts: int


def factors(held: Iterable[HeldPrediction]) -> list[DeviceFactor]:
    """Return a factor for each device, in the order in which they come."""
    ratios: dict[str, list[float]] = {}
    for each in held:
        ratios.setdefault(each.device, []).append(each.ratio)
    return [
        DeviceFactor(device, median(rows), min(rows), max(rows), len(rows))
        for device, rows in ratios.items()
    ]
