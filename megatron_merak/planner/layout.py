"""Where a chain of units is cut into stages, and what these recompute: each choice follows from the other."""

from collections.abc import Mapping
from math import inf, isinf
from typing import Any

from megatron_merak.cluster import Cluster
from megatron_merak.errors import PlanError
from megatron_merak.plan import Plan, Shards, StagePlan, bytes_text, trained_tied
from megatron_merak.planner.cost import optimizer_bytes, unit_costs
from megatron_merak.planner.memory import Ledger
from megatron_merak.planner.overlap import times
from megatron_merak.planner.partition import More, partition
from megatron_merak.planner.recompute import Chooser, Recompute

GIB = 2**30


class Layout:
    """The stages of a plan.

    draft: the fields of a Plan but for its stages. limit: bytes that a rank may use, 0 where that is not known.
    """

    def __init__(self, draft: Mapping[str, Any], recompute: Recompute, limit: float):
        cluster: Cluster = draft["cluster"]
        self.draft, self.recompute, self.limit = draft, recompute, limit
        self.units, self.schedule = draft["units"], draft["schedule"]
        costs = unit_costs(self.units, cluster, draft["dtype"], draft["grid"])
        exposed = [times([cost], draft["overlap"]) for cost in costs]
        shards = Shards.of(draft["sharding"], draft["grid"].dp // draft["sharding_instances"])
        state = draft.get("state_bytes", 8.0)
        moved = optimizer_bytes(draft["dtype"], state)
        update = cluster.device.compute_time(0, moved, draft["dtype"]) / shards.optimizer
        copied = draft["bucket_size"] if draft.get("grad_reduce_in_bf16") and draft["grid"].dp > 1 else 0
        given = (shards, copied, state, draft.get("frozen_bytes", 0.0), draft["bucket_size"])
        self.ledger = Ledger(self.units, self.schedule, draft["dtype"], *given)
        seconds = [one.forward for one in exposed]
        self.chooser = Chooser(recompute, self.units, seconds, self.ledger, limit)
        most = Recompute("full") if recompute.method == "capacity" else recompute
        self.free = Chooser(most, self.units, seconds, self.ledger, 0)
        count = self.schedule.microbatches
        users: dict[tuple[str, int], list[int]] = {}
        for index, unit in enumerate(self.units):
            for tensor in trained_tied(unit):
                users.setdefault(tensor, []).append(index)
        # A stage updates its copy of a tied tensor once, whichever number of its units use it.
        self.shared = [(values * update, found) for (_, values), found in users.items()]
        self.costs = [
            count * (one.forward + one.backward) + (unit.parameters - unit.frozen) * update
            for unit, one in zip(self.units, exposed, strict=True)
        ]

    def plans(self, memory_gb: float | None) -> list[Plan]:
        """The plans to choose from, of which each rank keeps within its memory. Where none does, one that does not if
        ``memory_gb`` is None, else PlanError."""
        found = self._cuts(self.chooser)
        if not found:
            found = self._cuts(self.free)
            fitting = [stages for stages in found if self.chooser.largest_rank(stages) <= self.limit]
            if memory_gb is not None and not fitting:
                raise self._too_little(memory_gb, found[-1])
            found = fitting or found
        return [Plan(**self.draft, stages=stages) for stages in dict.fromkeys(found)]

    def _cuts(self, chooser: Chooser) -> list[tuple[StagePlan, ...]]:
        """By cost with what each stage recomputes; where that depends on the stage, also by cost without."""
        count = self.schedule.microbatches

        def more(stage: int, first: int, last: int) -> float:
            return count * chooser.extra(stage, first, last)

        def allowed(stage: int, first: int, last: int) -> float:
            return inf if isinf(more(stage, first, last)) else 0.0

        balanced: list[More] = [more]
        if self.recompute.method == "capacity" and chooser.memory:
            balanced.append(allowed)
        found = []
        for each in balanced:
            try:
                bounds = partition(self.costs, self.schedule.stages, each, self.shared)
            except PlanError:
                continue
            stages = chooser.stages(bounds)
            if not chooser.memory or chooser.largest_rank(stages) <= chooser.memory:
                found.append(stages)
        return found

    def _too_little(self, memory_gb: float, stages: tuple[StagePlan, ...]) -> PlanError:
        """The error that names the stage which needs most when memory is not looked at."""
        needs = [memory.total for memory in self.ledger.together(stages)]
        stage = needs.index(max(needs))
        first, last = self.units[stages[stage].first].name, self.units[stages[stage].last - 1].name
        reason = f"no cut into {len(needs)} stages fits; cut by cost, stage {stage} ({first} .. {last}) needs "
        reason += bytes_text(needs[stage])
        remedy = "Use more tensor- or pipeline-parallel ranks, a smaller micro-batch or full recomputation"
        return PlanError("--device-memory-gb", memory_gb, reason, remedy)
