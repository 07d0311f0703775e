"""What callbacks decide, and what they changed: the same on every rank, or an error on all."""

import math
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...errors import ConfigError
from ...parallel.agree import raise_together
from .rates import LearningRate
from .recapture import lost_writes
from .trainer_of_run import TrainerOfRun

DECISIONS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


class Decisions:
    """Lets all ranks do what the callbacks of any rank decide; else some would wait in a collective
    forever. Collective over all ranks.

    used_rates    learning rates and decays of the last step
    """

    def __init__(self, trainer: TrainerOfRun):
        self._trainer = trainer
        self._frozen = 0  # a checksum of the names that were frozen in the last step
        self._fault: ConfigError | None = None
        self.used_rates: Sequence[float] = ()

    def freeze(self, frozen: Sequence[str]) -> None:
        """Note the parameters that are frozen in a step."""
        self._frozen = zlib.crc32(" ".join(frozen).encode())

    def check_frozen(self, now: Sequence[str], before: Sequence[str]) -> None:
        """Let the next `agree` raise where callbacks froze or thawed parameters between two
        micro-batches.
        """
        if now == before:
            return
        name = next(name for name in (*now, *before) if (name in now) != (name in before))
        reason = (
            "it was changed between two micro-batches of a step, whose gradients are computed "
            "together"
        )
        remedy = "Freeze and thaw in on_step_begin, on_step_end or later events"
        self._fault = ConfigError(name, f"requires_grad={name in before}", reason, remedy)

    def agree(self, rate: LearningRate) -> None:
        """Set in the trainer's control what any rank decided. Called after every event whose
        decisions are read before the next one.

        rate: of the run.

        Raises ConfigError on every rank for a change of the optimizer's groups that is not
        supported, or that other ranks did not make.
        """
        group = self._trainer.control_group
        control = self._trainer.control
        fault = self._fault or rate.groups.fault() or lost_writes(self._trainer)
        if group is None:
            if fault is not None:
                raise fault
            return
        rates = [each if math.isfinite(each) else -1.0 for each in self.used_rates]
        decisions = [getattr(control, name) for name in DECISIONS]
        compared = [*rates, float(self._frozen)]
        own_values = [*decisions, fault is not None, *compared, *(-each for each in compared)]
        wishes = torch.tensor(own_values, dtype=torch.float64)
        dist.all_reduce(wishes, dist.ReduceOp.MAX, group=group)
        values = wishes.tolist()
        for name, wish in zip(DECISIONS, values, strict=False):
            setattr(control, name, bool(wish))
        if values[len(DECISIONS)]:
            raise_together(fault, group, "cpu")
        count = len(compared)
        most = values[-2 * count : -count]
        least = [-value for value in values[-count:]]
        if most[-1] != least[-1]:
            reason = "callbacks froze other parameters on other ranks"
            remedy = "Let them freeze the same on every rank: seed the choice"
            raise ConfigError("requires_grad", "(set)", reason, remedy)
        if most != least:
            reason = f"ranks used rates up to {most}"
            remedy = "Let callbacks set them on every rank"
            raise ConfigError("optimizer.param_groups", least, reason, remedy)

    def stops_midway(self) -> bool:
        """Whether a callback of any rank has ended training between two micro-batches: transformers
        discards their gradient.

        Raises ConfigError on every rank if it has ended the epoch: transformers adds that gradient
        to the next epoch's first step.
        """
        group = self._trainer.control_group
        control = self._trainer.control
        wishes = torch.tensor([int(control.should_training_stop), int(control.should_epoch_stop)])
        if group is not None:
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=group)
        control.should_training_stop, control.should_epoch_stop = map(bool, wishes.tolist())
        if control.should_epoch_stop and not control.should_training_stop:
            reason = (
                "a callback set it between micro-batches of a step, whose gradient would "
                "belong to no epoch"
            )
            raise ConfigError("should_epoch_stop", True, reason, "Set it in on_step_end")
        return control.should_training_stop
