"""The result of a training step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What a training step reports; the same on all ranks but ``loss``.

    loss:            mean token loss of the global batch on ranks of the last stage, else None.
    zeros:           with --log-num-zeros-in-grad, the number of elements of the gradient that are
                     exactly zero.
    loss_scale:      of the next step; None where none is used.
    staleness, late: see ``StepResult``.
    """

    loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool
    zeros: int | None = None
    loss_scale: float | None = None
    staleness: int | None = None
    late: bool = False
