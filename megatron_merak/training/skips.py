"""Steps skipped because their gradient was not finite: single ones happen, many in a row end the run."""

import torch.distributed as dist

from ..errors import NumericsError
from ..parallel.agree import gather_json
from ..parallel.buffers import ParameterBuffer

_NAMED = 5  # parameters named in one message


class SkippedSteps:
    """Counts steps skipped in a row.

    limit: so many end the run. buffer: this rank's parameters and gradients. group: all ranks of the job, None for a
    process alone. flag: what the user calls the limit.
    """

    def __init__(
        self,
        limit: int,
        buffer: ParameterBuffer,
        group: dist.ProcessGroup | None,
        flag: str = "--max-consecutive-skipped-steps",
    ):
        self.limit, self.buffer, self.group, self.flag = limit, buffer, group, flag
        self.in_a_row = 0

    def count(self, skipped: bool) -> None:
        """Take note of one step, before its gradient is overwritten; all ranks pass the same.

        Raises `NumericsError` on every rank at the limit. Collective then, and free of cost until then.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row < self.limit:
            return
        total, names = bad_gradients(self.buffer, self.group)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = f"{', '.join(names[:_NAMED])}{more} ({len(names)} of {total} parameters)"
        reason = (
            f"so many steps in a row were skipped: gradients are not finite, in the order of the backward pass {listed}"
        )
        remedy = "Resume from the last checkpoint with a lower learning rate, or look at the data and at that module"
        raise NumericsError(self.flag, self.limit, reason, remedy)


def bad_gradients(buffer: ParameterBuffer, group: dist.ProcessGroup | None) -> tuple[int, list[str]]:
    """The number of parameters of the model, and the names of those whose gradient is not finite on some rank.

    Names are in the order in which a backward pass comes to them, the last stage's first. Collective.
    """
    bad = [name for name in reversed(buffer.slots) if not all(own.isfinite().all() for own in buffer.own_grad(name))]
    reports = gather_json([list(buffer.slots), bad], group, "cpu")
    known = {name for names, _ in reports for name in names}
    return len(known), list(dict.fromkeys(name for _, names in reversed(reports) for name in names))
