"""What makes a result unexpected, by the rules of Megatron-LM: not finite, or much larger than the
first ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

FACTOR = 10.0  # of the largest of the first values, from which on a value is unexpectedly large
SAMPLES = 100  # how many first values there are


@dataclass(frozen=True)
class Checks:
    """What is done about unexpected results; fields are the settings of these names in
    `TrainConfig`.
    """

    rerun_mode: str = "disabled"
    check_for_spiky_loss: bool = False
    check_for_large_grads: bool = False
    no_check_for_nan_in_loss_and_grad: bool = False
    error_injection_rate: int = 0
    error_injection_type: str = "transient_error"

    @property
    def active(self) -> bool:
        return (
            self.rerun_mode != "disabled" or self.check_for_spiky_loss or self.check_for_large_grads
        )


def checks_of(settings: Any) -> Checks:
    """Return the checks that a `TrainConfig`, or a MerakArguments, requests."""
    return Checks(**{field.name: getattr(settings, field.name) for field in fields(Checks)})


@dataclass(frozen=True)
class Rejection:
    """An unexpected result of this rank.

    text:  what it is.
    fatal: whether the run must not go on from it.
    """

    text: str
    fatal: bool


class _Largest:
    """The largest of the first values, with which later ones are compared; values that are not
    finite do not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def exceeded(self, value: float) -> bool:
        value = abs(value)
        if not math.isfinite(value):
            return False
        if self.count < SAMPLES:
            self.count += 1
            self.value = max(self.value, value)
            return False
        return value >= FACTOR * self.value


class Judge:
    """Finds unexpected results among those of this rank.

    finite: whether numbers that are not finite are unexpected: not where a loss scale makes
            gradients overflow.
    """

    def __init__(self, checks: Checks, finite: bool):
        self.checks = checks
        self.finite = finite and not checks.no_check_for_nan_in_loss_and_grad
        self._loss = _Largest()
        self._gradient = _Largest()

    def rejection(self, losses: Sequence[float], norm: float) -> Rejection | None:
        """Return the first unexpected result of a step.

        losses: of this rank's micro-batches, in order; none before the last stage.
        norm:   of this rank's gradient, before it is added to those of others.
        """
        found: list[Rejection] = []
        for number, loss in enumerate(losses):
            where = f"the loss of micro-batch {number}"
            if self.finite and not math.isfinite(loss):
                found.append(Rejection(f"{where} is {loss}", True))
            if self.checks.check_for_spiky_loss and self._loss.exceeded(loss):
                found.append(Rejection(_large(where, loss, self._loss.value), False))
        if self.finite and not math.isfinite(norm):
            found.append(Rejection(f"the gradient has the norm {norm}", True))
        if self.checks.check_for_large_grads and self._gradient.exceeded(norm):
            found.append(
                Rejection(_large("the norm of the gradient", norm, self._gradient.value), False)
            )
        return next(iter(found), None)


def _large(what: str, value: float, largest: float) -> str:
    return (
        f"{what} is {value:.6g}, at least {FACTOR:.0f} times the largest of the first "
        f"{SAMPLES}, {largest:.6g}"
    )
