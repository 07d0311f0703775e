"""``--pipeline-schedule auto``: the fastest plan over the built-in schedules and those found by a
search.

Stages are placed one per rank, several per rank in turn (interleaved), or down the ranks and back
(V-shaped).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.pipeline_parallel.passes import without
from megatron_merak.pipeline_parallel.search.placement import StageHomes
from megatron_merak.pipeline_parallel.search.problem import MemoryLimits
from megatron_merak.pipeline_parallel.search.search import default_evaluations, search
from megatron_merak.plan import Plan, bytes_text, exceeding, limits_of, time_text
from megatron_merak.planner.memory import predicted_peaks, rank_memory
from megatron_merak.planner.predict import priced, stage_costs
from megatron_merak.planner.saved import footprint
from megatron_merak.planner.tables import align

REFERENCE = "1f1b"  # its memory is the cap where the memory of a rank is not known
AUTO = "auto"
# budget of all searches of a plan: evaluated schedules x stages x micro-batches
_WORK = 8 * 2000 * 256


@dataclass(frozen=True)
class Task:
    """A search for a schedule of the stages of ``base``.

    split: whether weight gradients are separate ops (W).
    early: whether recomputations may be separate ops (R).
    """

    base: Plan
    split: bool
    early: bool

    @property
    def like(self) -> Schedule:
        """The schedule of ``base`` without R ops, and with a W after each backward if ``split``,
        otherwise without.
        """
        plain = without(without(self.base.schedule, Kind.R), Kind.W)
        if not self.split:
            return plain
        return replace(
            plain, ranks=tuple(_with_weight_gradients(program) for program in plain.ranks)
        )


def starts(
    placements: Sequence[StageHomes], microbatches: int, group: int | None
) -> tuple[Schedule, ...]:
    """Return the built-in schedules that auto chooses from, that of ``REFERENCE`` first.

    placements: allowed placements of stages on ranks.
    group:      see ``build_schedule``, which raises if auto does not support it.
    """
    ranks = placements[0].ranks
    schedules = [build_schedule(REFERENCE, ranks, microbatches, None, group=group)]
    homes = [placement.home for placement in placements]
    for name, row in BUILDERS.items():
        for chunks in dict.fromkeys(placement.chunks for placement in placements):
            if name == REFERENCE or (row.chunks != chunks and not row.chunked):
                continue
            try:
                built = build_schedule(name, ranks, microbatches, chunks)
            # not defined for these numbers of ranks, micro-batches and chunks
            except ScheduleError:
                continue
            if _home(built) in homes and (chunks > 1 or not row.chunked):
                schedules.append(built)
    return tuple(schedules)


class Automatic:
    """Chooses the fastest plan, by the model.

    plans:           of the schedules of ``starts``, priced.
    limit:           memory of a rank in bytes, 0 where that is not known.
    placements:      allowed placements of stages on ranks.
    report_progress: called with the finished share of the work, 0 to 1.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        limit: float,
        placements: Sequence[StageHomes],
        report_progress: Callable[[float], object],
    ):
        self.placements = placements
        self.report_progress = report_progress
        homes = [placement.home for placement in placements]
        self.built = [plan for plan in plans if _home(plan.schedule) in homes]
        self.caps: Sequence[float] = ()
        self.cap_reason = ""
        if self.built:
            self.caps, self.cap_reason = _caps(plans, self.built, limit)
        self.searched: list[Plan] = []
        self.unsearched: set[tuple[int, ...]] = set()

    def choose(self) -> Plan | None:
        """Return the fastest plan within the cap, with the comparison as ``schedule_note``; None
        without any plan.
        """
        if not self.built:
            return None
        fitting = [plan for plan in self.built if self._fits(plan)]
        self._search()
        best = min([*fitting, *self.searched] or self.built, key=lambda plan: plan.predicted_time)
        return replace(best, schedule_note=self._note(best))

    def _search(self) -> None:
        tasks = self._tasks()
        budget = _WORK
        searched = set()
        for index, task in enumerate(tasks):
            home = _home(task.base.schedule)
            stages = len(home)
            count = task.base.num_microbatches
            evaluations = default_evaluations(stages, count, len(tasks))
            if index and evaluations * stages * count > budget:
                continue
            budget -= evaluations * stages * count
            searched.add(home)

            def report(share: float, index: int = index) -> object:
                return self.report_progress((index + share) / len(tasks))

            plan = self._run(task, evaluations, report)
            self.searched += [] if plan is None else [plan]
        self.unsearched = {_home(task.base.schedule) for task in tasks} - searched

    def _tasks(self) -> list[Task]:
        """Return the searches to run, the most promising first: for each placement and overlap,
        from its best plan.
        """
        bases: dict[tuple[object, str], Plan] = {}
        ordered = sorted(self.built, key=lambda plan: (not self._fits(plan), plan.predicted_time))
        for plan in ordered:
            if plan.overlap != "pair":
                bases.setdefault((_home(plan.schedule), plan.overlap), plan)
        tasks = [
            Task(base, split, early)
            for base in bases.values()
            for split in (True, False)
            for early in (True, False)
            if not early or any(stage.recompute for stage in base.stages)
        ]
        return sorted(
            tasks, key=lambda task: priced(replace(task.base, schedule=task.like)).predicted_time
        )

    def _run(
        self, task: Task, evaluations: int, report_progress: Callable[[float], object]
    ) -> Plan | None:
        """Return the plan with the schedule that a search finds; None where none fits."""
        base = task.base
        home = _home(task.base.schedule)
        costs = stage_costs(replace(base, schedule=task.like))
        may_recompute = tuple(task.early and each.taped > each.kept for each in _footprints(base))
        try:
            result = search(
                costs,
                base.num_microbatches,
                limits=self._limits(base, may_recompute),
                recompute=may_recompute,
                split_weights=task.split,
                evaluations=evaluations,
                placement=home,
                report_progress=report_progress,
            )
        except ScheduleError:  # no micro-batch runs under these limits
            return None
        plan = priced(replace(base, schedule=result.schedule))
        return plan if self._fits(plan) else None

    def _fits(self, plan: Plan) -> bool:
        """Whether each rank keeps within its cap."""
        peaks = predicted_peaks(plan)
        return all(peak <= cap for peak, cap in zip(peaks, self.caps, strict=True))

    def _limits(self, base: Plan, may_recompute: Sequence[bool]) -> MemoryLimits:
        """Return the memory left for activations on each rank, and what micro-batches keep on each
        stage.

        may_recompute: per stage, whether it may have R ops. A backward then counts as keeping all
                       tapes at once.
        """
        footprints = _footprints(base)
        available = tuple(
            cap - memory.total + memory.activations
            for cap, memory in zip(self.caps, rank_memory(base), strict=True)
        )
        kept = tuple(each.kept for each in footprints)
        taped = tuple(
            (each.taped if recomputes else each.backward) - each.kept
            for each, recomputes in zip(footprints, may_recompute, strict=True)
        )
        return MemoryLimits(available, kept, taped, tuple(each.held for each in footprints))

    def _note(self, best: Plan) -> str:
        """Return a table of the best plans of each placement, which marks the chosen one."""
        rows = []
        for placement in self.placements:
            candidates = [
                [
                    plan
                    for plan in plans
                    if _home(plan.schedule) == placement.home and self._fits(plan)
                ]
                for plans in (self.built, self.searched)
            ]
            built, searched = (
                min(plans, key=lambda plan: plan.predicted_time, default=None)
                for plans in candidates
            )
            of_builder = (
                "no builder fits"
                if built is None
                else f"{built.schedule.name} {time_text(built.predicted_time)}"
            )
            of_search = (
                "searched: none fits"
                if searched is None
                else f"searched {time_text(searched.predicted_time)}"
            )
            if searched is None and placement.home in self.unsearched:
                of_search = "not searched: too large"
            chosen = "chosen" if _home(best.schedule) == placement.home else ""
            rows.append(("", placement.name, of_builder, of_search, chosen))
        return "\n".join([f"chosen by auto within {self.cap_reason}:", *align(rows, range(5))])


