"""A lower bound of the makespan of any schedule of a problem.

Every op has a head, the earliest it can start, and a tail, the least time from its end to the end
of the step. Heads follow the dependencies (with transfer and latency), the order of micro-batches,
the memory limit (F of micro-batch k waits for B of k - depth), and the load: all that a stage must
have run before a backward, each op no earlier than its head. Tails are the heads of the mirrored
problem. Then the ops of one rank are one machine with heads and tails, and running them
preemptively by longest tail (Jackson; Carlier, "The one-machine sequencing problem", 1982) takes at
least as long as any schedule. The bound is the largest of the ranks. Where a rank has several
stages, heads are those of stages with ranks of their own.
"""

from heapq import heappop, heappush

from megatron_merak.pipeline_parallel.search.problem import Problem

_BEFORE, _FORWARD, _MIDDLE, _BACKWARD, _AFTER = range(5)
Heads = list[list[list[float]]]  # [stage][part][micro-batch]
Job = tuple[float, float, float]  # head, tail, seconds
# jobs that a load tells apart; a quarter of them beyond so many stages x micro-batches
_WINDOW = 64
_LARGE = 1 << 13


def lower_bound(problem: Problem) -> float:
    """Return seconds that no schedule of the problem can beat, of those that keep micro-batches in
    order.
    """
    parts = _parts(problem)
    heads, tails = heads_and_tails(problem)
    of_stages = [_jobs(parts[stage], heads[stage], tails[stage]) for stage in range(problem.stages)]
    return max(
        _one_machine([job for stage in own for job in of_stages[stage]])
        for own in problem.stages_of
    )


def heads_and_tails(problem: Problem) -> tuple[Heads, Heads]:
    """``heads[s][part][k]`` and ``tails[s][part][k]``; parts as in ``_parts``."""
    parts = _parts(problem)
    heads = _heads(problem, parts)
    mirrored = _heads(problem, [tuple(reversed(stage)) for stage in parts])
    tails = []
    for stage, seconds in enumerate(parts):
        ends = []
        for part in range(5):
            starts = mirrored[stage][4 - part]
            ends.append([starts[-1 - k] for k in range(problem.microbatches)])
        tails.append(ends)
        assert len(seconds) == 5
    return heads, tails


def _parts(problem: Problem) -> list[tuple[float, ...]]:
    """Seconds of the parts of a micro-batch on a stage: nothing, F, R, B, W; R and W are in B if
    they may not leave it.

    The mirrored problem has them in the opposite order, with the micro-batches from the last to the
    first.
    """
    costs = problem.costs
    parts: list[tuple[float, ...]] = []
    for stage in range(problem.stages):
        middle = costs.recompute[stage] if problem.early[stage] else 0.0
        after = costs.weight[stage] if problem.split[stage] else 0.0
        backward = costs.backward[stage] - after + costs.recompute[stage] - middle
        parts.append((0.0, costs.forward[stage], middle, backward, after))
    return parts


def _heads(problem: Problem, parts: list[tuple[float, ...]]) -> Heads:
    stages = problem.stages
    heads: Heads = [[[] for _ in range(5)] for _ in range(stages)]
    window = _WINDOW if stages * problem.microbatches <= _LARGE else _WINDOW // 4
    loads = [_Load(window) for _ in range(stages)]
    depths = [problem.depth(stage) for stage in range(stages)]
    through_forward = [0.0] * stages
    through_backward = [0.0] * stages
    for k in range(problem.microbatches):
        for s in range(stages):
            before, forward, middle, _, _ = parts[s]
            own = heads[s]
            load = loads[s]
            own[_BEFORE].append(before * k)
            load.add(before * k, before)
            head = max(before * (k + 1), own[_FORWARD][-1] + forward if k else 0.0)
            if s:
                sent = heads[s - 1][_FORWARD][k] + parts[s - 1][_FORWARD]
                through_forward[s] = max(sent, through_forward[s]) + problem.transfer[s - 1]
                head = max(head, through_forward[s] + problem.latency[s - 1])
            if k >= depths[s]:
                head = max(head, own[_BACKWARD][k - depths[s]] + parts[s][_BACKWARD])
            own[_FORWARD].append(head)
            load.add(head, forward)
            own[_MIDDLE].append(head + forward)
            load.add(head + forward, middle)
        for s in reversed(range(stages)):
            own = heads[s]
            head = own[_MIDDLE][k] + parts[s][_MIDDLE]
            if s < stages - 1:
                sent = heads[s + 1][_BACKWARD][k] + parts[s + 1][_BACKWARD]
                through_backward[s] = max(sent, through_backward[s]) + problem.transfer[s]
                head = max(head, through_backward[s] + problem.latency[s])
            head = max(head, loads[s].completion())
            own[_BACKWARD].append(head)
            loads[s].add(head, parts[s][_BACKWARD])
            own[_AFTER].append(head + parts[s][_BACKWARD])
    return heads


class _Load:
    """Jobs of one machine, each with a release time: the earliest that all of them can be done.

    window: how many jobs are distinguished; a smaller number gives a lower bound in less time.
    """

    def __init__(self, window: int):
        self.window = window
        self.jobs: list[tuple[float, float]] = []

    def add(self, release: float, seconds: float) -> None:
        if not seconds:
            return
        jobs = self.jobs
        i = len(self.jobs)
        while i and jobs[i - 1][0] > release:
            i -= 1
        jobs.insert(i, (release, seconds))
        # merged: jobs that start with the first one end no later than one by one
        if len(jobs) > self.window:
            (first, seconds), (_, more) = jobs[:2]
            jobs[:2] = [(first, seconds + more)]

    def completion(self) -> float:
        now = 0.0
        for release, seconds in self.jobs:
            now = max(now, release) + seconds
        return now


def _jobs(
    parts: tuple[float, ...], heads: list[list[float]], tails: list[list[float]]
) -> list[Job]:
    """Return the jobs of a stage."""
    rows = [
        zip(heads[p], tails[p], [seconds] * len(heads[p]), strict=True)
        for p, seconds in enumerate(parts)
        if seconds
    ]
    return [job for row in rows for job in row]


def _one_machine(jobs: list[Job]) -> float:
    """Jackson's preemptive schedule: at each moment the released job of the longest tail runs."""
    jobs = sorted(jobs)
    ready: list[list[float]] = []
    now = bound = 0.0
    i = 0
    while i < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[i][0])
        while i < len(jobs) and jobs[i][0] <= now:
            heappush(ready, [-jobs[i][1], jobs[i][2]])
            i += 1
        tail, left = ready[0]
        until = jobs[i][0] if i < len(jobs) else float("inf")
        if now + left <= until:
            now += left
            heappop(ready)
            bound = max(bound, now - tail)
        else:
            ready[0][1] = left - (until - now)
            now = until
    return bound
