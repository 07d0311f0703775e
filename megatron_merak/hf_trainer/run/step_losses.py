"""Losses of a run, and of the steps that no log has named yet."""

import math
from dataclasses import dataclass


@dataclass
class StepLosses:
    """Losses that steps had, and what a log says beside them.

    filters:     whether a loss that is not finite counts as the mean of the others.
    run:         sum over the steps of this call of ``train``.
    pending:     sum since the last log.
    last_logged: step of the last log.
    grad_norm:   of the last step; None: there was none.
    used_rate:   learning rate of the last step; None: there was none.
    """

    filters: bool
    run: float = 0.0
    pending: float = 0.0
    last_logged: int = 0
    grad_norm: float | None = None
    used_rate: float | None = None

    def add(self, loss: float, done: int) -> None:
        """Count the loss of a step. done: steps before it."""
        if self.filters and not math.isfinite(loss):
            loss = self.pending / (1 + done - self.last_logged)
        self.pending += loss
        self.run += loss

    def log(self, step: int, rate: float) -> dict[str, float]:
        """Return what a log after ``step`` says, and begin anew. rate: where no step was."""
        logs = {"loss": self.pending / (step - self.last_logged)}
        if self.grad_norm is not None:
            logs["grad_norm"] = self.grad_norm
        logs["learning_rate"] = rate if self.used_rate is None else self.used_rate
        self.pending = 0.0
        self.last_logged = step
        return logs
