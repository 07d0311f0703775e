"""The state of transformers' callbacks in checkpoints."""

from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from ...errors import CheckpointError


def exportable(handler: CallbackHandler, control: TrainerControl) -> list[Any]:
    """Return the callbacks whose state is saved, and the control: each an `ExportableState`."""
    return [each for each in [*handler.callbacks, control] if isinstance(each, ExportableState)]


def export(state: TrainerState, handler: CallbackHandler, control: TrainerControl) -> None:
    """Store the states in ``state.stateful_callbacks``; several callbacks of one class
    make a list.
    """
    state.stateful_callbacks = TrainerState(
        stateful_callbacks=exportable(handler, control)
    ).stateful_callbacks


def restore(
    state: TrainerState, handler: CallbackHandler, control: TrainerControl
) -> TrainerControl:
    """Replace callbacks by those of the same class that ``state`` has; return the control to
    continue with.

    Raises CheckpointError if a state does not fit its class.
    """
    states: Any = state.stateful_callbacks  # which `TrainerState` makes a dictionary of
    for name, saved in states.items():
        saved = saved if isinstance(saved, list) else [saved]
        present = [each for each in exportable(handler, control) if type(each).__name__ == name]
        for callback, values in zip(present, saved, strict=False):
            fresh: Any = _made_of(type(callback), values)
            if callback is control:
                control = fresh
            else:
                handler.callbacks[handler.callbacks.index(callback)] = fresh
    return control


def _made_of(kind: type[ExportableState], values: dict) -> ExportableState:
    try:
        fresh = kind.from_state(values)
        if kind is TrainerControl and not all(
            isinstance(wish, bool) for wish in vars(fresh).values()
        ):
            raise TypeError("a wish is neither true nor false")
    except Exception as error:  # a callback's constructor may raise anything
        remedy = (
            "Set restore_callback_states_from_checkpoint=False, or resume from another checkpoint"
        )
        raise CheckpointError(
            "state of callback", kind.__name__, f"{type(error).__name__}: {error}", remedy
        ) from error
    return fresh
