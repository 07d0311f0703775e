"""The state of transformers' callbacks in checkpoints."""

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState


def exportable(handler: CallbackHandler, control: TrainerControl) -> list[ExportableState]:
    """The callbacks whose state is saved, and the control."""
    return [each for each in [*handler.callbacks, control] if isinstance(each, ExportableState)]


def export(state: TrainerState, handler: CallbackHandler, control: TrainerControl) -> None:
    """Write the states into ``state.stateful_callbacks``; several callbacks of one class make a list."""
    state.stateful_callbacks = TrainerState(stateful_callbacks=exportable(handler, control)).stateful_callbacks


def restore(state: TrainerState, handler: CallbackHandler, control: TrainerControl) -> TrainerControl:
    """Replace callbacks by those of the same class that ``state`` holds; return the control to go on with."""
    for name, saved in state.stateful_callbacks.items():
        saved = saved if isinstance(saved, list) else [saved]
        present = [each for each in exportable(handler, control) if type(each).__name__ == name]
        for callback, values in zip(present, saved, strict=False):
            fresh = type(callback).from_state(values)
            if callback is control:
                control = fresh
            else:
                handler.callbacks[handler.callbacks.index(callback)] = fresh
    return control
