"""A script's loss in place of the model's: ``compute_loss_func``, an overridden ``compute_loss``,
label smoothing.

``compute_loss`` is captured together with the model: it runs once, during the capture. What it
reads of the trainer, or remembers between calls, is recorded then and compared before every later
use. A difference that would change the loss is an error.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from ..errors import ConfigError, TraceError
from ..graph.capture.capture import accepts_num_items
from ..graph.capture.inspected import inspected_model
from ..stages.traced import OwnLoss
from .arguments.neftune import noisy
from .surroundings import PACKAGE, Picture, surroundings

INPUT = "Put what changes into the batch, as an entry that the loss reads"
# What changes of a trainer at every step. All else that a loss reads of it is compared, except for
# objects of this package and for these. Of args, model and its config, the attributes are compared.
_CHANGES = frozenset("state control callback_handler log optimizer lr_scheduler engine".split())
_UNCOMPARED = frozenset(
    "args model processing_class data_collator train_dataset eval_dataset".split()
)


def label_smoother(model: nn.Module, factor: float) -> LabelSmoother | None:
    """Return the label smoother that transformers would choose; None if samples have several
    labels.
    """
    several = (
        getattr(getattr(model, "config", None), "problem_type", None)
        == "multi_label_classification"
    )
    return None if factor == 0 or several else LabelSmoother(epsilon=factor)


def compute_loss(
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool,
    num_items: Tensor | None,
) -> Any:
    """Return the loss of a batch by transformers' rules: ``compute_loss_func``, label smoothing, or
    the model's own loss.

    inputs:    loses its labels in the first two cases.
    num_items: the targets of the step, [] fp32.
    """
    function = trainer.compute_loss_func
    smoother = trainer.label_smoother
    labels = inputs.pop("labels", None) if function is not None or smoother is not None else None
    takes_items = trainer.model_accepts_loss_kwargs and num_items is not None
    outputs = model(**inputs, **({"num_items_in_batch": num_items} if takes_items else {}))
    if function is not None:
        loss = function(outputs, labels, num_items_in_batch=num_items)
    elif labels is not None:
        shifts = _class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss = smoother(outputs, labels, shift_labels=shifts, num_items_in_batch=num_items)
    elif isinstance(outputs, dict) and "loss" not in outputs:
        remedy = "Add the inputs of the loss (labels) to the batch"
        raise TraceError(
            "model",
            _class_name(model),
            f"its forward returns no loss, only {', '.join(outputs)}",
            remedy,
        )
    else:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    replicas = trainer.mesh.grid.dp
    if (
        model.training
        and replicas > 1
        and num_items is not None
        and (takes_items or function is not None)
    ):
        loss = loss * replicas  # transformers' processes average their gradients
    return (loss, outputs) if return_outputs else loss


def _class_name(model: nn.Module) -> str:
    return type(inspected_model(model)).__name__


class LossOfTrainer:
    """Captures and checks the ``compute_loss`` of a trainer.

    trainer:    a MerakTrainer with a loss of its own, see ``has_own_loss``.
    overridden: whether its class overrides ``compute_loss``.
    """

    def __init__(self, trainer: Any, overridden: bool):
        self.trainer = trainer
        self.overridden = overridden
        self.name = f"{type(trainer).__name__}.compute_loss"
        self.read: set[str] = set()
        self.known: dict[str, Any] = {}
        self.refusal: TraceError | None = None

    def own_loss(self) -> OwnLoss:
        """Return the loss for a capture."""
        trainer = self.trainer
        adds_up = trainer.loss_is_scaled_for_ga
        if adds_up is None and trainer.compute_loss_func is not None:
            adds_up = True
        return OwnLoss(self.compute, trainer.counts_items, adds_up, self.overridden)

    def wants_outputs(self, model: nn.Module) -> bool:
        """Whether a captured forward of ``model`` returns outputs beside the loss."""
        return not model.training

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Return (loss, outputs) of a batch; outputs in evaluation only.

        Raises TraceError for a loss that a capture would compute differently.
        """
        if self.refusal is not None:
            # a capture is tried in several ways, and what the first one left behind hides the cause
            raise self.refusal
        trainer = self.trainer
        with_outputs = self.wants_outputs(model)
        items = batch.get("num_items_in_batch")
        inputs = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        before = self._picture()
        try:
            with (
                _reads(trainer, model, self.read),
                _alone(model, self.name),
                noisy(model, trainer.args.neftune_noise_alpha),
                _outputs_in_fp32(model, trainer.args.bf16 or trainer.args.fp16),
                torch.set_grad_enabled(model.training),
            ):
                result = trainer.compute_loss(
                    model, inputs, return_outputs=with_outputs, num_items_in_batch=items
                )
        finally:
            self._refuse(before)
        if with_outputs and not (isinstance(result, tuple | list) and len(result) == 2):
            reason = f"with return_outputs=True it returned a {type(result).__name__}"
            raise TraceError(self.name, "(return_outputs=True)", reason, "Return (loss, outputs)")
        if with_outputs and not isinstance(result[1], Mapping | tuple | list):
            reason = f"with return_outputs=True its outputs are a {type(result[1]).__name__}"
            raise TraceError(
                self.name,
                "(return_outputs=True)",
                reason,
                "Return the model's, a dict, or (loss, logits)",
            )
        loss, outputs = result if with_outputs else (result, None)
        if not isinstance(loss, Tensor):
            raise TraceError(self.name, "(its loss)", *self._no_loss(loss))
        replicas = trainer.mesh.grid.dp
        adds_up = self.own_loss().adds_up
        if model.training and replicas > 1 and (items is not None if adds_up is None else adds_up):
            loss = loss / replicas
        return loss, outputs

    def _no_loss(self, result: Any) -> tuple[str, str]:
        """Return why a result is not a loss, and the remedy."""
        return f"it returned a {type(result).__name__}", "Return a tensor of one value"

    def _refuse(self, before: Mapping[str, Any]) -> None:
        """Raise TraceError for what only a loss that runs at every step could do."""
        for name in sorted(self.read & _CHANGES, key=lambda name: (name.startswith("_"), name)):
            reason = (
                f"it reads or calls trainer.{name}, and is captured once, before the first step"
            )
            self.refusal = TraceError(self.name, f"(trainer.{name})", reason, INPUT)
            raise self.refusal
        after = self._picture()
        changed = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        if changed:
            reason = f"it changes {changed[0]}; a captured loss would do so once, not at every step"
            remedy = "Return it among the outputs, or leave it out"
            self.refusal = TraceError(self.name, f"({changed[0]})", reason, remedy)
            raise self.refusal
        read = {f"trainer.{name}" for name in self.read}
        seen = {
            name: after.get(name)
            for name in read | {n for n in after if not n.startswith("trainer.")}
        }
        self.known = seen | self.known

    def check(self) -> None:
        """Raise ConfigError if values that the captured loss has read have changed."""
        now = self._picture(self.read) if self.known else {}
        for name in sorted(self.known):
            if now.get(name) != self.known[name]:
                reason = (
                    "it has changed since the loss was captured, and the captured loss uses "
                    "the earlier value"
                )
                raise ConfigError(self.name, f"({name})", reason, INPUT)

    def _picture(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return a fingerprint of what the loss could read beside its arguments, by name.

        names: of the trainer's attributes; None: all.
        """
        trainer = self.trainer
        own = {k: v for k, v in vars(trainer).items() if k not in _CHANGES | _UNCOMPARED}
        own = {k: v for k, v in own.items() if not type(v).__module__.startswith(PACKAGE)}
        values = {f"trainer.{k}": v for k, v in own.items() if names is None or k in names}
        for name in (
            "compute_loss_func",
            "label_smoother",
            "model_accepts_loss_kwargs",
            "loss_is_scaled_for_ga",
        ):
            values[name] = getattr(trainer, name)
        model = trainer.model
        holders = {
            "args": trainer.args,
            "model": model,
            "model.config": getattr(model, "config", None),
        }
        read = surroundings(
            (trainer.compute_loss, trainer.compute_loss_func), holders, owner=trainer
        )
        return {name: Picture().of(value) for name, value in (values | read.values).items()}


@contextmanager
def _reads(trainer: Any, model: nn.Module, names: set[str]) -> Iterator[None]:
    """Let ``trainer.model`` be the captured model, and collect in ``names`` which attributes of the
    trainer are read.

    The names in code would not do: ``torch.log`` has the name of ``trainer.log``, and TRL's code
    reads what scripts change. Nor would an object in its place: closures of a script hold the
    trainer itself.
    """
    kind: Any = type(trainer)
    own = trainer.model

    def noting(instance: Any, name: str) -> Any:
        names.add(name)
        return kind.__getattribute__(instance, name)

    vars(trainer)["model"] = model
    trainer.__class__ = type(
        kind.__name__, (kind,), {"__getattribute__": noting, "__module__": kind.__module__}
    )
    try:
        yield
    finally:
        trainer.__class__ = kind
        vars(trainer)["model"] = own


@contextmanager
def _outputs_in_fp32(model: nn.Module, mixed: bool) -> Iterator[None]:
    """Cast floating-point outputs of the model to fp32, as mixed precision in transformers does."""
    forward = model.forward

    def cast(x: Any) -> Any:
        return (
            x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
        )

    def called(*args: Any, **kwargs: Any) -> Any:
        return tree_map(cast, forward(*args, **kwargs))

    if not mixed:
        yield
        return
    model.forward = called
    try:
        yield
    finally:
        model.forward = forward


@contextmanager
def _alone(model: nn.Module, name: str) -> Iterator[None]:
    """Raise TraceError if another model is called: its weights would be in no plan."""

    def look(module: nn.Module, inputs: object) -> None:
        if module not in inside and next(module.parameters(), None) is not None:
            reason = "the loss calls it, and only trainer.model is captured and planned"
            remedy = (
                "Make it a frozen part of the model before the trainer is built "
                "(model.teacher = ...), and call that"
            )
            raise TraceError(name, f"({type(module).__name__})", reason, remedy)

    inside = set(model.modules())
    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _function(method: object) -> object:
    return getattr(method, "__func__", method)


def has_own_loss(trainer: Any, base: type) -> bool:
    """Whether a script sets a loss in one of transformers' ways, says how losses add up, or uses
    NEFTune noise.

    base: MerakTrainer.
    """
    configured = trainer.label_smoother is not None or trainer.loss_is_scaled_for_ga is not None
    configured = configured or trainer.args.neftune_noise_alpha is not None
    counts = trainer.model_accepts_loss_kwargs != accepts_num_items(trainer.model)
    return has_scripted_loss(trainer, base) or configured or counts


def has_scripted_loss(trainer: Any, base: type) -> bool:
    """Whether the loss is code of the script, which may depend on padding and its amount."""
    return is_overridden(trainer, base) or trainer.compute_loss_func is not None


def is_overridden(trainer: Any, base: Any) -> bool:
    """Whether a script overrides ``compute_loss``, which then sees the complete batch."""
    return _function(trainer.compute_loss) is not base.compute_loss
