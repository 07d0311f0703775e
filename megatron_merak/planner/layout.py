"""Chooses where a chain of units is cut into stages and what each stage recomputes; each choice
affects the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isinf

from megatron_merak.cluster import Device
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.plan import (
    Hardware,
    Plan,
    StagePlan,
    Unit,
    bytes_text,
    exceeding,
    hardware_of,
    limits_of,
    trained_tied,
)
from megatron_merak.planner.host import update_time
from megatron_merak.planner.memory import Ledger
from megatron_merak.planner.offload import NOTHING, Offload, unit_seconds
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.partition import ExtraCost, in_ticks, level, partition
from megatron_merak.planner.rank_costs import Costs, rank_costs
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
        in_ticks(
            microbatches * (each.forward + each.backward) + (unit.parameters - unit.frozen) * update
        )
        for unit, each in zip(units, exposed, strict=True)
    ]
    # a stage updates its copy of a tied tensor once, however many of its units use it
    return costs, [(in_ticks(values * update), indices) for (_, values), indices in users.items()]


CutCosts = tuple[Sequence[float], Sequence[tuple[float, Sequence[int]]]]  # see `cut_costs`


class LeastCosts:
    """What every stage costs at least, whichever rank has it, and what it costs beyond that.

    of_ranks: the different costs of pipeline ranks, of the same units and tensors.
    """

    def __init__(self, of_ranks: Sequence[CutCosts]):
        columns = zip(*(costs for costs, _ in of_ranks), strict=True)
        tensors = zip(*(shared for _, shared in of_ranks), strict=True)
        self._alike = len(of_ranks) == 1
        self.costs = [min(column) for column in columns]
        self.shared = [(min(cost for cost, _ in each), each[0][1]) for each in tensors]

    def beyond(self, own: CutCosts, first: int, last: int) -> float:
        """Return what units [first, last) cost a rank beyond the least. own: its costs."""
        if self._alike:
            return 0.0
        costs, shared = own
        more = sum(costs[first:last]) - sum(self.costs[first:last])
        for (cost, users), (least, _) in zip(shared, self.shared, strict=True):
            if any(first <= user < last for user in users):
                more += cost - least
        return max(0.0, more)


class _Seat:
    """What stages cost on pipeline ranks that compute with the same devices.

    limited:   chooses what stages recompute and offload within the memory of a rank.
    unlimited: chooses it where that does not suffice.
    costs, shared: see `cut_costs`.
    """

    def __init__(
        self,
        draft: Plan,
        recompute: Recompute,
        offload: Offload,
        ledger: Ledger,
        costs: Costs,
        hardware: Hardware,
        limit: float,
        limits: Sequence[float],
    ):
        exposed = [times([cost], draft.overlap) for cost in costs]
        update = update_time(draft, hardware)
        most = Recompute("full") if recompute.method == "capacity" else recompute
        away = Offload(layers=len(draft.units)) if recompute.method == "none" else NOTHING
        ops = (op for entry in draft.schedule.entries() for op in ops_of(entry))
        seconds = unit_seconds(costs, draft.overlap, splits=any(op.kind is Kind.W for op in ops))
        self.limited, self.unlimited = (
            Chooser(
                method,
                draft.units,
                seconds,
                ledger,
                memory=memory,
                device=hardware.slowest_copies,
                offload=what,
                limits=bounds,
            )
            for method, memory, what, bounds in (
                (recompute, limit, offload, limits),
                (most, 0, away if offload.automatic else offload, None),
            )
        )
        count = draft.schedule.microbatches
        self.costs, self.shared = cut_costs(draft.units, exposed, count, update)


class StageLayouts:
    """Chooses the stages of a plan.

    draft: the plan, with any stages.
    limit: bytes that a rank may use, 0 where that is not known; see ``Hardware.limit``.
    """

    def __init__(self, draft: Plan, recompute: Recompute, limit: float, offload: Offload = NOTHING):
        self.draft = draft
        # what fits is chosen, and so differs between stages
        self._by_fit = recompute.method == "capacity" or offload.automatic
        self._by_ratio = recompute.method == "stage-aware"
        self.limits = limits_of(draft.cluster, draft.grid, limit)
        self.units = draft.units
        self.schedule = draft.schedule
        self.ledger = Ledger.of(draft)
        known: dict[tuple[Device, ...], _Seat] = {}
        costs = rank_costs(self.units, draft.cluster, draft.dtype, draft.grid, draft.expert_copies)
        hardware = hardware_of(draft.cluster, draft.grid)
        for own, each, own_limit in zip(costs, hardware, self.limits, strict=True):
            if each.devices not in known:
                known[each.devices] = _Seat(
                    draft,
                    recompute,
                    offload,
                    self.ledger,
                    costs=own,
                    hardware=each,
                    limit=own_limit,
                    limits=self.limits,
                )
        self.seats = [known[each.devices] for each in hardware]
        self.cutting = LeastCosts([(seat.costs, seat.shared) for seat in known.values()])

    def plans(self, memory_gb: float | None) -> list[Plan]:
        """Return the plans to choose from, in which every rank fits into its memory.

        If there is none: plans that do not fit if ``memory_gb`` is None, otherwise raise PlanError.
        """
        cuts = self._cuts([seat.limited for seat in self.seats])
        if not cuts:
            cuts = self._cuts([seat.unlimited for seat in self.seats])
            fitting = [
                stages
                for stages in cuts
                if not exceeding(self.seats[0].limited.peaks(stages), self.limits)
            ]
            if memory_gb is not None and not fitting:
                raise self._too_little(memory_gb, cuts[-1])
            cuts = fitting or cuts
        return [replace(self.draft, stages=stages) for stages in dict.fromkeys(cuts)]

    def _cuts(self, choosers: Sequence[Chooser]) -> list[tuple[StagePlan, ...]]:
        """Cut by cost including recomputation; where that depends on the stage, also by cost
        without it. A cut that is the best whatever the memory, and fits, is taken.

        choosers: of each pipeline rank.
        """
        count = self.schedule.microbatches
        of_stage = [choosers[self.schedule.rank_of(i)] for i in range(self.schedule.stages)]
        seat_of = [self.seats[self.schedule.rank_of(i)] for i in range(self.schedule.stages)]

        def more(stage: int, first: int, last: int) -> float:
            own = seat_of[stage]
            return self.cutting.beyond((own.costs, own.shared), first, last)

        def recompute_cost(stage: int, first: int, last: int) -> float:
            again = in_ticks(count * of_stage[stage].extra(stage, first, last))
            return again + more(stage, first, last)

        def allowed(stage: int, first: int, last: int) -> float:
            return inf if isinf(recompute_cost(stage, first, last)) else more(stage, first, last)

        def with_room(stage: int, first: int, last: int) -> float:
            if self._by_fit:
                return more(stage, first, last)
            again = count * seat_of[stage].unlimited.extra(stage, first, last)
            return in_ticks(again) + more(stage, first, last)

        extra_costs: list[ExtraCost] = [recompute_cost]
        if self._by_fit and choosers[0].memory:
            extra_costs.append(allowed)
        if choosers[0].memory:
            bounds = self._bounds(with_room)
            runs = [(stage, *run) for stage, run in enumerate(pairwise(bounds))]
            if all(recompute_cost(*run) == with_room(*run) for run in runs):
                extra_costs = [with_room]
        cuts = []
        for extra_cost in extra_costs:
            try:
                bounds = self._bounds(extra_cost)
            except PlanError:
                continue
            leveled = level(
                bounds, self.schedule.homes, self.cutting.costs, extra_cost, self.cutting.shared
            )
            for each in dict.fromkeys((bounds, leveled)):
                stages = self._chosen(of_stage, each)
                if not exceeding(choosers[0].peaks(stages), choosers[0].limits):
                    cuts.append(stages)
        return cuts

    def _bounds(self, extra_cost: ExtraCost) -> tuple[int, ...]:
        cutting = self.cutting
        return partition(cutting.costs, self.schedule.stages, extra_cost, cutting.shared)

    def _chosen(self, of_stage: Sequence[Chooser], bounds: Sequence[int]) -> tuple[StagePlan, ...]:
        """Return the stages between these bounds, each with what its own chooser chooses; by Merak's
        rule one chooses for all.
        """
        if self._by_ratio:
            return of_stage[0].stages(bounds)
        return tuple(
            chooser.stage(stage, bounds[stage], bounds[stage + 1])
            for stage, chooser in enumerate(of_stage)
        )

    def _too_little(self, memory_gb: float, stages: tuple[StagePlan, ...]) -> PlanError:
        """Return the error that names the stage which needs most memory when cut by cost alone."""
        needs = [memory.total for memory in self.ledger.together(stages)]
        over = [
            need - self.limits[self.schedule.rank_of(index)] for index, need in enumerate(needs)
        ]
        stage = over.index(max(over))
        first = self.units[stages[stage].first].name
        last = self.units[stages[stage].last - 1].name
        reason = (
            f"no cut into {len(needs)} stages fits; cut by cost, stage {stage} ({first} .. "
            f"{last}) needs "
        )
        reason += bytes_text(needs[stage])
        if self.draft.cluster.nodes:
            hardware = hardware_of(self.draft.cluster, self.draft.grid)
            reason += f" on {hardware[self.schedule.rank_of(stage)]}"
        remedy = (
            "Use more tensor- or pipeline-parallel ranks, a smaller micro-batch or full "
            "recomputation"
        )
        return PlanError("--device-memory-gb", memory_gb, reason, remedy)
