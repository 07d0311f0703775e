"""How fast a choice could be at best: bounds that take microseconds to milliseconds, where a plan
takes a second.

The first takes the chain for a fluid, of which a rank may have any part. What is left is what no
cut avoids: the work of the busiest rank, the memory of the ranks with most micro-batches in flight,
the filling of the pipeline, and what the network cannot send meanwhile. The second simulates the
schedule on the stages of the plan, if these are known: those that are balanced, if they fit.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_merak.cluster import Cluster, Link, all_gather, all_reduce, reduce_scatter
from megatron_merak.errors import MerakError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.plan import DTYPE_BYTES, Shards, hardware_of, limits_of
from megatron_merak.planner.cost import optimizer_bytes
from megatron_merak.planner.links import reached_along
from megatron_merak.planner.memory import Ledger
from megatron_merak.planner.request import Request, default_bucket_size
from megatron_merak.planner.saved import InFlight
from megatron_merak.planner.search.choice import Choice
from megatron_merak.planner.search.space import REPEATING, Degrees
from megatron_merak.planner.search.work import (
    AnyCutting,
    ChainPart,
    ChainWork,
    Cutting,
    StageSums,
    Sums,
    UnequalCutting,
)

SPLIT = tuple(name for name, row in BUILDERS.items() if row.splits)
# Schedules that hold at least what 1F1B does; of one that is in no list here nothing is known.
_AS_1F1B = ("1f1b", "interleaved", "shifted", "early-recompute", "zb-h1")
_STEPS = 12  # of the bisection: a thousandth
_EPSILON = 1e-6


@dataclass(frozen=True)
class Fluid:
    """What a rank needs for all of a chain; for a part of it, that part.

    state:     bytes, whatever is in flight.
    saved:     bytes of a micro-batch in flight.
    inputs:    those of one whose units are recomputed.
    seconds:   of a micro-batch.
    recompute: seconds of its recomputation.
    units:     equal units that it consists of, which no cut divides; 0: it may be cut anywhere.
    """

    state: float
    saved: float
    inputs: float
    seconds: float
    recompute: float
    units: int = 0

    def even(self, ranks: int) -> float:
        """Return the seconds of the busiest rank, whatever the memory, without recomputation."""
        return self.seconds * (-(-self.units // ranks) / self.units if self.units else 1 / ranks)

    def part(self, seconds: float, memory: float, in_flight: float, recompute: str) -> float:
        """Return the part that a rank can have that takes at most ``seconds`` and ``memory``."""
        part = self._part(seconds, memory, in_flight, recompute)
        return math.floor(part * self.units + _EPSILON) / self.units if self.units else part

    def _part(self, seconds: float, memory: float, in_flight: float, recompute: str) -> float:
        if recompute == "full":
            return min(seconds / self.seconds, memory / (self.state + in_flight * self.inputs))
        full = self.state + in_flight * self.saved
        if recompute != "capacity" or memory / full >= seconds / self.seconds:
            return min(seconds / self.seconds, memory / full)
        least = self.state + in_flight * self.inputs
        if least == full:  # no unit keeps less if it is recomputed
            return memory / full
        recomputed = min(seconds / (self.seconds + self.recompute), memory / least)
        # some is kept: the part of a rank grows by ``gained`` for each part that is recomputed
        gained = (full - least) / full
        left = seconds - memory / full * self.seconds
        again = left / (gained * self.seconds + self.recompute)
        some = memory / full + gained * again
        return max(recomputed, some) if again <= some else recomputed


@dataclass(frozen=True)
class Room:
    """What a pipeline rank has for its part of a chain.

    memory:    bytes.
    in_flight: micro-batches at the peak.
    speed:     see ``ChainWork.speed``.
    """

    memory: float
    in_flight: float
    speed: float = 1.0


def least_seconds(fluid: Fluid, rooms: Sequence[Room], recompute: str) -> float:
    """Return the seconds of a micro-batch on the busiest rank; infinity if the chain does not fit.

    Those of full recomputation, which are the same for every part, are left out.
    """

    def whole(seconds: float) -> bool:
        parts = (
            fluid.part(seconds * room.speed, room.memory, room.in_flight, recompute)
            for room in rooms
        )
        return sum(parts) >= 1 - _EPSILON

    speeds = [room.speed for room in rooms]
    low = fluid.even(len(rooms)) if min(speeds) == 1 else fluid.seconds / sum(speeds)
    if whole(low * (1 + _EPSILON)):
        return low
    high = (fluid.seconds + fluid.recompute) / min(speeds)
    if not whole(high):
        return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if whole(middle):
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True)
class Case:
    """A choice, and what its bounds depend on beside.

    work:   what the chain adds up to on a rank of its layers.
    orders: that the ranks may have.
    """

    work: ChainWork
    choice: Choice
    degrees: Degrees
    orders: Sequence[str]

    @property
    def sums(self) -> Sums:
        return self.work.sums(self.overlap, self.splits)

    @property
    def overlap(self) -> str:
        return "weight-gradient" if self.choice.overlap == "auto" else self.choice.overlap

    @property
    def splits(self) -> bool:
        """Whether weight gradients are computed apart."""
        return self.choice.schedule in SPLIT

    @property
    def paired(self) -> float:
        """The share of a rank's forwards that may run together with a backward."""
        if self.choice.overlap != "pair":
            return 0.0
        first = (self.choice.chunks - 1) * self.choice.pp / self.choice.chunks
        return max(0.0, 1 - first / self.degrees.microbatches)

    @property
    def repeats(self) -> bool:
        """Whether every stage recomputes all that it can."""
        return self.choice.recompute == "full" and self.choice.schedule not in REPEATING


