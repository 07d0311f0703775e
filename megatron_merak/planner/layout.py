"""Chooses where a chain of units is cut into stages and what each stage recomputes; each choice
affects the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isinf

from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.plan import Plan, StagePlan, Unit, bytes_text, trained_tied
from megatron_merak.planner.cost import unit_costs
from megatron_merak.planner.host import update_time
from megatron_merak.planner.memory import Ledger
from megatron_merak.planner.offload import NOTHING, Offload, unit_seconds
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.partition import ExtraCost, partition
from megatron_merak.planner.recompute import Chooser, Recompute


def cut_costs(
    units: Sequence[Unit], exposed: Sequence[Times], microbatches: int, update: float
) -> tuple[list[float], list[tuple[float, list[int]]]]:
    """Return what a step costs by which a chain is cut: of each unit, and of tensors that several
    units have with the indices of these units.

    exposed: times of each unit.
    update:  seconds of the optimizer for one parameter.
    """
    users: dict[tuple[str, int], list[int]] = {}
    for index, unit in enumerate(units):
        for tensor in trained_tied(unit):
            users.setdefault(tensor, []).append(index)
    costs = [
        microbatches * (each.forward + each.backward) + (unit.parameters - unit.frozen) * update
        for unit, each in zip(units, exposed, strict=True)
    ]
    # a stage updates its copy of a tied tensor once, however many of its units use it
    return costs, [(values * update, indices) for (_, values), indices in users.items()]


class StageLayouts:
    """Chooses the stages of a plan.

    draft: the plan, with any stages.
    limit: bytes that a rank may use, 0 where that is not known.
    """

    def __init__(self, draft: Plan, recompute: Recompute, limit: float, offload: Offload = NOTHING):
        self.draft = draft
        # what fits is chosen, and so differs between stages
        self._by_fit = recompute.method == "capacity" or offload.automatic
        self.limit = limit
        self.units = draft.units
        self.schedule = draft.schedule
        costs = unit_costs(self.units, draft.cluster, draft.dtype, draft.grid, draft.expert_copies)
        exposed = [times([cost], draft.overlap) for cost in costs]
        update = update_time(draft)
        self.ledger = Ledger.of(draft)
        most = Recompute("full") if recompute.method == "capacity" else recompute
        away = Offload(layers=len(self.units)) if recompute.method == "none" else NOTHING
        ops = (op for entry in self.schedule.entries() for op in ops_of(entry))
        seconds = unit_seconds(costs, draft.overlap, splits=any(op.kind is Kind.W for op in ops))
        self.chooser, self.unlimited_chooser = (
            Chooser(
                method,
                self.units,
                seconds,
                self.ledger,
                memory=memory,
                device=draft.cluster.device,
                offload=what,
            )
            for method, memory, what in (
                (recompute, limit, offload),
                (most, 0, away if offload.automatic else offload),
            )
        )
        count = self.schedule.microbatches
        self.costs, self.shared = cut_costs(self.units, exposed, count, update)

    def plans(self, memory_gb: float | None) -> list[Plan]:
        """Return the plans to choose from, in which every rank fits into its memory.

        If there is none: plans that do not fit if ``memory_gb`` is None, otherwise raise PlanError.
        """
        cuts = self._cuts(self.chooser)
        if not cuts:
            cuts = self._cuts(self.unlimited_chooser)
            fitting = [stages for stages in cuts if self.chooser.largest_rank(stages) <= self.limit]
            if memory_gb is not None and not fitting:
                raise self._too_little(memory_gb, cuts[-1])
            cuts = fitting or cuts
        return [replace(self.draft, stages=stages) for stages in dict.fromkeys(cuts)]

    def _cuts(self, chooser: Chooser) -> list[tuple[StagePlan, ...]]:
        """Cut by cost including recomputation; where that depends on the stage, also by cost
        without it.
        """
        count = self.schedule.microbatches

        def recompute_cost(stage: int, first: int, last: int) -> float:
            return count * chooser.extra(stage, first, last)

        def allowed(stage: int, first: int, last: int) -> float:
            return inf if isinf(recompute_cost(stage, first, last)) else 0.0

        extra_costs: list[ExtraCost] = [recompute_cost]
        if self._by_fit and chooser.memory:
            extra_costs.append(allowed)
        cuts = []
        for extra_cost in extra_costs:
            try:
                bounds = partition(self.costs, self.schedule.stages, extra_cost, self.shared)
            except PlanError:
                continue
            stages = chooser.stages(bounds)
            if not chooser.memory or chooser.largest_rank(stages) <= chooser.memory:
                cuts.append(stages)
        return cuts

    def _too_little(self, memory_gb: float, stages: tuple[StagePlan, ...]) -> PlanError:
        """Return the error that names the stage which needs most memory when cut by cost alone."""
        needs = [memory.total for memory in self.ledger.together(stages)]
        stage = needs.index(max(needs))
        first = self.units[stages[stage].first].name
        last = self.units[stages[stage].last - 1].name
        reason = (
            f"no cut into {len(needs)} stages fits; cut by cost, stage {stage} ({first} .. "
            f"{last}) needs "
        )
        reason += bytes_text(needs[stage])
        remedy = (
            "Use more tensor- or pipeline-parallel ranks, a smaller micro-batch or full "
            "recomputation"
        )
        return PlanError("--device-memory-gb", memory_gb, reason, remedy)