def largest(plan: Plan) -> int:
    """Return the peak memory in bytes of the rank that needs most, of a priced plan."""
    return max(predicted_peaks(plan))


def _caps(
    plans: Sequence[Plan], built: Sequence[Plan], limit: float
) -> tuple[Sequence[float], str]:
    """Return the bytes that each rank may use, and the explanation of these numbers."""
    limits = limits_of(built[0].cluster, built[0].grid, limit)
    sizes = " or ".join(bytes_text(int(each)) for each in dict.fromkeys(limits))
    if limit and any(not exceeding(predicted_peaks(plan), limits) for plan in built):
        return limits, f"{sizes} per rank, its memory"
    plain = [plan for plan in plans if plan.schedule.name == REFERENCE]
    cap = largest(min(plain, key=lambda plan: plan.predicted_time))
    unfit = f", since no schedule fits into {sizes}" if limit else ""
    reason = f"{bytes_text(cap)} per rank, the memory that {REFERENCE} needs{unfit}"
    return [cap] * len(limits), reason


def _with_weight_gradients(
    program: Sequence[Op | tuple[Op, ...]],
) -> tuple[Op | tuple[Op, ...], ...]:
    """Return a rank's ops with a W behind each backward."""
    ops: list[Op | tuple[Op, ...]] = []
    for op in program:
        ops.append(op)
        if isinstance(op, Op) and op.kind is Kind.B:
            ops.append(Op(op.stage, Kind.W, op.microbatch))
    return tuple(ops)


def _footprints(plan: Plan) -> list:
    return [footprint(plan.units, stage) for stage in plan.stages]


def _home(schedule: Schedule) -> tuple[int, ...]:
    """Return the rank of each stage."""
    return tuple(map(schedule.rank_of, range(schedule.stages)))
