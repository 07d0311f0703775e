"""The ``compute_loss`` of a TRL trainer: captured for the gradient, and run again on the captured outputs for metrics.

capture    compute_loss(model)       -> loss; log_probs, entropy, ... of each forward become outputs of the graph
a step     compute_loss(their values) -> trainer._metrics, by TRL's own code, on real numbers
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from trl.trainer.utils import FusedCausalLMOutput

from ..errors import ConfigError
from ..hf_trainer.batches.order import Batch
from ..hf_trainer.own_loss import LossOfTrainer
from ..stages.traced import OwnLoss
from ..stages.withheld import is_withheld
from .scores import Scores, head, of_tokens
from .unread import Missing, Unread

METRICS = ("_metrics", "_total_train_tokens")  # what a TRL trainer counts
REPORTS = "reports"  # the graph's outputs are reports.FORWARD.FIELD
# an entry of batches, [] fp32: what TRL divides losses of experts by
MICRO_BATCHES = "micro_batches_of_step"
_STEPS = "current_gradient_accumulation_steps"
_LOSSES = ("compute_loss_func", "label_smoother")  # of logits, which metrics are not made of
_ASIDE = frozenset(f"trainer.{name}" for name in (*METRICS, "ref_model", "accelerator", _STEPS))


class LossOfTrl(LossOfTrainer):
    """The loss of a TRL trainer; see ``LossOfTrainer``.

    fields:    what its fused LM head computes; ("logits",) if it has none.
    reference: name of the submodule that is its reference model; "" without one.
    """

    def __init__(self, trainer: Any, fields: Sequence[str], reference: str = ""):
        super().__init__(trainer, overridden=False)
        self.name = f"{type(trainer).__name__}.compute_loss"
        self.fields = tuple(fields)
        self.reference = reference

    def own_loss(self) -> OwnLoss:
        trainer = self.trainer
        return OwnLoss(
            self.compute,
            trainer.counts_items,
            trainer.loss_is_scaled_for_ga,
            False,
            reports=(REPORTS,),
        )

    def wants_outputs(self, model: nn.Module) -> bool:
        return not model.training and self.trainer.predicts

    def compute(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        trainer = self.trainer
        computed: list[Scores] = []
        batch = dict(batch)
        if "attention_mask" not in batch and trainer.facts.main_input in batch:
            batch["attention_mask"] = Unread()  # of padding that the graph does without
        if not model.training and _evaluates_alone(trainer):
            batch.pop("num_items_in_batch", None)
        before = {name: getattr(trainer, name) for name in (*METRICS, _STEPS)}
        trainer._metrics = {mode: _Sink() for mode in before["_metrics"]}
        setattr(trainer, _STEPS, batch.pop(MICRO_BATCHES, before[_STEPS]))
        try:
            with ExitStack() as heads, self._referring(model), self._capturing(model.training):
                heads.enter_context(head(base_model(model), self.fields, computed))
                if self.reference:
                    heads.enter_context(
                        head(model.get_submodule(self.reference), self.fields, computed)
                    )
                loss, outputs = super().compute(model, batch)
        finally:
            vars(trainer).update(before)
        others = dict(outputs) if isinstance(outputs, Mapping) else {}
        return loss, others | {REPORTS: {str(place): each for place, each in enumerate(computed)}}

    @contextmanager
    def _capturing(self, training: bool) -> Iterator[None]:
        accelerator = self.trainer.accelerator
        before = accelerator.num_processes
        # whose losses an evaluation has, whatever the layout
        accelerator.num_processes = before if training else 1
        try:
            with self._gathering(lambda value: Unread()):
                yield
        finally:
            accelerator.num_processes = before

    @contextmanager
    def _gathering(self, gather: Any) -> Iterator[None]:
        accelerator = self.trainer.accelerator
        before = accelerator.gather
        accelerator.gather = gather
        try:
            yield
        finally:
            accelerator.gather = before

    @contextmanager
    def _referring(self, model: nn.Module) -> Iterator[None]:
        trainer = self.trainer
        if not self.reference:
            yield
            return
        before = trainer.ref_model
        trainer.ref_model = model.get_submodule(self.reference)
        try:
            yield
        finally:
            trainer.ref_model = before

    def _no_loss(self, result: Any) -> tuple[str, str]:
        if isinstance(result, Unread):
            remedy = "Compute the loss from log_probs, or from logits of the model's forward"
            return (
                "it is made of what TRL computes for metrics only (entropy, is_top1, a mask of "
                "no padding)",
                remedy,
            )
        return super()._no_loss(result)

    def _picture(self, names: Collection[str] | None = None) -> dict[str, Any]:
        return {
            name: value for name, value in super()._picture(names).items() if name not in _ASIDE
        }

    @torch.no_grad()
    def count(self, batch: Batch, reported: Mapping[str, Tensor], gather: Any) -> None:
        """Let the trainer count its metrics of a micro-batch as it was loaded, from the outputs of
        its graph.

        gather: gathers over the replicas that compute micro-batches together; collective over them.
        """
        trainer = self.trainer
        computed = _by_forward(reported)
        inputs = {k: v for k, v in batch.items() if k not in ("num_items_in_batch", MICRO_BATCHES)}
        answers = _Answers(trainer.model, computed)
        before = {name: getattr(trainer, name) for name in ("model", "ref_model", *_LOSSES)}
        vars(trainer).update({"model": answers, "ref_model": answers})
        vars(trainer).update({name: _no_loss for name in _LOSSES if before[name] is not None})
        try:
            with self._gathering(gather), _MissingWeights():
                trainer.compute_loss(
                    answers, inputs, num_items_in_batch=batch.get("num_items_in_batch")
                )
        finally:
            vars(trainer).update(before)


def _no_loss(*args: Any, **kwargs: Any) -> Missing:
    return Missing()


class _MissingWeights(TorchFunctionMode):
    """Lets a loss that reads weights (a penalty) be run again on a rank that does not have them:
    they are ``Missing``.

    The loss itself is not used then. A metric made of weights raises ConfigError.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(is_withheld, tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)  # shapes and dtypes are known
        except ConfigError:
            return Missing()


class _Sink(dict):
    """Metrics during a capture: everything is discarded."""

    def __missing__(self, name: str) -> list:
        return []


class _Answers:
    """Stands for a model: returns the outputs of its captured forwards, in order."""

    def __init__(self, model: nn.Module, computed: Sequence[Scores]):
        self._model = model
        self._computed = iter(computed)
        self._logits = any("logits" in each for each in computed)

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return FusedCausalLMOutput(**of_tokens(next(self._computed)))
        outputs: Any = Missing()  # of a forward without a fused head only logits can have been told
        outputs.logits = next(self._computed)["logits"] if self._logits else Missing()
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _evaluates_alone(trainer: Any) -> bool:
    """Whether TRL evaluates with its own ``prediction_step``, which does not count the targets of a
    step.
    """
    return any(
        "prediction_step" in vars(each)
        for each in trainer.adapted
        if each.__module__.startswith("trl.")
    )


def _by_forward(reported: Mapping[str, Tensor]) -> list[Scores]:
    """reports.0.log_probs, ... -> [{log_probs: ...}, ...]"""
    by_forward: dict[int, Scores] = {}
    for name, value in reported.items():
        kind, _, rest = name.partition(".")
        if kind == REPORTS:
            place, field = rest.split(".")
            by_forward.setdefault(int(place), {})[field] = value
    return [by_forward[place] for place in sorted(by_forward)]


def base_model(model: nn.Module) -> nn.Module:
    """Return the part of a peft model that has the LM head, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
