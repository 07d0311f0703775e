"""What a training step tells whoever runs it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """loss: mean token loss of the global batch, on ranks of the last stage, else None. The rest is known to all.

    loss_scale: of the step that comes, None where there is none. zeros: elements of the model's gradient that are
    exactly zero, where --log-num-zeros-in-grad asks for them. staleness, late: see ``StepResult``.
    """

    loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool
    zeros: int | None = None
    loss_scale: float | None = None
    staleness: int | None = None
    late: bool = False
