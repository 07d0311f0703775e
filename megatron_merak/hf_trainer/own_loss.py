"""The loss of a script in place of the model's: ``compute_loss_func``, an overridden ``compute_loss``, label smoothing.

``compute_loss`` is captured together with the model. It runs once, while that happens, and never again: what it reads
of the trainer or remembers from call to call is looked at then and before every later use, and refused where the
captured loss would differ from one that is computed anew.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from ..errors import ConfigError, TraceError
from ..graph.capture.capture import accepts_num_items
from ..stages.traced import OwnLoss

INPUT = "Put what changes into the batch, as an entry that the loss reads"
# What a trainer has of its own: what stays as it is while it trains, and what does not.
STAYS = frozenset(
    """args mesh model processing_class data_collator train_dataset eval_dataset compute_metrics model_init facts feed
    preprocess_logits_for_metrics compute_loss_func label_smoother model_accepts_loss_kwargs
    loss_is_scaled_for_ga""".split()
)
CHANGES = frozenset(
    """state control callback_handler is_in_train current_flos first_tokens optimizer lr_scheduler log engine _engine
    _trained_model _groups _moments _scheduler _built_by _parameters_used own_loss train evaluate predict save_model
    learning_rate get_learning_rates get_optimizer_group create_scheduler""".split()
)


def label_smoother(model: nn.Module, factor: float) -> LabelSmoother | None:
    """As transformers chooses it: none for several labels of a sample."""
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    return None if factor == 0 or several else LabelSmoother(epsilon=factor)


def compute_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items: Tensor | None
) -> Any:
    """The loss of a batch by transformers' rules: of ``compute_loss_func``, by label smoothing, or the model's own.

    inputs: loses its labels, where they are for the first two. num_items: the targets of the step, [] fp32.
    """
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    labels = inputs.pop("labels", None) if function is not None or smoother is not None else None
    takes_items = trainer.model_accepts_loss_kwargs and num_items is not None
    outputs = model(**inputs, **({"num_items_in_batch": num_items} if takes_items else {}))
    if function is not None:
        loss = function(outputs, labels, num_items_in_batch=num_items)
    elif labels is not None:
        shifts = _class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss = smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=num_items)
    elif isinstance(outputs, dict) and "loss" not in outputs:
        remedy = "Put what it computes the loss from (labels) into the batch"
        raise TraceError("model", _class_name(model), f"its forward returns no loss, only {', '.join(outputs)}", remedy)
    else:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    replicas = trainer.mesh.grid.dp
    if model.training and replicas > 1 and num_items is not None and (takes_items or function is not None):
        loss = loss * replicas  # transformers' processes average their gradients
    return (loss, outputs) if return_outputs else loss


def _class_name(model: nn.Module) -> str:
    inner = getattr(model, "base_model", None)
    adapted = hasattr(model, "peft_config") and isinstance(getattr(inner, "model", None), nn.Module)
    return type(inner.model if adapted else model).__name__  # type: ignore[union-attr]


class LossOfTrainer:
    """What captures and checks the ``compute_loss`` of a trainer.

    trainer: a MerakTrainer that has a loss of its own, by ``has_own_loss``.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.name = trainer, f"{type(trainer).__name__}.compute_loss"
        self.read: set[str] = set()
        self.missed: set[str] = set()
        self.known: dict[str, Any] | None = None

    def own_loss(self) -> OwnLoss:
        """As a capture takes it."""
        trainer = self.trainer
        adds_up = trainer.loss_is_scaled_for_ga
        if adds_up is None and trainer.compute_loss_func is not None:
            adds_up = True
        return OwnLoss(self.compute, trainer.counts_items, adds_up, self.missed)

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        """(loss, outputs) of a batch; outputs in evaluation only. Raises TraceError for what would not be the same."""
        trainer, whole = self.trainer, not model.training
        items = batch.get("num_items_in_batch")
        inputs = _Inputs({name: value for name, value in batch.items() if name != "num_items_in_batch"})
        before = self._picture()
        with _reads(trainer, model, self.read), _alone(model, self.name):
            result = trainer.compute_loss(model, inputs, return_outputs=whole, num_items_in_batch=items)
        self.missed |= inputs.missed
        self._refuse(before)
        if whole and not (isinstance(result, tuple | list) and len(result) == 2):
            reason = f"with return_outputs=True it returned a {type(result).__name__}"
            raise TraceError(self.name, "(return_outputs=True)", reason, "Return (loss, outputs)")
        loss, outputs = result if whole else (result, None)
        if not isinstance(loss, Tensor):
            reason = f"it returned a {type(loss).__name__}"
            raise TraceError(self.name, "(its loss)", reason, "Return a tensor of one value")
        replicas, adds_up = trainer.mesh.grid.dp, self.own_loss().adds_up
        if model.training and replicas > 1 and (items is not None if adds_up is None else adds_up):
            loss = loss / replicas
        return loss, outputs

    def _refuse(self, before: Mapping[str, Any]) -> None:
        """Raise TraceError for what only a loss that runs at every step could do."""
        for name in sorted(self.read & CHANGES):
            reason = f"it reads or calls trainer.{name}, and is captured once, before the first step"
            raise TraceError(self.name, f"(trainer.{name})", reason, INPUT)
        after = self._picture()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            reason = f"it changes {changed[0]}, which a captured loss would do once, not at every step"
            raise TraceError(self.name, f"({changed[0]})", reason, "Return it among the outputs, or leave it out")
        if self.known is None:
            self.known = after

    def check(self) -> None:
        """Raise ConfigError if what the captured loss has read is not what it was."""
        if self.known is None:
            return
        own = {name for name in self.known if not name.startswith("trainer.")}
        now = self._picture()
        for name in sorted(own | {f"trainer.{name}" for name in self.read}):
            if now.get(name) != self.known.get(name):
                reason = "it has changed since the loss was captured, which goes on with what it was"
                raise ConfigError(self.name, f"({name})", reason, INPUT)

    def _picture(self) -> dict[str, Any]:
        """What the loss could read beside its arguments, by name: the trainer's attributes, and values of functions."""
        trainer = self.trainer
        own = {f"trainer.{k}": v for k, v in vars(trainer).items() if k not in STAYS | CHANGES}
        for name in ("compute_loss_func", "label_smoother", "model_accepts_loss_kwargs", "loss_is_scaled_for_ga"):
            own[name] = getattr(trainer, name)
        for function in (_function(trainer.compute_loss), trainer.compute_loss_func):
            own |= _surroundings(function)
        return {name: _seen(value) for name, value in own.items()}


