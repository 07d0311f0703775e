"""The learning rate of a run by transformers' schedules, and how many steps a run has."""

import math
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR

from ..errors import ConfigError


@dataclass(frozen=True)
class Extent:
    """How long a run is; the same numbers as ``transformers.Trainer`` computes.

    batches: of one epoch and one replica. updates: optimizer steps of one epoch. epochs: begun at most. steps:
    optimizer steps of the run. examples: in the dataset. samples: seen by the run, over all replicas.
    """

    batches: int
    updates: int
    epochs: int
    steps: int
    examples: int
    samples: float


def extent(args: TrainingArguments, batches: int | None, examples: int | None, replicas: int) -> Extent:
    """``batches``: of one epoch and one replica, None for a stream. Raises ConfigError when the end is not known."""
    accumulation = args.gradient_accumulation_steps
    global_batch = args.per_device_train_batch_size * accumulation * replicas
    if batches is None:
        if args.max_steps <= 0:
            reason = "the training dataset has no length"
            raise ConfigError("max_steps", args.max_steps, reason, "Give the number of steps to train")
        samples, steps = args.max_steps * global_batch, args.max_steps
        return Extent(steps * accumulation, steps, sys.maxsize, steps, samples, samples)
    updates = -(-batches // accumulation)
    if args.max_steps > 0:
        epochs = -(-args.max_steps // updates)
        return Extent(batches, updates, epochs, args.max_steps, examples, args.max_steps * global_batch)
    steps, epochs = math.ceil(args.num_train_epochs * updates), math.ceil(args.num_train_epochs)
    return Extent(batches, updates, epochs, steps, examples, examples * args.num_train_epochs)


class LearningRate:
    """A schedule of transformers over an optimizer that optimises nothing: callbacks find both where they expect them.

    Raises ConfigError when the schedule does not take ``lr_scheduler_kwargs``.
    """

    def __init__(self, args: TrainingArguments, steps: int):
        nothing = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.optimizer = torch.optim.SGD([nothing], lr=args.learning_rate, weight_decay=args.weight_decay)
        warmup = args.get_warmup_steps(steps)
        try:
            self.scheduler = get_scheduler(
                args.lr_scheduler_type, self.optimizer, warmup, steps, args.lr_scheduler_kwargs
            )
        except (TypeError, ValueError) as error:
            what, remedy = f"lr_scheduler_kwargs of {args.lr_scheduler_type.value}", "Correct lr_scheduler_kwargs"
            raise ConfigError(what, args.lr_scheduler_kwargs, str(error).rstrip("."), remedy) from error

    @property
    def follows_metric(self) -> bool:
        """Whether an evaluation moves the schedule, not a step."""
        return isinstance(self.scheduler, ReduceLROnPlateau | GreedyLR)

    @property
    def value(self) -> float:
        """The rate of the step that comes."""
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """A step was done."""
        if not self.follows_metric:
            self.optimizer.step()
            self.scheduler.step()

    def follow(self, metric: float) -> None:
        """An evaluation was done."""
        self.scheduler.step(metric)

    def state(self) -> dict:
        """What JSON can say and ``load`` takes back."""
        return {"scheduler": self.scheduler.state_dict(), "rate": self.value}

    def load(self, state: dict) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.optimizer.param_groups[0]["lr"] = state["rate"]
