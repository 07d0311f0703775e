"""The learning rate of a run by transformers' schedules, and the number of steps of a run."""

import json
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR

from ...errors import CheckpointError, ConfigError
from ..arguments.deepspeed_schedules import schedule_of_deepspeed
from .parameter_groups import ParameterGroups


@dataclass(frozen=True)
class Extent:
    """The length of a run; the numbers that ``transformers.Trainer`` computes.

    batches:  of one epoch and one replica.
    updates:  optimizer steps of one epoch.
    epochs:   number of epochs begun at most.
    steps:    optimizer steps of the run.
    examples: in the dataset.
    samples:  seen by the run, over all replicas.
    """

    batches: int
    updates: int
    epochs: int
    steps: int
    examples: int
    samples: float

    def resumed(self, args: TrainingArguments, more: int) -> "Extent":
        """Return the length of a run that began with other batches.

        more: steps that it has made beyond those that lead to its position with these.

        Its epochs end where they end. Where ``max_steps`` ends it, it begins as many as it needs.
        """
        if args.max_steps <= 0:
            return replace(self, steps=self.steps + more)
        return replace(self, epochs=-(-(self.steps - more) // self.updates))


def extent(
    args: TrainingArguments, batches: int | None, examples: int | None, replicas: int
) -> Extent:
    """Return the length of a run.

    batches: of one epoch and one replica; None for a stream.

    Raises ConfigError if the end is unknown.
    """
    accumulation = args.gradient_accumulation_steps
    global_batch = args.per_device_train_batch_size * accumulation * replicas
    if batches is None:
        if args.max_steps <= 0:
            reason = "the training dataset has no length"
            raise ConfigError(
                "max_steps", args.max_steps, reason, "Give the number of steps to train"
            )
        samples = args.max_steps * global_batch
        steps = args.max_steps
        return Extent(
            steps * accumulation, steps, sys.maxsize, steps, examples=samples, samples=samples
        )
    assert examples is not None, "only streams have no length"
    updates = -(-batches // accumulation)
    if args.max_steps > 0:
        epochs = -(-args.max_steps // updates)
        return Extent(
            batches,
            updates,
            epochs,
            args.max_steps,
            examples=examples,
            samples=args.max_steps * global_batch,
        )
    steps = math.ceil(args.num_train_epochs * updates)
    epochs = math.ceil(args.num_train_epochs)
    return Extent(
        batches, updates, epochs, steps, examples=examples, samples=examples * args.num_train_epochs
    )


def schedule(args: TrainingArguments, steps: int, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that ``args`` request for a run of ``steps``. Raises ConfigError for a
    wrong argument.
    """
    if (of_deepspeed := schedule_of_deepspeed(args, steps, optimizer)) is not None:
        return of_deepspeed
    warmup = args.get_warmup_steps(steps)
    kind: Any = args.lr_scheduler_type  # which ``TrainingArguments`` makes a `SchedulerType` of
    options: Any = args.lr_scheduler_kwargs  # ... and a dictionary
    try:
        return get_scheduler(kind, optimizer, warmup, steps, options)
    except (TypeError, ValueError) as error:
        what = f"lr_scheduler_kwargs of {kind.value}"
        remedy = "Correct lr_scheduler_kwargs"
        raise ConfigError(what, args.lr_scheduler_kwargs, str(error).rstrip("."), remedy) from error


class LearningRate:
    """The learning rate, changed by steps or by evaluations.

    groups:    have the rates.
    scheduler: changes them; ConfigError if it changes another optimizer's, or if its state cannot
               be stored as JSON.
    """

    def __init__(self, groups: ParameterGroups, scheduler: LRScheduler):
        self.groups = groups
        self.scheduler: Any = scheduler  # some step by a metric
        try:
            json.dumps(scheduler.state_dict())
        except TypeError as error:
            reason = f"its state cannot be saved as JSON: {error}"
            raise ConfigError(
                "lr_scheduler", type(scheduler).__name__, reason, "Keep plain numbers in it"
            ) from error

    @property
    def follows_metric(self) -> bool:
        """Whether evaluations, not steps, change the learning rate."""
        return isinstance(self.scheduler, ReduceLROnPlateau | GreedyLR)

    @property
    def logged(self) -> float:
        """Return the schedule's rate of the next step, which ``transformers.Trainer`` logs."""
        return float(
            self.groups.param_groups[0]["lr"]
            if self.follows_metric
            else self.scheduler.get_last_lr()[0]
        )

    def advance(self) -> None:
        """Advance the schedule by a step."""
        if not self.follows_metric:
            self.scheduler.step()

    def follow(self, metric: float) -> None:
        """Advance the schedule by an evaluation."""
        self.scheduler.step(metric)

    def state(self) -> dict:
        """Return a JSON-safe state for ``load``."""
        return {"scheduler": self.scheduler.state_dict(), "rates": self.groups.rates()}

    def load(self, state: dict) -> None:
        try:
            self.scheduler.load_state_dict(state["scheduler"])
            self.groups.load_rates(state["rates"])
        except (KeyError, TypeError, ValueError) as error:
            what = "checkpoint's learning rate"
            remedy = "Start a new run from its weights"
            raise CheckpointError(
                what, "(unreadable)", f"{type(error).__name__}: {error}", remedy
            ) from error
