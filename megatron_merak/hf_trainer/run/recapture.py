"""Changes of a model after a trainer captured it: weights are adopted, the model is captured anew,
or it is an error.

transformers.Trainer runs the model as it is at every call. A captured graph, and weights in buffers
of their own, are as they were when the trainer was first used, so changes are looked for before
each use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint.hf import source_of
from ...errors import ConfigError
from ...optimizer.base import LocalOptimizer
from ...parallel.agree import gather_json, together
from ...parallel.scattered import Scattered
from ...stages.captured import CapturedModel
from ...stages.model_fingerprint import ModelChange

_ANEW = (
    "Make the change before the trainer is first used, or make a new MerakTrainer with the "
    "changed model"
)
_DIVIDED = (
    "Make the change before the trainer is first used; else call save_model, and make a new "
    "MerakTrainer with the "
    "changed model of that directory"
)


def _own_optimizer(engine: CapturedModel) -> LocalOptimizer:
    """Return the optimizer, which no parameter server has."""
    assert isinstance(engine.optimizer, LocalOptimizer)
    return engine.optimizer


class Moments:
    """The optimizer state of an engine that has trained, for another engine of the same
    parameters.
    """

    def __init__(self, engine: CapturedModel):
        self.buffer = engine.buffer
        self.optimizer = _own_optimizer(engine)
        self.gatherer = engine.parameters.gatherer

    def fit(self, engine: CapturedModel) -> bool:
        shapes = [
            {name: slot.shape for name, slot in each.slots.items()}
            for each in (self.buffer, engine.buffer)
        ]
        alike = (
            self.optimizer.name == engine.optimizer.name
            and self.buffer.dtype == engine.buffer.dtype
        )
        return alike and shapes[0] == shapes[1]

    @torch.no_grad()
    def give(self, engine: CapturedModel) -> None:
        """Copy the state into ``engine``. It keeps its weights, but takes a master copy that rounds
        to them.

        Collective over all ranks.
        """
        optimizer = _own_optimizer(engine)
        state = optimizer.state()
        gatherer = engine.parameters.gatherer
        for key in state:
            theirs = self.optimizer.state()[key]
            flat = self.gatherer.full(theirs)
            into = gatherer.full(state[key])
            for name in theirs.names if isinstance(theirs, Scattered) else self.buffer.slots:
                own = engine.buffer.view(into, name)
                other = self.buffer.view(flat, name)
                if key == "master":
                    rounds = other.to(self.buffer.dtype) == own.to(self.buffer.dtype)
                    other = torch.where(rounds, other, own)
                own.copy_(other)
            ours = state[key]
            if isinstance(ours, Scattered):
                ours.take(engine.buffer.buckets)
            else:
                engine.buffer.take(ours, into)
        for kind, values in optimizer.other_state().items():
            for name, value in values.items():
                value.copy_(self.optimizer.other_state()[kind][name])
        optimizer.missed = self.optimizer.missed
        optimizer.steps = self.optimizer.steps


def check_model(trainer: Any, saves: bool = False) -> None:
    """Let the engine of ``trainer`` follow the user's changes of the model. Collective over all
    ranks.

    saves: only weights matter.

    Raises ConfigError on every rank for a change that cannot be followed.
    """
    engine = trainer._engine
    if not isinstance(engine, CapturedModel) or engine.user_model is None:
        return
    group = trainer.mesh.control
    with together(group, "cpu"):
        check_loss(trainer)
        change = _change(trainer, engine, saves)
        if change is not None:
            _refuse(trainer, engine, change)
    if any(gather_json(change is not None, group, "cpu")):
        _capture_anew(trainer, engine)
    else:
        engine.user_model.adopt()


def check_training(trainer: Any) -> None:
    """Call `check_model` before ``train``; raise ConfigError for a model that cannot be trained
    further.
    """
    kind = type(trainer.model).__name__
    with together(trainer.mesh.control, "cpu"):
        if trainer.model is not trainer._trained_model:
            reason = (
                "it was set after the trainer was constructed, and transformers.Trainer "
                "would train the first one"
            )
            raise ConfigError(
                "trainer.model", kind, reason, "Make a new MerakTrainer with the model to train"
            )
        if not any(p.requires_grad for p in trainer.model.parameters()):
            # autograd of transformers.Trainer raises here; a captured graph would take steps that
            # change nothing
            remedy = (
                "Set requires_grad of those to train; of a loaded adapter, "
                "from_pretrained(..., is_trainable=True)"
            )
            raise ConfigError("model", kind, "none of its parameters requires a gradient", remedy)
    check_model(trainer)
    if trainer._moments is not None:
        reason = (
            "the optimizer trained other parameters of this model than those that are trainable now"
        )
        raise ConfigError("model", kind, reason, "Train a new MerakTrainer with the changed model")


def check_reached(trainer: Any) -> None:
    """Raise ConfigError, on every rank, if the loss gives no parameter a gradient: steps would
    change nothing.
    """
    engine = trainer.engine
    if not isinstance(engine, CapturedModel):
        return
    captured = engine.blueprint.traced.captured
    if captured.trainable <= captured.untouched:
        reason = "the loss gives none of its trainable parameters a gradient"
        remedy = (
            "Let forward use them, outside of torch.no_grad(); adapters that "
            "merge_adapter() merged, unmerge first"
        )
        raise ConfigError("model", type(trainer.model).__name__, reason, remedy)


def check_step(trainer: Any) -> None:
    """Before a step: adopt what a callback wrote to weights that the model shares."""
    check_loss(trainer)
    user_model = getattr(trainer.engine, "user_model", None)
    if user_model is not None and user_model.shared and user_model.weights_changed():
        user_model.adopt()


def check_loss(trainer: Any) -> None:
    """Raise ConfigError if the captured loss is not the trainer's present one."""
    if trainer.own_loss is not None:
        trainer.own_loss.check()


