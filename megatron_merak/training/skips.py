"""Steps skipped because their gradient was not finite: a single one may happen, many in a row end
the run.

In fp16, a step is also skipped if its loss scale was too high, until one fits. Such steps do not
count.
"""

from collections.abc import Callable

import torch.distributed as dist

from ..errors import NumericsError
from ..optimizer.loss_scale import LossScaler
from ..parallel.agree import gather_json
from ..parallel.buffers import ParameterBuffer

_NAMED = 5  # parameters named in one message


class SkippedSteps:
    """Counts consecutive skipped steps for which the loss scale is not to blame.

    limit:  this many end the run.
    scaler: of the loss; None: there is none.
    buffer: this rank's parameters and gradients.
    group:  all ranks of the job; None for a single process.
    flag:   the user's name of the limit.
    """

    def __init__(
        self,
        limit: int,
        buffer: ParameterBuffer,
        group: dist.ProcessGroup | None,
        flag: str = "--max-consecutive-skipped-steps",
        scaler: LossScaler | None = None,
    ):
        self.scaler = scaler or LossScaler()
        self.limit = limit
        self.buffer = buffer
        self.group = group
        self.flag = flag
        self.in_a_row = 0

    def count(self, skipped: bool, first: Callable[[], str] = lambda: "") -> str:
        """Count a step, after the scaler's update and before its gradient is overwritten; all ranks
        pass the same.

        first: returns where the numbers of this step stop being finite, "" if unknown; collective.

        Return a sentence on the first of several skipped steps; "" for any other. Raises
        `NumericsError` on every rank at the limit. Collective only then.
        """
        self.in_a_row = self.in_a_row + 1 if skipped and not self.scaler.to_blame else 0
        if self.in_a_row < self.limit:
            place = first() if self.in_a_row == 1 else ""
            return f"the step was skipped: {place} is not finite" if place else ""
        total, names = bad_gradients(self.buffer, self.group)
        place = first()
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = f"{', '.join(names[:_NAMED])}{more} ({len(names)} of {total} parameters)"
        scale = f" at a loss scale of {self.scaler.scale}" if self.scaler.scales else ""
        reason = (
            f"so many steps in a row were skipped{scale}: gradients are not finite, in the "
            "order of the backward "
        )
        lower = f"a lower {self.scaler.setting}, " if self.scaler.setting else ""
        remedy = f"Resume from the last checkpoint with {lower}a lower learning rate"
        remedy += " or in bf16, or look" if self.scaler.scales else ", or look"
        remedy = f"{remedy} at the data and at that module"
        reason = f"{reason}pass {listed}"
        if place:
            reason = f"{reason}; {place} is the first that is not finite"
        raise NumericsError(self.flag, self.limit, reason, remedy)


def bad_gradients(
    buffer: ParameterBuffer, group: dist.ProcessGroup | None
) -> tuple[int, list[str]]:
    """Return the number of the model's parameters, and the names of those whose gradient is not
    finite on some rank.

    Names are in the order of the backward, the last stage's first. Collective.
    """
    bad = [
        name
        for name in reversed(buffer.slots)
        if not all(own.isfinite().all() for own in buffer.own_grad(name))
    ]
    reports = gather_json([list(buffer.slots), bad], group, "cpu")
    known = {name for names, _ in reports for name in names}
    return len(known), list(dict.fromkeys(name for _, names in reversed(reports) for name in names))
