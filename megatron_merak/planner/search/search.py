"""The search: the plan that is expected to be best first, until no bound is below the best."""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

from megatron_merak.cluster import GIB, Cluster, reserving
from megatron_merak.errors import ConfigError, MerakError
from megatron_merak.plan import Plan, Unit, time_text
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.memory import overflowing_ranks
from megatron_merak.planner.predict import in_order
from megatron_merak.planner.remedies import limit_of
from megatron_merak.planner.request import Request
from megatron_merak.planner.search.bound import Bounds, Case
from megatron_merak.planner.search.choice import Choice, Layer
from megatron_merak.planner.search.space import Degrees, Space
from megatron_merak.planner.search.work import ChainWork

TOLERANCE = 0.01  # plans that differ by less are equally fast
_NEAR = 1.1  # another order of ranks makes no plan faster by more
_MOST = 200  # plans that a search makes
Report = Callable[[float, str], object]  # the finished share, and the best so far in words


class Model(Protocol):
    """A model, as a search needs it.

    shares_sequences: whether ranks may share its sequences.
    has_experts:      whether ranks may divide experts.
    """

    @property
    def shares_sequences(self) -> bool: ...

    @property
    def has_experts(self) -> bool: ...

    def units(
        self, layer: Layer, micro_batch_size: int, sequence_parallel: bool, selective: bool
    ) -> tuple[Unit, ...]:
        """Return its chain on one of the ranks of a layer.

        selective: whether feed-forward parts recompute an activation.

        Raises a MerakError where it cannot be divided so.
        """

    @property
    def frozen_bytes(self) -> float:
        """See ``Plan``."""


@dataclass(frozen=True)
class FoundPlan:
    """A choice and its plan."""

    choice: Choice
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.predicted_time

    def runs_as(self, other: "FoundPlan") -> bool:
        """Whether ranks do the same under both plans, whatever the settings are called."""
        return _without_words(self.plan) == _without_words(other.plan)


def _without_words(plan: Plan) -> Plan:
    """Return a plan without what no rank reads."""
    return replace(plan, schedule_note="", reasons=(), predicted_time=0.0)


@dataclass(frozen=True)
class Rest:
    """What a search that stopped early did not look at.

    count: of choices, or of degrees with all their choices.
    bound: no plan of them takes fewer seconds.
    """

    count: int
    bound: float


@dataclass(frozen=True)
class Result:
    """What a search found.

    found:   plans that fit, the fastest first.
    counted: choices that were considered; ``made``: plans among them.
    refusal: why there is no choice at all, if there is none.
    rest:    what might be faster, if the search made as many plans as it may.
    """

    found: tuple[FoundPlan, ...]
    counted: int
    made: int
    refusal: MerakError | None = None
    rest: Rest | None = None

    @property
    def fastest(self) -> FoundPlan | None:
        return self.found[0] if self.found else None

    def equal(self, tolerance: float = TOLERANCE) -> list[FoundPlan]:
        """Return the plans that are as fast as the fastest, those with the fewest moving parts
        first.
        """
        if not self.found:
            return []
        most = self.found[0].seconds * (1 + tolerance)
        near = [each for each in self.found if each.seconds <= most]
        return sorted(near, key=lambda each: (each.choice.parts, each.seconds))

    @property
    def best(self) -> FoundPlan | None:
        """The plan with the fewest moving parts of those that are as fast as the fastest."""
        return next(iter(self.equal()), None)

    def first(self, count: int) -> list[FoundPlan]:
        """Return `best` and those that are expected to be the fastest beside it, of which no two run
        alike; fewer where there are no more.
        """
        chosen: list[FoundPlan] = []
        for each in (*self.equal(), *self.found):
            if len(chosen) < count and not any(each.runs_as(other) for other in chosen):
                chosen.append(each)
        return chosen


@dataclass(frozen=True)
class Candidate:
    """A choice that no plan was made of yet.

    close: whether its bound is the closer one.
    """

    choice: Choice
    degrees: Degrees
    close: bool = False


@dataclass
class _State:
    """A search under way.

    wanted: number of plans to find, of which no two run alike.
    heap:   what to look at: the seconds that are expected, a number, a bound on them, and what it is.
    best:   seconds of the slowest of the plans that are wanted, once there are so many.
    """

    wanted: int = 1
    order: Iterator[int] = field(default_factory=count)
    heap: list[tuple[float, int, float, Degrees | Candidate]] = field(default_factory=list)
    found: list[FoundPlan] = field(default_factory=list)
    counted: int = 0
    made: int = 0
    best: float = math.inf
    _fastest: list[FoundPlan] = field(default_factory=list)

    @property
    def enough(self) -> float:
        """A bound above this is of no use."""
        return self.best * (1 + TOLERANCE)

    def push(self, bound: float, item: Degrees | Candidate, expected: float | None = None) -> None:
        if bound <= self.enough and not math.isinf(bound):
            entry = (bound if expected is None else expected, next(self.order), bound, item)
            heapq.heappush(self.heap, entry)

    def keep(self, found: FoundPlan) -> None:
        """Add a plan that fits."""
        self.found.append(found)
        if self.wanted > 1 and any(found.runs_as(other) for other in self._fastest):
            return
        insort(self._fastest, found, key=lambda each: each.seconds)
        del self._fastest[self.wanted :]
        if len(self._fastest) == self.wanted:
            self.best = self._fastest[-1].seconds

    @property
    def rest(self) -> Rest | None:
        """What might be better than the best, if something is left that might."""
        bounds = [bound for _, _, bound, _ in self.heap if bound <= self.enough]
        return Rest(len(bounds), min(bounds)) if bounds else None


