"""Check that every rank runs the same plan."""

import torch.distributed as dist

from ..errors import PlanError
from ..parallel.agree import broadcast_json, gather_json
from ..plan import Plan
from ..planner.tables import difference


def check_same_plan(plan: Plan, control: dist.ProcessGroup | None) -> None:
    """Raise PlanError, naming the first difference, on every rank unless all have the same plan.

    control: the group of all ranks; collective over it.
    """
    if control is None:
        return
    first = Plan.from_dict(broadcast_json(plan.to_dict(), control, "cpu"))
    mismatch = "" if plan == first else difference(first, plan) or "it differs"
    for rank, report in enumerate(gather_json(mismatch, control, "cpu")):
        if report:
            reason = f"rank {rank} has a different one than rank 0: {report.splitlines()[0]}"
            raise PlanError(
                "plan",
                f"(of {plan.grid.size} ranks)",
                reason,
                "Use the same model and settings on all ranks, and one --plan where GPUs differ",
            )
