"""Runs of HuggingFace trainers: their history is the log of trainer_state.json, in the run's
directory or a checkpoint.

    output_dir/trainer_state.json                                    written by save_state()
               checkpoint-500/trainer_state.json                     one per checkpoint
                              training_args.json
                              training_state/iter_*/manifest.json    of MerakTrainer, with the plan
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_merak.errors import MerakError
from megatron_merak.plan import Plan
from megatron_merak.report.history import History, LoggedStep
from megatron_merak.strict_json import parse

STATE = "trainer_state.json"
ARGUMENTS = "training_args.json"
# Entries of an evaluation that say how fast it was, not how good the model is.
_SPEED = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


def newest_state(directory: Path) -> Path | None:
    """Return the most advanced trainer_state.json of a run's directory or a checkpoint; None
    without any.
    """
    paths = [
        path
        for path in (directory / STATE, *directory.glob(f"checkpoint-*/{STATE}"))
        if path.is_file()
    ]
    return max(paths, key=lambda path: (_steps_of(path), path.parent == directory), default=None)


def _steps_of(path: Path) -> int:
    if path.parent.name.startswith("checkpoint-"):
        number = path.parent.name.removeprefix("checkpoint-")
        return int(number) if number.isdecimal() else -1
    try:
        step = parse(path.read_text(encoding="utf-8"), finite=False).get("global_step")
    except (OSError, ValueError, AttributeError):
        return 1 << 62  # it is read, and what is wrong is told
    return step if type(step) is int else 1 << 62


def history_of_state(text: str) -> tuple[History, dict[str, Any]]:
    """Return the history in a trainer_state.json, and its content. Raises ValueError for any other
    text.
    """
    state = parse(text, finite=False)
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError("it has no log_history")
    history = History()
    for entry in state["log_history"]:
        step = entry.get("step") if isinstance(entry, dict) else None
        if type(step) is not int:
            raise ValueError("an entry of its log_history has no step")
        if "loss" in entry:
            history.steps[step] = LoggedStep(
                iteration=step,
                loss=_number(entry["loss"]),
                learning_rate=_number(entry.get("learning_rate")),
                grad_norm=_number(entry.get("grad_norm")),
            )
        for name, value in entry.items():
            _note(history, name, step, _number(value))
    return history, state


def _note(history: History, name: str, step: int, value: float | None) -> None:
    """Record a value of an evaluation."""
    if value is None or not name.startswith("eval_") or name.endswith(_SPEED):
        return
    if name == "eval_loss":
        history.evaluations.setdefault("valid", {})[step] = value
    else:
        history.metrics.setdefault(name.removeprefix("eval_"), {})[step] = value


def plan_beside(path: Path) -> Plan | None:
    """Return the plan in the newest training state near a trainer_state.json; None without one of
    this version.
    """
    state = "training_state/iter_*/manifest.json"
    manifests = [*path.parent.glob(state), *path.parent.glob(f"checkpoint-*/{state}")]
    if not manifests:
        return None
    newest = max(manifests, key=lambda manifest: manifest.parent.name)
    try:
        return Plan.from_dict(
            parse(newest.read_text(encoding="utf-8"), finite=False)["meta"]["plan"]
        )
    except (OSError, ValueError, KeyError, TypeError, MerakError):
        return None


def arguments_beside(path: Path) -> dict[str, Any]:
    """Return the arguments of the run that are not empty; none without a training_args.json beside
    ``path``.
    """
    try:
        arguments = parse((path.parent / ARGUMENTS).read_text(encoding="utf-8"), finite=False)
    except (OSError, ValueError):
        return {}
    empty: tuple[Any, ...] = (None, False, "", [], {})
    return (
        {name: value for name, value in arguments.items() if value not in empty}
        if isinstance(arguments, Mapping)
        else {}
    )


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None