def lost_writes(trainer: Any) -> ConfigError | None:
    """Return the error for writes of a callback to a model that does not have the trained
    weights.
    """
    user_model = getattr(trainer._engine, "user_model", None)
    if user_model is None or user_model.shared or not user_model.weights_changed():
        return None
    reason = "a callback wrote it, and the trained weights are sharded over ranks"
    what = f"model.{user_model.written_parameter()}"
    return ConfigError(what, "(written)", reason, "Leave the weights to the optimizer")


def _change(trainer: Any, engine: CapturedModel, saves: bool) -> ModelChange | None:
    user_model = engine.user_model
    assert user_model is not None
    if engine.model is not trainer.model:
        return ModelChange(
            "trainer.model", type(engine.model).__name__, f"another {type(trainer.model).__name__}"
        )
    if user_model.is_taken():
        reason = (
            "another trainer has sharded this model since, and this trainer has earlier weights"
        )
        raise ConfigError(
            "model",
            type(engine.model).__name__,
            reason,
            "Use one trainer, or give each its own model",
        )
    follows = trainer.is_in_train or engine.iteration > 0
    change = user_model.change(saves, engine.thawable if follows else ())
    if change is None and (name := user_model.written_parameter()) is not None:
        change = ModelChange(f"model.{name}", "(its values)", "(written since)")
    return change


def _refuse(trainer: Any, engine: CapturedModel, change: ModelChange) -> None:
    """Raise ConfigError unless the model can be captured anew without loss."""
    user_model = engine.user_model
    now = _short(change.now)
    assert user_model is not None
    if trainer.is_in_train:
        reason = (
            f"it was {_short(change.was)} when the model was captured, and changed during training"
        )
        raise ConfigError(
            change.what, now, reason, "Make the change before train(), or between two calls of it"
        )
    if not user_model.shared and engine.iteration:
        reason = (
            f"it was {_short(change.was)} when the model was captured, and the trained "
            "weights are sharded"
        )
        raise ConfigError(
            change.what, now, f"{reason} over {engine.mesh.grid.size} ranks", _DIVIDED
        )
    edited = user_model.written_parameter()
    if edited is not None and source_of(trainer.model) is not None:
        reason = "it was written after the trainer read its weights from the model's directory"
        raise ConfigError(f"model.{edited}", now, reason, _ANEW)


def _capture_anew(trainer: Any, engine: CapturedModel) -> None:
    """Build another engine from the present model. Moments of one that has trained are kept until
    they fit again.
    """
    assert engine.user_model is not None
    if engine.iteration and trainer._moments is None:
        trainer._moments = Moments(engine)
    if not engine.user_model.shared:
        replaced = any(gather_json(engine.model is not trainer.model, trainer.mesh.control, "cpu"))
        engine.user_model.release(everywhere=replaced)
    trainer._engine = None
    trainer._describe()
    with _in_memory(trainer.model, engine.user_model.shared and engine.model is trainer.model):
        fresh = trainer.engine
    fresh.iteration = engine.iteration
    moments = trainer._moments
    if moments is not None and trainer.model is trainer._trained_model and moments.fit(fresh):
        moments.give(fresh)
        trainer._moments = None


@contextmanager
def _in_memory(model: nn.Module, in_memory: bool) -> Iterator[None]:
    """Let the weights of ``model`` be those in memory, whatever directory it came from."""
    loaded = {
        part: vars(part)["merak_source"] for part in model.modules() if "merak_source" in vars(part)
    }
    for part in loaded if in_memory else ():
        part.merak_source = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, source in loaded.items():
            part.merak_source = source


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