class Bounds:
    """Bounds on the plans of a job.

    request:      what is not searched.
    memory:       bytes that a rank may use; 0: unknown.
    frozen_bytes: see ``Plan``.
    """

    def __init__(
        self, request: Request, cluster: Cluster, memory: float, frozen_bytes: float = 0.0
    ):
        self.request = request
        self.cluster = cluster
        self.memory = memory
        self.frozen_bytes = frozen_bytes
        self._moved = optimizer_bytes(request.dtype, request.state_bytes)
        self._update = min(device.passes_time(self._moved) for device in cluster.devices)
        self._schedules: dict[tuple[object, ...], Schedule | None] = {}
        self._makespans: dict[tuple[object, ...], float] = {}
        self._ledgers: dict[tuple[object, ...], Ledger] = {}
        self._in_flight: dict[int, InFlight] = {}  # by the id of a schedule in ``_schedules``

    def of_degrees(self, work: ChainWork, degrees: Degrees, orders: Sequence[str]) -> float:
        """Return a bound on all choices with these degrees. orders: that the ranks may have."""
        overlaps = ("weight-gradient", "pair", "sub-pipeline")
        sums = [work.sums(overlap, False) for overlap in overlaps]
        least = min(each.busiest(degrees.pp, 1.0) for each in sums)
        if self.cluster.nodes:
            computed = work.computed / self._most_ranks(work, degrees, orders)
            least = max(least, computed)
        return degrees.microbatches * least + self._replicated(degrees)

    def _replicated(self, degrees: Degrees) -> float:
        """Return what a step takes for having so many replicas, whatever else it does."""
        practice = self.cluster.practice
        return 0.0 if practice is None else practice.step * math.log2(degrees.copies)

    def of(self, case: Case) -> float:
        """Return a bound on a choice, whatever the memory."""
        balanced = case.degrees.microbatches * self._balanced(case)
        return max(balanced, self._filled(case)) + self._ending(case)

    def closer(self, case: Case, enough: float) -> tuple[float, float]:
        """Return a closer bound, with memory, and with the schedule simulated on the stages of the
        plan where they are known, infinity if it does not fit; and what is expected.

        enough: a bound above this need not be closer.
        """
        busiest = self._busiest(case)
        if math.isinf(busiest):
            return busiest, busiest
        microbatches = case.degrees.microbatches
        ending = self._ending(case)
        bound = max(microbatches * busiest, self._filled(case)) + ending
        if case.choice.schedule == "auto" or bound > enough:
            return bound, bound
        schedule = self._schedule(case)
        if schedule is None or schedule.stages > len(case.work.units):
            return math.inf, math.inf
        if self.cluster.nodes:
            simulated = min(self._on_unequal(case, schedule, order) for order in case.orders)
        else:
            simulated = self._on_stages(case, schedule)
        if not simulated:  # other stages are hardly faster than those that are balanced
            more = busiest - self._alike(case)
            expected = self._simulated(case, case.repeats) + microbatches * more + ending
            return bound, max(bound, expected)
        bound = max(bound, simulated + ending)
        return bound, bound

    def _on_stages(self, case: Case, schedule: Schedule) -> float:
        """Return the seconds of a schedule on the stages of the plan; 0 where these are not known,
        infinity where none fit.

        They are balanced by time, if each fits into its part of its rank. Else they are others that
        do, or if there are none the balanced ones with all recomputation, if their ranks fit.
        """
        again = case.repeats
        if case.choice.recompute in ("full", "stage-aware") and not again:
            return 0.0
        if not self.memory:
            return self._simulated(case, again)
        ledger = self._ledger(case, schedule)
        cutting = self._cutting(case, schedule)
        balanced = case.work.planned(cutting, case.overlap, again)
        of_rank = ledger.stages_of
        if all(
            ledger.alone(index, stage).total * len(of_rank[schedule.rank_of(index)]) <= self.memory
            for index, stage in enumerate(balanced)
        ):
            return self._simulated(case, again)
        if schedule.stages == 1 and case.choice.recompute in ("none", "selective", "full"):
            return math.inf  # there is no other cut, and no unit may keep less
        if case.choice.schedule in REPEATING or self._may_fit(case, schedule):
            return 0.0
        most = again or case.choice.recompute == "capacity"
        for each in _tried(cutting):
            together = ledger.together(case.work.planned(each, case.overlap, most))
            if max(sum(together[stage].total for stage in own) for own in of_rank) <= self.memory:
                return self._simulated(case, most)
        return math.inf

    def _on_unequal(self, case: Case, schedule: Schedule, order: str) -> float:
        """Return the seconds of a schedule on the stages that the plan has with ranks in this order,
        where nodes differ; 0 where they are not known: others than those that are balanced by time.
        """
        again = case.repeats
        if case.choice.recompute in ("full", "stage-aware") and not again:
            return 0.0
        grid = case.degrees.grid(order)
        hardware = hardware_of(self.cluster, grid)
        homes = schedule.homes
        cutting = UnequalCutting(
            homes,
            tuple(hardware[home].devices for home in homes),
            case.degrees.microbatches,
            self._moved / self._shards(case).optimizer,
        )
        if self.memory:
            ledger = self._ledger(case, schedule)
            limits = limits_of(self.cluster, grid, self.memory)
            planned = case.work.planned(cutting, case.overlap, again)
            for index, stage in enumerate(planned):
                together = len(ledger.stages_of[homes[index]])
                if ledger.alone(index, stage).total * together > limits[homes[index]]:
                    return 0.0
        key = (*self._key(case, again), cutting.devices)
        if key not in self._makespans:
            self._makespans[key] = self._fastest(case, schedule, cutting, again=again)
        return self._makespans[key]

    def _may_fit(self, case: Case, schedule: Schedule) -> bool:
        """Whether a cut may have stages that each fit into their part of a rank."""
        shards = self._shards(case)
        ledger = self._ledger(case, schedule)
        least = case.work.least_room(shards, case.splits, schedule.stages)
        counts = []
        for own in ledger.stages_of:
            counts += [(ledger.in_flight(stage), len(own)) for stage in own]
        for part in case.work.parts:
            state = part.state(shards, self.request.state_bytes, self.frozen_bytes)
            kept = _kept(part, case.choice.recompute)
            shares = [
                max(0.0, self.memory / stages - least) / max(state + count * kept, 1)
                for count, stages in counts
            ]
            if part.whole:
                shares = [
                    math.floor(share * part.count + _EPSILON) / part.count for share in shares
                ]
            if sum(shares) < 1 - _EPSILON:
                return False
        return True

    def _balanced(self, case: Case) -> float:
        """Return the seconds of a micro-batch on the busiest rank, whatever the memory."""
        alike = self._alike(case)
        if not self.cluster.nodes:
            return alike
        work = case.work
        computed = work.computed + (work.computed_again if case.repeats else 0.0)
        return max(alike, computed / self._most_ranks(work, case.degrees, case.orders))

    def _most_ranks(self, work: ChainWork, degrees: Degrees, orders: Sequence[str]) -> float:
        """Return of how many of the fastest ranks a pipeline has the speed, in its fastest order."""
        return max(
            sum(work.speed(each.devices) for each in hardware_of(self.cluster, degrees.grid(order)))
            for order in orders
        )

    def _alike(self, case: Case) -> float:
        """Return what the busiest rank takes, if all had the least times."""
        sums = case.sums
        again = sums.recompute if case.repeats else 0.0
        together = sums.seconds - case.paired * sums.hidden
        ranks = case.choice.pp
        return max(sums.busiest(ranks, case.paired), (together + again) / ranks)

    def _busiest(self, case: Case) -> float:
        """Return the seconds of a micro-batch on the busiest rank, with memory and what replicas
        send; infinity if it does not fit.
        """
        work = case.work
        choice = case.choice
        shards = self._shards(case)
        least = self._balanced(case)
        if shards.gradients > 1:
            sent, gathered = self._transfers(case, shards)
            # a unit that ends one pass and begins the next is gathered once
            share = work.largest(2 * choice.pp * choice.chunks) / max(work.parameters, 1)
            passes = (2 - min(share, 1.0)) * gathered if shards.parameters > 1 else 0.0
            least = max(least, sent + passes)
        if not self.memory:
            return least
        # what needs less than the method does
        method = "full" if case.repeats else "capacity"
        method = choice.recompute if choice.recompute in ("none", "selective") else method
        return max(
            least, min(self._in_order(case, shards, method, order) for order in self._orders(case))
        )

    def _orders(self, case: Case) -> Sequence[str]:
        """Return the orders that differ in what pipeline ranks compute with."""
        return case.orders if self.cluster.nodes else case.orders[:1]

    def _in_order(self, case: Case, shards: Shards, method: str, order: str) -> float:
        """Return the seconds of a micro-batch on the busiest rank, with the memory that ranks in this
        order have; infinity if it does not fit.
        """
        work = case.work
        grid = case.degrees.grid(order)
        least_room = work.least_room(shards, case.splits, case.choice.pp)
        memory = [limit - least_room for limit in limits_of(self.cluster, grid, self.memory)]
        if min(memory) <= 0:
            return math.inf
        flights = in_flight(case.choice, case.degrees.microbatches)
        speeds = [work.speed(each.devices) for each in hardware_of(self.cluster, grid)]
        least = 0.0
        for part in work.parts:
            fluid = self._fluid(part, case.sums, shards, case.paired, method)
            more = work.sent_more(part, case.sums) if self.cluster.nodes else 1.0
            rooms = [
                Room(room, count, min(1.0, more * speed))
                for room, count, speed in zip(memory, flights, speeds, strict=True)
            ]
            seconds = least_seconds(fluid, rooms, method)
            again = fluid.recompute / fluid.seconds if method == "full" else 0.0
            least = max(least, seconds * (1 + again))
        return least

    def _shards(self, case: Case) -> Shards:
        instances = self.request.parallel.num_distributed_optimizer_instances
        return Shards.of(case.choice.sharding, case.degrees.copies // instances)

    def _simulated(self, case: Case, again: bool) -> float:
        """Return the seconds of the schedule on stages that are balanced by time. Cached.

        again: whether units are recomputed.
        """
        key = self._key(case, again)
        if key not in self._makespans:
            self._makespans[key] = self._makespan(case, again)
        return self._makespans[key]

    def _key(self, case: Case, again: bool) -> tuple[object, ...]:
        """Return what a schedule's seconds on balanced stages follow from."""
        choice = case.choice
        return (
            choice.layer,
            choice.mb,
            choice.sp,
            choice.recompute == "selective",
            choice.pp,
            choice.schedule,
            choice.chunks,
            choice.overlap,
            case.degrees.microbatches,
            self._shards(case).optimizer,
            again,
        )

    def _makespan(self, case: Case, again: bool) -> float:
        """Return the seconds of a schedule that is defined for these numbers."""
        schedule = self._schedule(case)
        assert schedule is not None
        return self._fastest(case, schedule, self._cutting(case, schedule), again=again)

    def _fastest(self, case: Case, schedule: Schedule, cutting: AnyCutting, again: bool) -> float:
        """Return the least seconds of a schedule on the stages that plans try."""
        found: dict[tuple[int, ...], float] = {}
        for each in _tried(cutting):
            bounds = case.work.cuts(each, case.overlap, again)
            if bounds not in found:
                stages = case.work.stages(each, case.overlap, case.splits, again)
                found[bounds] = self._timed(case, schedule, stages, again)
        return min(found.values())

    def _timed(
        self, case: Case, schedule: Schedule, stages: Sequence[StageSums], again: bool
    ) -> float:
        """Return the seconds of a schedule on stages with these times."""
        links = self._links(case, schedule)
        transfers = [
            stage.output / link.bandwidth for stage, link in zip(stages[:-1], links, strict=True)
        ]
        practice = self.cluster.practice
        handover = 0.0 if practice is None or case.choice.pp == 1 else practice.handover
        costs = StageCosts(
            forward=tuple(handover + stage.forward for stage in stages),
            backward=tuple(handover + stage.backward for stage in stages),
            weight=tuple(stage.weight for stage in stages),
            recompute=tuple(stage.recompute if again else 0.0 for stage in stages),
            transfer=tuple(transfers),
            latency=tuple(link.latency for link in links),
        )
        return simulate(schedule, costs, _hidden(stages)).makespan

    def _cutting(self, case: Case, schedule: Schedule) -> Cutting:
        update = self._update / self._shards(case).optimizer
        return Cutting(schedule.homes, case.degrees.microbatches, update)

    def _ledger(self, case: Case, schedule: Schedule) -> Ledger:
        """Return the memory of stages of a schedule. Cached."""
        shards = self._shards(case)
        request = self.request
        key = (case.work, id(schedule), shards)
        if key not in self._ledgers:
            if id(schedule) not in self._in_flight:
                self._in_flight[id(schedule)] = InFlight(schedule)
            bucket = request.parallel.ddp_bucket_size or default_bucket_size(case.degrees.dp)
            narrow = request.parallel.grad_reduce_in_bf16 and case.degrees.copies > 1
            self._ledgers[key] = Ledger(
                case.work.units,
                schedule,
                request.dtype,
                shards=shards,
                copied=bucket if narrow else 0,
                state_bytes=request.state_bytes,
                frozen_bytes=self.frozen_bytes,
                bucket_size=bucket,
                expert_copies=case.work.expert_copies,
                in_flight=self._in_flight[id(schedule)],
            )
        return self._ledgers[key]

    def _schedule(self, case: Case) -> Schedule | None:
        """Return the schedule of a choice; None if it is defined for other numbers. Cached."""
        choice = case.choice
        microbatches = case.degrees.microbatches
        paired = choice.overlap == "pair"
        key = (choice.schedule, choice.pp, choice.chunks, microbatches, paired)
        if key not in self._schedules:
            group = self.request.parallel.microbatch_group_size_per_virtual_pipeline_stage
            chunks = choice.chunks if choice.chunks > 1 else None
            try:
                built = build_schedule(
                    choice.schedule, choice.pp, microbatches, chunks, group=group
                )
                self._schedules[key] = pair(built) if paired else built
            except MerakError:
                self._schedules[key] = None
        return self._schedules[key]

    def _links(self, case: Case, schedule: Schedule) -> list[Link]:
        """Return the link from each stage to the next, the fastest over the orders that ranks may have:
        some neighbours may be on one node, and others on two.
        """
        grids = [case.degrees.grid(order) for order in case.orders]
        homes = [schedule.rank_of(stage) for stage in range(schedule.stages)]
        known: dict[tuple[int, int], Link] = {}
        for ends in dict.fromkeys(pairwise(homes)):
            links = (reached_along(self.cluster, grid, "pp", ends) for grid in grids)
            known[ends] = _fastest(links)
        return [known[ends] for ends in pairwise(homes)]

    def _link_of_replicas(self, case: Case, ranks: int) -> Link:
        """Return the fastest link between so many replicas that shard among themselves, over the
        orders that ranks may have.
        """
        links = []
        for order in case.orders:
            grid = case.degrees.grid(order)
            for first in range(0, case.degrees.copies, ranks):
                place = (grid, "cp-dp", tuple(range(first, first + ranks)))
                links.append(reached_along(self.cluster, *place, summed=True))
        return _fastest(links)

    def _fluid(
        self, part: ChainPart, sums: Sums, shards: Shards, paired: float, method: str
    ) -> Fluid:
        """Return what a part of the chain needs.

        paired: share of its forwards that run together with a backward.
        method: of recomputation.
        """
        seconds = part.seconds(sums)
        together = 1 - paired * min(1.0, sums.hidden / seconds)
        return Fluid(
            state=part.state(shards, self.request.state_bytes, self.frozen_bytes),
            saved=part.saved,
            inputs=_kept(part, method),
            seconds=seconds * together,
            recompute=part.repeated(sums),
            units=part.count if part.whole else 0,
        )

    def _filled(self, case: Case) -> float:
        """Return the least seconds of a pipeline of which a rank waits for the first micro-batch, or
        for the last, however the chain is cut.

        If s of all work is before a rank's t, it ends no sooner than ``count`` t + ``share`` s: least
        is the most of all ranks where these are equal.
        """
        choice = case.choice
        sums = case.sums
        if choice.pp == 1 or choice.chunks > 1 or choice.schedule == "auto":
            return 0.0
        share = (sums.start if case.splits else 1.0) * (1 - case.paired)
        part = share / case.degrees.microbatches
        if not part:
            return 0.0
        return share * (sums.seconds - case.paired * sums.hidden) / (1 - (1 - part) ** choice.pp)

    def _transfers(self, case: Case, shards: Shards) -> tuple[float, float]:
        """Return the seconds in which a rank's gradients are reduced and its weights gathered."""
        copies = case.degrees.copies
        if copies == 1:
            return 0.0, 0.0
        ranks = shards.optimizer
        link = self._link_of_replicas(case, copies if ranks == 1 else ranks)
        values = case.work.reduced / case.degrees.pp
        wide = 2 if self.request.parallel.grad_reduce_in_bf16 else 4
        if ranks == 1:
            return all_reduce(copies, wide * values, link), 0.0
        narrow = DTYPE_BYTES[self.request.dtype]
        return (
            reduce_scatter(ranks, wide * values / ranks, link),
            all_gather(ranks, narrow * values / ranks, link),
        )

    def _ending(self, case: Case) -> float:
        """Return the seconds of the optimizer, and of what the last backward and the first forward
        do not hide.
        """
        shards = self._shards(case)
        ranks = case.choice.pp
        update = case.work.parameters / ranks * self._update / shards.optimizer
        update += self._replicated(case.degrees)
        if shards.gradients > 1:
            return update
        sums = case.sums
        sent, gathered = self._transfers(case, shards)
        forward = sums.forward
        backward = sums.backward + sums.recompute
        if self.cluster.nodes:  # slower ranks hide more of it
            forward, backward = case.work.hiding()
        backward /= ranks
        first = max(0.0, gathered - forward / ranks)
        return update + max(0.0, sent - backward) + first


def _kept(part: ChainPart, method: str) -> int:
    """Return the least bytes of a micro-batch in flight with a method of recomputation."""
    if method == "capacity":
        return part.least
    return part.inputs if method == "full" else part.saved


def _fastest(links: Iterable[Link]) -> Link:
    """Return a link no slower than any of these."""
    known = list(links)
    best = max(known, key=lambda link: link.bandwidth)
    return replace(best, latency=min(link.latency for link in known))


def _hidden(stages: Sequence[StageSums]) -> float:
    """Return the hidden share of the shorter one of two passes that run together."""
    return min(
        stage.hidden / max(min(stage.forward, stage.backward), stage.hidden)
        if stage.hidden
        else 0.0
        for stage in stages
    )


def in_flight(choice: Choice, microbatches: int) -> list[float]:
    """Return the micro-batches that each rank has in flight, of its part of the chain."""
    ranks = range(choice.pp)
    if choice.schedule == "gpipe":
        return [float(microbatches) for _ in ranks]
    if choice.schedule == "zb-v":
        return [min(microbatches, choice.pp) / 2 for _ in ranks]
    if choice.schedule not in _AS_1F1B:
        return [1.0 for _ in ranks]
    if choice.chunks > 1:
        chunks = choice.chunks
        most = ((chunks - 1) * choice.pp + 2 * (choice.pp - rank - 1) + 1 for rank in ranks)
        return [min(microbatches, count / chunks) for count in most]
    more = choice.overlap == "pair"  # a forward beside the backward that frees
    return [float(min(microbatches, choice.pp - rank + more)) for rank in ranks]


def _tried(cutting: AnyCutting) -> list[AnyCutting]:
    """Return the ways to cut that plans try: where ranks have several stages, another one."""
    several = len(set(cutting.homes)) < len(cutting.homes)
    return [cutting, replace(cutting, levels=True)] if several else [cutting]
