"""The plan of ``--pipeline-schedule auto``: the fastest under the schedules of builders, and under those that a search
finds, where stages are one per rank, several in turn, or down the ranks and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.pipeline_parallel.passes import without
from megatron_merak.pipeline_parallel.search.placement import Placement
from megatron_merak.pipeline_parallel.search.problem import Limits
from megatron_merak.pipeline_parallel.search.search import default_evaluations, search
from megatron_merak.plan import Plan, bytes_text, time_text
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.predict import priced, stage_costs
from megatron_merak.planner.saved import footprint
from megatron_merak.planner.tables import align

REFERENCE = "1f1b"  # whose memory is the cap where that of a rank is not known
AUTO = "auto"
_WORK = 8 * 2000 * 256  # schedules that searches of a plan time, times the stages and micro-batches of each


@dataclass(frozen=True)
class Task:
    """A search for the stages of ``base``: whether weight gradients, and recomputations, may be ops of their own."""

    base: Plan
    split: bool
    early: bool

    @property
    def like(self) -> Schedule:
        """An order of its kind: weight gradients are behind each backward, or in it, which collectives they hide."""
        plain = without(without(self.base.schedule, Kind.R), Kind.W)
        if not self.split:
            return plain
        parts = [
            [(op, Op(op.stage, Kind.W, op.microbatch)) if op.kind is Kind.B else (op,) for op in ops]
            for ops in plain.ranks
        ]
        return replace(plain, ranks=tuple(tuple(chain.from_iterable(program)) for program in parts))


def starts(placements: Sequence[Placement], microbatches: int, group: int | None) -> tuple[Schedule, ...]:
    """The schedules of builders that auto chooses from, that of ``REFERENCE`` first.

    placements: where their stages may be. group: see ``build_schedule``, which raises where it does not go with auto.
    """
    ranks = placements[0].ranks
    found = [build_schedule(REFERENCE, ranks, microbatches, None, group)]
    homes = [placement.home for placement in placements]
    for name, row in BUILDERS.items():
        for chunks in dict.fromkeys(placement.chunks for placement in placements):
            if name == REFERENCE or (row.chunks != chunks and not row.chunked):
                continue
            try:
                built = build_schedule(name, ranks, microbatches, chunks)
            except ScheduleError:  # it is not defined for these numbers
                continue
            if _home(built) in homes and (chunks > 1 or not row.chunked):
                found.append(built)
    return tuple(found)


class Automatic:
    """The choice among plans.

    made: of the schedules of ``starts``, priced. limit: bytes of a rank, 0 where that is not known. placements: where
    stages may be. told: is called with the share of the work that is done.
    """

    def __init__(
        self, made: Sequence[Plan], limit: float, placements: Sequence[Placement], told: Callable[[float], object]
    ):
        self.placements, self.told = placements, told
        homes = [placement.home for placement in placements]
        self.built = [plan for plan in made if _home(plan.schedule) in homes]
        self.cap, self.why = _cap(made, self.built, limit) if self.built else (0, "")
        self.found: list[Plan] = []
        self.unsearched: set[tuple[int, ...]] = set()

    def choose(self) -> Plan | None:
        """The fastest plan within the cap, whose ``schedule_note`` says what it was chosen from; None of none."""
        if not self.built:
            return None
        fitting = [plan for plan in self.built if largest(plan) <= self.cap]
        self._search()
        best = min([*fitting, *self.found] or self.built, key=lambda plan: plan.predicted_time)
        return replace(best, schedule_note=self._note(best))

    def _search(self) -> None:
        tasks = self._tasks()
        left, searched = _WORK, set()
        for done, task in enumerate(tasks):
            home = _home(task.base.schedule)
            stages, count = len(home), task.base.num_microbatches
            evaluations = default_evaluations(stages, count, len(tasks))
            if done and evaluations * stages * count > left:
                continue
            left -= evaluations * stages * count
            searched.add(home)
            plan = self._found(task, evaluations, lambda share, done=done: self.told((done + share) / len(tasks)))
            self.found += [] if plan is None else [plan]
        self.unsearched = {_home(task.base.schedule) for task in tasks} - searched

    def _tasks(self) -> list[Task]:
        """For every placement and overlap, of the plan that is fastest and fits, the most promising first."""
        bases: dict[tuple[object, str], Plan] = {}
        ordered = sorted(self.built, key=lambda plan: (largest(plan) > self.cap, plan.predicted_time))
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
        return sorted(tasks, key=lambda task: priced(replace(task.base, schedule=task.like)).predicted_time)

    def _found(self, task: Task, evaluations: int, told: Callable[[float], object]) -> Plan | None:
        """The plan under the schedule that a search finds; None where none fits."""
        base, home = task.base, _home(task.base.schedule)
        costs = stage_costs(replace(base, schedule=task.like))
        may = tuple(task.early and one.taped > one.kept for one in _footprints(base))
        try:
            found = search(
                costs,
                base.num_microbatches,
                limits=self._limits(base, may),
                recompute=may,
                split_weights=task.split,
                evaluations=evaluations,
                placement=home,
                told=told,
            )
        except ScheduleError:  # no micro-batch runs under these limits
            return None
        plan = priced(replace(base, schedule=found.schedule))
        return plan if largest(plan) <= self.cap else None

    def _limits(self, base: Plan, may: Sequence[bool]) -> Limits:
        """Of each rank the room for what micro-batches keep, and what that is. may: of each stage, whether it may
        recompute ahead of backwards: then a backward, too, is taken to hold all tapes at once."""
        prints = _footprints(base)
        room = tuple(self.cap - one.total + one.activations for one in rank_memory(base))
        kept = tuple(one.kept for one in prints)
        taped = tuple((one.taped if ahead else one.backward) - one.kept for one, ahead in zip(prints, may, strict=True))
        return Limits(room, kept, taped, tuple(one.held for one in prints))

    def _note(self, best: Plan) -> str:
        """What was compared, and where the best of it has its stages."""
        rows = []
        for placement in self.placements:
            mine = [
                [plan for plan in plans if _home(plan.schedule) == placement.home and largest(plan) <= self.cap]
                for plans in (self.built, self.found)
            ]
            built, found = (min(plans, key=lambda plan: plan.predicted_time, default=None) for plans in mine)
            of_builder = (
                "no builder fits" if built is None else f"{built.schedule.name} {time_text(built.predicted_time)}"
            )
            of_search = "searched: none fits" if found is None else f"searched {time_text(found.predicted_time)}"
            if found is None and placement.home in self.unsearched:
                of_search = "not searched: too large"
            chosen = "chosen" if _home(best.schedule) == placement.home else ""
            rows.append(("", placement.name, of_builder, of_search, chosen))
        return "\n".join([f"chosen by auto within {self.why}:", *align(rows, range(5))])


def largest(plan: Plan) -> int:
    """Bytes of the rank that needs most, of a priced plan."""
    return max(sum(plan.predicted_bytes[stage] for stage in plan.stages_of(rank)) for rank in range(plan.grid.pp))


def _cap(made: Sequence[Plan], built: Sequence[Plan], limit: float) -> tuple[float, str]:
    """The bytes that a rank may use, and why so many."""
    if limit and any(largest(plan) <= limit for plan in built):
        return limit, f"{bytes_text(int(limit))} per rank, its memory"
    plain = [plan for plan in made if plan.schedule.name == REFERENCE]
    cap = largest(min(plain, key=lambda plan: plan.predicted_time))
    unfit = f", since no schedule fits into {bytes_text(int(limit))}" if limit else ""
    return cap, f"{bytes_text(cap)} per rank, the memory that {REFERENCE} needs{unfit}"


def _footprints(plan: Plan) -> list:
    return [footprint(plan.units, stage) for stage in plan.stages]


def _home(schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage."""
    return tuple(map(schedule.rank_of, range(schedule.stages)))
