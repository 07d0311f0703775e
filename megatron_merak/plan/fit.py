"""Check that a stored or edited plan fits this model, job and machine; errors name the first
difference.
"""

from collections.abc import Sequence
from itertools import zip_longest

from megatron_merak.errors import PlanError
from megatron_merak.plan.frozen import Plan


def check_ranks(plan: Plan, world_size: int) -> None:
    """Raise PlanError if a plan is for another number of ranks."""
    grid = plan.grid
    if grid.size != world_size:
        reason = (
            f"tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp} are {grid.size} ranks, "
            f"and the job has {world_size}"
        )
        raise PlanError(
            "plan: grid", grid.size, reason, f"Start {grid.size} ranks, or change grid.dp"
        )


def check_chain(plan: Plan, names: Sequence[str]) -> None:
    """Raise PlanError, naming the first difference, if a plan's units are not those of a model.

    names: of the model's units, in order.
    """
    for index, (planned, actual) in enumerate(
        zip_longest((unit.name for unit in plan.units), names)
    ):
        if planned != actual:
            has = "the model has none there" if actual is None else f"the model's is {actual}"
            reason = f"{has}; the plan has {len(plan.units)} units, the model {len(names)}"
            value = "(missing)" if planned is None else planned
            raise PlanError(f"plan: unit {index}", value, reason, "Make a plan of this model")
