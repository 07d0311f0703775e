"""Methods that ``MerakTrainer`` has in common with ``transformers.Trainer``, called at the same points of its loop.

A subclass may override any of them, with ``Trainer``'s signatures; docs/trainer.md lists them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import (
    LabelSmoother,
    get_learning_rates,
    get_num_trainable_parameters,
    get_optimizer_group,
    log_metrics,
    metrics_format,
    save_metrics,
    save_state,
)
from transformers.trainer_utils import number_of_arguments, speed_metrics

from ..errors import ConfigError
from ..parallel.mesh import Mesh
from ..stages.placed import refuse_placed
from .arguments.deepspeed import decayed_by_deepspeed
from .arguments.merak_arguments import MerakArguments
from .arguments.optimizers import class_and_arguments, decayed_parameters, make
from .batches.feed import Feed
from .batches.model_facts import ModelFacts
from .batches.order import Batch
from .overrides import OPTIMIZER, refuse_gradients
from .own_loss import compute_loss
from .run.parameter_groups import ParameterGroups
from .run.rates import LearningRate, schedule
from .run.recapture import Moments


def _described(name: str) -> property:
    """An attribute that determines how batches are made; setting it takes effect for the next ones."""

    def get(trainer: "TrainerFace") -> Any:
        return vars(trainer).get(name)

    def put(trainer: "TrainerFace", value: Any) -> None:
        vars(trainer)[name] = value
        if "feed" in vars(trainer):
            trainer._describe()

    return property(get, put)


def _model() -> property:
    """The model; another one is described anew, and captured when it is first used."""

    def get(trainer: "TrainerFace") -> nn.Module:
        return vars(trainer)["model"]

    def put(trainer: "TrainerFace", model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError("trainer.model", type(model).__name__, "it is not a model", "Set a torch.nn.Module")
        refuse_placed(model)
        vars(trainer)["model"] = model
        if "feed" in vars(trainer):
            trainer.callback_handler.model = model
            vars(trainer).pop("_parameters_used", None)
            trainer._describe()

    return property(get, put)


class TrainerFace:
    log_metrics = log_metrics
    metrics_format = metrics_format
    save_metrics = save_metrics
    save_state = save_state
    get_learning_rates = get_learning_rates
    get_optimizer_group = get_optimizer_group
    get_num_trainable_parameters = get_num_trainable_parameters
    data_collator = _described("data_collator")
    processing_class = _described("processing_class")
    compute_loss_func = _described("compute_loss_func")

    model = _model()

    args: MerakArguments
    model_init: Callable[..., nn.Module] | None
    train_dataset: Dataset | None
    feed: Feed
    facts: ModelFacts
    mesh: Mesh
    label_smoother: LabelSmoother | None
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None = None
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    current_flos: float
    first_tokens: int
    optimizer_cls_and_kwargs: tuple | None = None
    _given_optimizer: torch.optim.Optimizer | None = None
    _given_scheduler: LRScheduler | None = None
    _created_optimizer: torch.optim.Optimizer | None = None  # its groups are those of the engine
    _created_for: tuple | None = None  # the model, and its trainable parameters
    _groups: ParameterGroups | None = None
    _moments: Moments | None = None
    _scheduler: LRScheduler | None = None

    def _describe(self) -> None:
        raise NotImplementedError

    # Loss

    @property
    def label_names(self) -> list[str]:
        """The inputs that are targets, as transformers determines them; ``args.label_names`` overrides them."""
        return list(self.facts.label_names)

    @label_names.setter
    def label_names(self, value: list[str]) -> None:
        if isinstance(value, list) and value == self.label_names:
            return
        reason = "batches are built from the value of args when the trainer was constructed"
        raise ConfigError(f"{type(self).__name__}.label_names", value, reason, "Set args.label_names before")

    @property
    def counts_items(self) -> bool:
        """Whether batches get ``num_items_in_batch``, the number of targets of the step."""
        return self.model_accepts_loss_kwargs or self.compute_loss_func is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of a batch, or (loss, outputs). Captured with the model: it runs once, before the first step."""
        return compute_loss(self, model, inputs, return_outputs, num_items=num_items_in_batch)

    # What a trainer over this one changes

    def _facts_of_model(self) -> ModelFacts:
        return ModelFacts.of(self.model, self.args, self.args.prediction_outputs)

    def _note_reports(self, batches: list[Batch], prepared: list[Batch]) -> None:
        """Called after the backwards of a step; ``engine.reported`` returns the outputs of its micro-batches.

        batches:  as they were loaded.
        prepared: as they ran.
        """

    # Place among the ranks

    def is_world_process_zero(self) -> bool:
        return self.args.process_index == 0

    is_local_process_zero = is_world_process_zero

    # Model and data

    def call_model_init(self, trial: None = None) -> nn.Module:
        """Return a new model from ``model_init``; called at construction and by every ``train``."""
        make = self.model_init
        assert make is not None, "asked only where there is no model"
        count = number_of_arguments(make)
        if count > 1:
            raise ConfigError("model_init", f"({count} arguments)", "it is called with at most one", "Take no more")
        model = make(trial) if count else make()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "model_init", f"(returned {type(model).__name__})", "it is not a model", "Return a module"
            )
        return model

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """Return the sampler of training samples, of all replicas together; None: the dataset's order. Called on every
        rank.
        """
        return self.feed.training_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        """Return the sampler of an evaluation; None: the dataset's order. Called on every rank."""
        return self.feed.evaluation_sampler(eval_dataset)

    # Optimizer and schedule

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Parameter groups and their rates; before training, the optimizer that was passed or created, or None."""
        return self._created_optimizer if self._groups is None else self._groups

    @optimizer.setter
    def optimizer(self, value: torch.optim.Optimizer) -> None:
        if self._groups is not None or not isinstance(value, torch.optim.Optimizer):
            raise ConfigError(f"{type(self).__name__}.optimizer", "(set)", OPTIMIZER.why, OPTIMIZER.instead)
        self._created_optimizer = value

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """Return the optimizer class that ``args`` name, and its arguments."""
        return class_and_arguments(args, model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create an optimizer of the model's parameters, unless there is one; called when the model is captured.

        Optimizers like it step the shards of ranks.
        """
        if self.optimizer is None:
            model = self.model if model is None else model
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            decayed = decayed_by_deepspeed(self.args, model) or self.get_decay_parameter_names(model)
            self.optimizer = make(model, self.args.weight_decay, decayed, chosen)
        assert self.optimizer is not None
        return self.optimizer

    def made_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that was passed, or that ``create_optimizer`` sets.

        Another model, or other trainable parameters, get a new one.
        """
        trained = (id(self.model), [name for name, p in self.model.named_parameters() if p.requires_grad])
        if self._given_optimizer is None and self._created_for != trained:
            groups = self._groups
            self._created_optimizer = None
            self._groups = None
            self.create_optimizer()
            self._created_for = trained
            self._groups = groups
        if self._created_optimizer is None:
            reason = "it did not set self.optimizer"
            raise ConfigError(f"{type(self).__name__}.create_optimizer", "(called)", reason, "Set it there")
        return self._created_optimizer

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None before training."""
        return self._scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: LRScheduler) -> None:
        if self._groups is None or not self._groups.moves(value):
            reason = "it is not a schedule of trainer.optimizer"
            raise ConfigError("lr_scheduler", type(value).__name__, reason, "Override create_scheduler")
        self._scheduler = value

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that take weight decay."""
        return decayed_parameters(model)

    def create_scheduler(self, num_training_steps: int, optimizer: ParameterGroups | None = None) -> LRScheduler:
        """Return a schedule of ``optimizer``, by default ``self.optimizer``; called by every ``train``."""
        stepped = self.optimizer if optimizer is None else optimizer
        assert stepped is not None, "it is made before its schedule"
        scheduler = schedule(self.args, num_training_steps, stepped)
        self.lr_scheduler = scheduler
        return scheduler

    def learning_rate(self, steps: int) -> LearningRate:
        """Return the rates of a run of ``steps``: a new schedule of the groups that earlier runs left, as in
        ``Trainer``.
        """
        if self._groups is None:
            self._groups = ParameterGroups(self.made_optimizer(), self.model)
        self._scheduler = None
        scheduler = self.create_scheduler(steps) if self._given_scheduler is None else self._given_scheduler
        if scheduler is not None or self._scheduler is None:
            self.lr_scheduler = scheduler
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self._groups, self._scheduler
        chosen: Any = self._scheduler  # set beside this method's eyes
        return LearningRate(self._groups, chosen)

    # Logs and callbacks

    def store_flos(self) -> None:
        """Add the FLOPs since the last call to the state."""
        self.state.total_flos += float(self.current_flos)
        self.current_flos = 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to the log history and call the callbacks."""
        state = self.state
        if state.epoch is not None:
            logs["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
            if start_time is not None:
                tokens = state.num_input_tokens_seen - self.first_tokens
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        state.log_history.append({**logs, "step": state.global_step})
        self.control = self.callback_handler.on_log(self.args, state, self.control, logs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        refuse_gradients(callback)
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        self.callback_handler.remove_callback(callback)
