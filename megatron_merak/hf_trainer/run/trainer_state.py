"""``trainer_state.json``: transformers' ``TrainerState`` on disk, checked field by field when it is
read.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from transformers import TrainerState

from ...errors import CheckpointError, MerakError
from ...parallel.agree import broadcast_json, together
from ...stages.saved_run import is_count
from .run_directory import TRAINER_STATE, write_text

Check = Callable[[object], bool]
_LARGEST = 1e300  # so that an int is a float, too


def is_number(value: object) -> bool:
    """Whether a value is a number, including NaN and infinities."""
    return type(value) is float or type(value) is int and abs(value) < _LARGEST


def is_amount(value: Any) -> bool:
    """Whether a value is a finite number, 0 or more."""
    return type(value) in (int, float) and 0 <= value < _LARGEST


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _is_callbacks(value: object) -> bool:
    """Whether a value has ``ExportableState.state()`` by class name, or lists of it for several
    callbacks of one class.
    """
    if not isinstance(value, dict):
        return False
    states = [
        state for each in value.values() for state in (each if isinstance(each, list) else [each])
    ]
    return all(isinstance(s, dict) and {"args", "attributes"} == {*s} and _dicts(s) for s in states)


def _dicts(state: Mapping) -> bool:
    return all(isinstance(part, dict) for part in state.values())


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


CHECKS: Mapping[str, tuple[Check, str]] = MappingProxyType(
    {
        "epoch": (_optional(is_amount), "a number of epochs"),
        "global_step": (is_count, "a number of steps"),
        "max_steps": (is_count, "a number of steps"),
        "logging_steps": (_optional(is_amount), "a number of steps"),
        "eval_steps": (_optional(is_amount), "a number of steps"),
        "save_steps": (_optional(is_amount), "a number of steps"),
        "train_batch_size": (_optional(is_count), "a batch size"),
        "num_train_epochs": (is_amount, "a number of epochs"),
        "num_input_tokens_seen": (is_amount, "a number of tokens"),
        "total_flos": (is_amount, "a number of operations"),
        "log_history": (_optional(_is_history), "a list of logs"),
        "best_metric": (_optional(is_number), "a number"),
        "best_global_step": (_optional(is_count), "a step"),
        "best_model_checkpoint": (_optional(_is_text), "a path"),
        "is_local_process_zero": (_is_flag, "true or false"),
        "is_world_process_zero": (_is_flag, "true or false"),
        "is_hyper_param_search": (_is_flag, "true or false"),
        "trial_name": (_optional(_is_text), "a name"),
        "trial_params": (_optional(lambda value: isinstance(value, dict)), "names and values"),
        "stateful_callbacks": (_optional(_is_callbacks), "states of callbacks"),
    }
)


def parse(text: str) -> TrainerState:
    """Parse the state. Raises ValueError that names the wrong field."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    fields = [field.name for field in dataclasses.fields(TrainerState)]
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"transformers' TrainerState has no field {name!r}")
        check, kind = CHECKS.get(name, (lambda _: True, ""))
        if not check(value):
            shown = repr(value)
            raise ValueError(
                f"{name} is {shown[:60]}{'...' if len(shown) > 60 else ''}, which is not {kind}"
            )
    if values.get("train_batch_size") is None:
        raise ValueError("it has no train_batch_size")
    return TrainerState(**values)


def read(directory: Path, group: dist.ProcessGroup | None) -> TrainerState:
    """Read the trainer's state of a checkpoint. Collective; raises CheckpointError."""
    text = None
    with together(group, "cpu"):
        if group is None or dist.get_rank(group) == 0:
            path = directory / TRAINER_STATE
            try:
                text = path.read_text(encoding="utf-8")
                parse(text)
            except MerakError:
                raise
            except (OSError, ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(
                    "trainer state", path, str(error), "Resume from another checkpoint"
                ) from error
    return parse(broadcast_json(text, group, "cpu"))


def text_of(state: TrainerState) -> str:
    """Return what a checkpoint says of the trainer's state."""
    return json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"


def write(directory: Path, state: TrainerState, group: dist.ProcessGroup | None) -> None:
    """Write the trainer's state into a checkpoint. Collective."""
    write_text(directory, TRAINER_STATE, text_of(state), group)