class _Inputs(dict):
    """A batch that notes which entries it was asked for and does not have. missed: their names."""

    def __init__(self, entries: Mapping[str, Any]):
        super().__init__(entries)
        self.missed: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._note(name)
        return super().pop(name, *default)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        self._note(name)
        raise KeyError(name)

    def _note(self, name: object) -> None:
        if not super().__contains__(name):
            self.missed.add(str(name))


@contextmanager
def _reads(trainer: Any, model: nn.Module, names: set[str]) -> Iterator[None]:
    """Let ``trainer.model`` be the one that is captured, and note in ``names`` which attributes are read."""
    kind, own = type(trainer), trainer.model

    def noting(instance: Any, name: str) -> Any:
        names.add(name)
        return kind.__getattribute__(instance, name)

    vars(trainer)["model"] = model
    trainer.__class__ = type(kind.__name__, (kind,), {"__getattribute__": noting, "__module__": kind.__module__})
    try:
        yield
    finally:
        trainer.__class__ = kind
        vars(trainer)["model"] = own


@contextmanager
def _alone(model: nn.Module, name: str) -> Iterator[None]:
    """Raise TraceError if another model than this is called: its weights would be in no plan."""

    def look(module: nn.Module, inputs: object) -> None:
        if module not in inside and next(module.parameters(), None) is not None:
            reason = "the loss calls it, and only trainer.model is captured and planned"
            remedy = "Make it a part of the model before the trainer, frozen (model.teacher = ...), and call that"
            raise TraceError(name, f"({type(module).__name__})", reason, remedy)

    inside = set(model.modules())
    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _surroundings(function: object) -> dict[str, Any]:
    """What a function reads beside its arguments: closure and values of its module; of an object, its attributes."""
    if isinstance(function, partial):
        named = {f"argument {key}": value for key, value in enumerate(function.args)} | dict(function.keywords)
        return named | _surroundings(function.func)
    if isinstance(function, MethodType):
        return _surroundings(function.__func__) | _surroundings(function.__self__)
    if isinstance(function, FunctionType):
        found = inspect.getclosurevars(function)
        held = {name: v for name, v in {**found.globals, **found.nonlocals}.items() if not callable(v)}
        return {name: value for name, value in held.items() if not inspect.ismodule(value)}
    attributes = getattr(function, "__dict__", {}) if callable(function) and not isinstance(function, type) else {}
    return {f"{type(function).__name__}.{name}": value for name, value in attributes.items()}


def _seen(value: object, depth: int = 3) -> Any:
    """What tells whether a value has changed: it itself where it is plain, else who it is and what is in it."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, Mapping) and depth:
        return {str(key): _seen(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_seen(each, depth - 1) for each in value]
    if isinstance(value, nn.Module):
        return id(value), [(id(each), each._version) for each in (*value.parameters(), *value.buffers())]
    if callable(value) or not depth:
        return id(value)
    return id(value), {name: _seen(each, depth - 1) for name, each in getattr(value, "__dict__", {}).items()}


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def has_own_loss(trainer: Any, base: type) -> bool:
    """Whether a script has given a loss, in one of transformers' three ways, or says how one adds up.

    base: MerakTrainer.
    """
    given = trainer.label_smoother is not None or trainer.loss_is_scaled_for_ga is not None
    counts = trainer.model_accepts_loss_kwargs != accepts_num_items(trainer.model)
    return has_scripted_loss(trainer, base) or given or counts


def has_scripted_loss(trainer: Any, base: type) -> bool:
    """Whether the loss is code of the script: it may see what stands at padding, and how much there is of it."""
    return _function(trainer.compute_loss) is not base.compute_loss or trainer.compute_loss_func is not None