class Search:
    """Finds the fastest plans of a job. Chains of units are made once, whatever is asked.

    model:   what is trained.
    request: what is not searched: all but degrees, micro-batch and what a ``Choice`` has.
    cluster: where it runs.

    Raises ConfigError where ``--memory-reserve-gb`` leaves nothing of a device.
    """

    def __init__(self, model: Model, request: Request, cluster: Cluster):
        self.model = model
        self.request = request
        self.cluster = reserving(cluster, request.parallel.memory_reserve_gb)
        self._work: dict[tuple[Layer, int, bool, bool], ChainWork | MerakError] = {}

    @property
    def memory(self) -> float:
        """Bytes that a rank may use, where nodes differ of the largest; 0: unknown."""
        largest = max(self.cluster.devices, key=lambda device: device.usable)
        return limit_of(largest, self.request.parallel.device_memory_gb)

    def on(self, cluster: Cluster, memory_gb: float | None = None) -> "Search":
        """Return the search on another cluster, or with another memory of a rank."""
        parallel = self.request.parallel
        if memory_gb is not None:
            memory = int(memory_gb * GIB)
            cluster = cluster.with_devices(lambda device: replace(device, memory=memory))
            parallel = replace(parallel, device_memory_gb=None)
        return Search(self.model, replace(self.request, parallel=parallel), cluster)

    def for_ranks(self, ranks: int) -> "Search":
        """Return the search on the nodes that a job of so many ranks has. Raises PlanError for more
        ranks than the cluster has.
        """
        used = self.cluster.used_by(ranks)
        return self if used == self.cluster else self.on(used)

    def run(
        self,
        ranks: int,
        batch: Sequence[int],
        pins: Mapping[str, Any],
        report: Report = lambda share, best: None,
        wanted: int = 1,
    ) -> Result:
        """Return the fastest plans on so many ranks.

        batch:  samples per step; where it grows, all sizes, the largest last.
        pins:   fields of ``Choice`` and the values that they must have.
        report: called with the finished share, and the best plan so far in words.
        wanted: so many of the fastest are among the plans, where there are so many that do not run
                alike; of others only those that were met on the way.

        Raises PlanError for more ranks than the cluster has.
        """
        own = self.for_ranks(ranks)
        if own is not self:
            return own.run(ranks, batch, pins, report, wanted)
        memory = self.memory
        space = self.space(ranks, batch, pins)
        bounds = Bounds(self.request, self.cluster, memory, self.model.frozen_bytes)
        state = _State(wanted)
        refusal = self._open(space, bounds, state)
        first = state.heap[0][0] if state.heap else 0.0
        while state.heap and state.made < _MOST:
            _, _, bound, item = heapq.heappop(state.heap)
            if bound > state.enough:
                continue
            report(_share(first, bound, state.best), _words(state.found))
            if isinstance(item, Degrees):
                self._expand(item, space, bounds, state)
            elif item.close:
                self._make(item, space, state)
            else:
                self._come_closer(item, bound, space, bounds, state)
        found = sorted(state.found, key=lambda each: (each.seconds, each.choice.parts))
        return Result(tuple(found), state.counted, state.made, refusal, rest=state.rest)

    def space(self, ranks: int, batch: Sequence[int], pins: Mapping[str, Any]) -> Space:
        """Return the choices on so many ranks; see ``run``."""
        length = self.request.sequence_length or 0
        return Space(
            ranks,
            batch,
            self.cluster,
            pins,
            memory=bool(self.memory),
            length=length if self.model.shares_sequences else 0,
            experts=self.model.has_experts,
            halves=not self.request.whole,
        )

    def plan(self, choice: Choice, replicas: int, microbatches: int) -> Plan:
        """Return the plan of a choice. Raises a MerakError."""
        work = self._of(choice, choice.recompute == "selective")
        parallel = choice.applied(self.request.parallel)
        memory = self.memory
        if memory:
            parallel = replace(parallel, device_memory_gb=memory / GIB)
        request = replace(
            self.request,
            parallel=parallel,
            replicas=replicas,
            microbatches=microbatches,
            micro_batch_size=choice.mb,
        )
        frozen = self.model.frozen_bytes
        return plan_chain(work.units, request, self.cluster, frozen_bytes=frozen)

    def _of(self, divided: Degrees | Choice, selective: bool) -> ChainWork:
        """Return the chain of the model, and what it adds up to. Raises a MerakError."""
        key = (divided.layer, divided.mb, divided.sp, selective)
        if key not in self._work:
            try:
                units = self.model.units(*key)
                self._work[key] = ChainWork(units, self.cluster, self.request.dtype, divided.layer)
            except MerakError as error:
                self._work[key] = error
        work = self._work[key]
        if isinstance(work, MerakError):
            raise work
        return work

    def _open(self, space: Space, bounds: Bounds, state: _State) -> MerakError | None:
        """Push all degrees; return why there are none, if there are none."""
        refusal: MerakError | None = None
        for layer in space.layers():
            first = Choice(
                tp=layer.tp,
                cp=layer.cp,
                ep=layer.ep,
                etp=layer.etp,
                kind=layer.kind,
                sp=layer.exchanges_rows and layer.tp > 1,
            )
            try:
                units = len(self._of(first, False).units)
            except MerakError as error:
                refusal = refusal or error
                continue
            for degrees in space.degrees(layer, units):
                try:
                    work = self._of(degrees, False)
                except MerakError as error:
                    refusal = refusal or error
                    continue
                orders = space.orders(degrees)
                state.push(bounds.of_degrees(work, degrees, orders), degrees)
        if state.heap:
            return None
        return refusal or _no_division(space)

    def _expand(self, degrees: Degrees, space: Space, bounds: Bounds, state: _State) -> None:
        """Push the choices of some degrees."""
        units = len(self._of(degrees, False).units)
        orders = space.orders(degrees)
        for choice in space.choices(degrees, units):
            state.counted += 1
            try:
                work = self._of(degrees, choice.recompute == "selective")
            except MerakError:
                continue
            bound = bounds.of(Case(work, choice, degrees, orders))
            state.push(bound, Candidate(choice, degrees))

    def _come_closer(
        self, item: Candidate, before: float, space: Space, bounds: Bounds, state: _State
    ) -> None:
        """Push a candidate with its closer bound, which is no lower than the one ``before``."""
        choice = item.choice
        work = self._of(choice, choice.recompute == "selective")
        orders = space.orders(item.degrees)
        bound, expected = bounds.closer(Case(work, choice, item.degrees, orders), state.enough)
        state.push(max(before, bound), replace(item, close=True), expected)

    def _make(self, item: Candidate, space: Space, state: _State) -> None:
        """Make the plan of a candidate, in its fastest order of ranks; keep it if it fits."""
        state.made += 1
        degrees = item.degrees
        if self.cluster.nodes:
            for order in space.orders(degrees):
                self._keep_fitting(replace(item.choice, order=order), degrees, state)
            return
        try:
            plan = self.plan(item.choice, degrees.dp, degrees.microbatches)
        except MerakError:
            return
        if overflowing_ranks(plan, self.memory):
            return
        found = [FoundPlan(item.choice, plan)]
        near = plan.predicted_time < state.best * _NEAR
        for order in space.orders(degrees)[1:] if near else ():
            # cuts and recomputation are the same: what units cost depends on tensor ranks only
            other = replace(item.choice, order=order)
            found.append(FoundPlan(other, in_order(plan, order)))
        state.keep(min(found, key=lambda each: each.seconds))

    def _keep_fitting(self, choice: Choice, degrees: Degrees, state: _State) -> None:
        """Make the plan of a choice in its own order of ranks, which says what each computes with where
        nodes differ; keep it if it fits.
        """
        try:
            plan = self.plan(choice, degrees.dp, degrees.microbatches)
        except MerakError:
            return
        if not overflowing_ranks(plan, self.memory):
            state.keep(FoundPlan(choice, plan))


def _share(first: float, bound: float, best: float) -> float:
    """Return how much of the way from the first bound to the best plan a bound has gone."""
    return 0.0 if math.isinf(best) else min(1.0, (bound - first) / max(best - first, 1e-12))


def _words(found: Sequence[FoundPlan]) -> str:
    if not found:
        return ""
    best = min(found, key=lambda each: each.seconds)
    return f"{best.choice} takes {time_text(best.seconds)}"


def _no_division(space: Space) -> MerakError:
    sizes = ", ".join(map(str, space.batch))
    reason = f"no number of replicas on {space.ranks} ranks divides a batch of {sizes}"
    if space.pins:
        reason += f" with {', '.join(f'{name}={value}' for name, value in space.pins.items())}"
    return ConfigError(
        "--global-batch-size", sizes, reason, "Change it, the ranks, or what is pinned"
    )
