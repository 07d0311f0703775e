"""The metadata of a checkpoint about the run that wrote it, validated: any program may have written
it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..optimizer.base import Optimizer
from ..optimizer.loss_scale import is_state

_MOST = 2**62


@dataclass(frozen=True)
class SavedRun:
    """The run that wrote a checkpoint.

    iteration, consumed_samples:         see ``Trainer``.
    optimizer_steps:                     of Adam's bias correction.
    config:                              the settings by section.
    data:                                see ``data.identity``.
    model:                               see ``TrainedModel.settings``.
    global_batch_size:                   samples per step.
    loss_scale:                          see ``LossScaler.state``.
    skipped_iterations, skipped_samples: see ``Trainer``.

    In checkpoints of earlier versions ``data``, ``model``, ``global_batch_size`` and ``loss_scale``
    are None, and the skipped ones are 0.
    """

    iteration: int
    consumed_samples: int
    optimizer_steps: int
    config: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Mapping | None] | None
    model: Mapping[str, Any] | None
    global_batch_size: int | None
    loss_scale: Mapping[str, Any] | None
    skipped_iterations: int
    skipped_samples: int

    @classmethod
    def read(cls, meta: Mapping[str, Any], where: Path | str) -> "SavedRun":
        """Validate ``meta``. where: the directory, for error messages. Raises CheckpointError."""

        def get(name: str, sound: Callable[[Any], bool], what: str, default: Any = ...) -> Any:
            value = meta.get(name, default)
            if value is ... or not (sound(value) or value is default):
                problem = "is missing from" if value is ... else f"is {value!r:.60} in"
                reason = f"{name}, {what}, {problem} what it says of its run"
                raise CheckpointError(
                    "checkpoint", where, reason, "Load another iteration with --ckpt-step"
                )
            return value

        return cls(
            iteration=get("iteration", is_count, "a whole number"),
            consumed_samples=get("consumed_samples", is_count, "a whole number"),
            optimizer_steps=get("optimizer_steps", is_count, "a whole number"),
            config=get("config", _is_config, "sections of settings"),
            data=get("data", _is_data, "data sets by part", None),
            model=get("model", _is_object, "the model's settings", None),
            global_batch_size=get("global_batch_size", is_count, "a whole number", None),
            loss_scale=get("loss_scale", is_state, "the state of a loss scale", None),
            skipped_iterations=get("skipped_iterations", is_count, "a whole number", 0),
            skipped_samples=get("skipped_samples", is_count, "a whole number", 0),
        )


def check_same_optimizer(
    meta: Mapping[str, Any], optimizer: Optimizer, otherwise: str = ""
) -> None:
    """Raise CheckpointError if a checkpoint has the state of another optimizer. otherwise: a
    further remedy.
    """
    saved = meta.get("optimizer", "AdamW")  # the only one of earlier versions
    if saved != optimizer.name:
        remedy = f"Use that one{otherwise}, or start a new run from the checkpoint's weights"
        raise CheckpointError(
            "optimizer", optimizer.name, f"the checkpoint's run had {saved}", remedy
        )


def is_count(value: Any) -> bool:
    """Whether a value from JSON is a valid count."""
    return type(value) is int and 0 <= value < _MOST


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_config(value: Any) -> bool:
    named = ("model", "train", "optimizer", "data")
    return _is_object(value) and all(_is_object(value.get(name)) for name in named)


def _is_data(value: Any) -> bool:
    return _is_object(value) and all(part is None or _is_part(part) for part in value.values())


def _is_part(value: Any) -> bool:
    if not (
        _is_object(value)
        and _is_object(value.get("samples"))
        and isinstance(value.get("sources"), list)
    ):
        return False
    return all(
        _is_object(source) and {"prefix", "fingerprint", "sequences"} <= source.keys()
        for source in value["sources"]
    )
