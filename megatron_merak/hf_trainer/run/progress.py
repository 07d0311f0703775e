"""The position of a run, beside the trainer's state: JSON in the training state, checked when it is
read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import CheckpointError
from ...stages.saved_run import is_count
from .trainer_state import Check, is_amount, is_number

_ODD = "float"  # the key of an object that stands for a number which JSON does not have


@dataclass
class DataPlace:
    """How far a run is in its data.

    epoch, samples:  where it is: samples of the epoch that are used.
    first_epoch:     where this call of train began.
    skipped_batches: of that epoch, which an earlier call has used.
    more_steps:      see ``RunPosition``.
    """

    epoch: int = 0
    samples: int = 0
    first_epoch: int = 0
    skipped_batches: int = 0
    more_steps: int = 0

    def now(self) -> tuple[int, int]:
        """Return epoch and samples."""
        return self.epoch, self.samples

    def move(self, epoch: int, samples: int) -> None:
        """Go to a place."""
        self.epoch = epoch
        self.samples = samples


@dataclass(frozen=True)
class RunPosition:
    """The position of a run.

    rate:            ``LearningRate.state()``.
    pending_loss:    sum since the last log.
    position:        epoch, and samples of it that were used.
    dataset:         its fingerprint.
    model:           class and configuration.
    owes_evaluation: the last step was to be followed by one, and the run was interrupted.
    grad_norm:       of the last step, for a log that follows without another one; None: there was
                     none.
    used_rate:       learning rate of the last step, likewise.
    grouped_by:      samples that are sorted together by length in the epoch; None where they are
                     not, and in older checkpoints, whose steps had as many.
    more_steps:      steps beyond those that the run's epochs have with its present batches, since
                     it began with others; below 0: fewer.
    """

    rate: dict
    pending_loss: float
    last_logged: int
    seeds: list
    position: list
    global_batch: int
    dataset: dict
    model: dict
    owes_evaluation: bool = False
    grad_norm: float | None = None
    used_rate: float | None = None
    grouped_by: int | None = None
    more_steps: int = 0

    def to_json(self) -> dict:
        return _encode(asdict(self))

    @staticmethod
    def of_json(saved: object, path: Path, rate: Mapping) -> "RunPosition":
        """Parse a saved position.

        rate: the present ``LearningRate.state()``; the saved one must have the same form.

        Raises CheckpointError.
        """
        remedy = "Resume from another checkpoint"
        try:
            values: dict[str, Any] = {**_ABSENT, **_decode(saved)}
            for name, check in _CHECKS.items():
                if name not in values:
                    raise ValueError(f"it has no {name}")
                if not check(values[name]):
                    raise ValueError(
                        f"{name} is {str(values[name])[:60]!r}, which makes no sense there"
                    )
            progress = RunPosition(**{name: values[name] for name in _CHECKS})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError("training state", path, str(error), remedy) from error
        theirs = len(progress.rate["rates"]) // 2
        groups = len(rate["rates"]) // 2
        if theirs != groups:
            reason = f"the checkpoint's optimizer has {theirs} parameter groups"
            raise CheckpointError(
                "optimizer.param_groups",
                groups,
                reason,
                "Give the optimizer of the checkpoint's run",
            )
        scheduler = rate["scheduler"]
        for name in sorted({*progress.rate["scheduler"], *scheduler}):
            if not _alike(name, progress.rate["scheduler"].get(name), scheduler.get(name)):
                reason = f"the checkpoint has another kind of schedule: its {name} does not fit"
                raise CheckpointError(
                    "lr_scheduler_type", path, reason, "Give the schedule of the checkpoint's run"
                )
        return progress


def model_of(saved: object) -> Mapping[str, Any] | None:
    """Return class and configuration of the model in a saved position; None: it has none that can
    be read.
    """
    try:
        model = _decode(saved)["model"]
        return model if _CHECKS["model"](model) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _is_pair(check: Check, other: Check) -> Check:
    return lambda value: (
        isinstance(value, list) and len(value) == 2 and check(value[0]) and other(value[1])
    )


def _is_rates(value: object) -> bool:
    """Whether a value has learning rate and weight decay of each parameter group."""
    return isinstance(value, list) and len(value) % 2 == 0 and all(map(is_amount, value))


def _is_fingerprint(value: Any) -> bool:
    length = value["length"]
    samples = value["samples"]
    return (length is None or is_count(length)) and isinstance(samples, str | None)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "rate": lambda value: isinstance(value["scheduler"], dict) and _is_rates(value["rates"]),
    "pending_loss": is_number,
    "last_logged": is_count,
    "seeds": _is_pair(
        lambda seed: type(seed) is int, lambda seed: seed is None or type(seed) is int
    ),
    "position": _is_pair(is_count, is_count),
    "global_batch": is_count,
    "dataset": _is_fingerprint,
    "model": lambda value: (
        isinstance(value["class"], str) and isinstance(value["config"], dict | None)
    ),
    "owes_evaluation": lambda value: isinstance(value, bool),
    "grad_norm": lambda value: value is None or is_number(value),
    "used_rate": lambda value: value is None or is_number(value),
    "grouped_by": lambda value: value is None or is_count(value) and value > 0,
    "more_steps": lambda value: type(value) is int,
}
# in older checkpoints
_ABSENT = MappingProxyType(
    {
        "owes_evaluation": False,
        "grad_norm": None,
        "used_rate": None,
        "grouped_by": None,
        "more_steps": 0,
    }
)


def _alike(name: str, saved: Any, present: Any) -> bool:
    """Whether ``saved`` has the form of ``present``: number, text, None, or lists of as many of
    these.
    """
    if name == "lr_lambdas":
        return (
            isinstance(saved, list)
            and len(saved) == len(present)
            and all(s in (None, {}) for s in saved)
        )
    if isinstance(present, bool) or isinstance(saved, bool):
        return type(saved) is type(present)
    if isinstance(present, int | float):
        return is_number(saved) and (isinstance(present, float) or isinstance(saved, int))
    if isinstance(present, list):
        pairs = isinstance(saved, list) and len(saved) == len(present)
        return pairs and all(_alike("", s, p) for s, p in zip(saved, present, strict=True))
    return type(saved) is type(present)


def _encode(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_ODD: str(value)}
    if isinstance(value, dict):
        return {str(key): _encode(each) for key, each in value.items()}
    return [_encode(each) for each in value] if isinstance(value, list | tuple) else value


def _decode(value: object) -> Any:
    if isinstance(value, dict):
        return (
            float(value[_ODD])
            if [*value] == [_ODD]
            else {key: _decode(each) for key, each in value.items()}
        )
    return [_decode(each) for each in value] if isinstance(value, list) else value
