"""Local search: small changes of the programs where the critical path runs, kept when they do not make the step longer.

The moves are those of job-shop scheduling (van Laarhoven et al., 1992; Nowicki and Smutnicki, 1996): the makespan can
only fall when two neighbours on the critical path change places, or when something on it is taken off it. Here that
may also be a recomputation or a weight gradient that leaves its backward, or returns to it.
"""

from collections.abc import Iterator
from random import Random

from megatron_merak.pipeline_parallel.search.problem import B, F, Problem, Program, R, W

Compiled = list[tuple[int, int, float]]
_REACH = 4
_HEAT = 0.02
_ROUND = 400
_KICKS = 4
_ANY = 1e9


class LocalSearch:
    """A walk from given programs. `best` and `makespan` are the best seen; `evaluations` counts clocks."""

    def __init__(self, problem: Problem, programs: list[Program], seed: int = 0):
        self.problem, self.random = problem, Random(seed)
        self.programs = self.best = [list(program) for program in programs]
        self._clock()
        self.makespan = self.now
        self.evaluations = 1

    def run(self, evaluations: int, goal: float) -> None:
        """Walks in rounds, each from the best so far, until it has evaluated as many neighbours, or reached the goal.

        A round but the first starts with a few changes anywhere. At its start a move may cost a little, too, which
        leads out of local minima; at its end nothing.
        """
        kicks = 0
        while self.evaluations < evaluations and self.makespan > goal:
            self.programs = [*self.best]
            self._clock()
            for _ in range(min(kicks, evaluations - self.evaluations)):
                self._kick()
            kicks = self.random.randint(1, _KICKS)
            self._round(min(evaluations, self.evaluations + _ROUND), goal)

    def _kick(self) -> None:
        """Two neighbours somewhere change places, whatever that costs."""
        stage = self.random.randrange(self.problem.stages)
        program = self.programs[stage]
        i = self.random.randrange(1, len(program))
        before = self.evaluations
        for _, moved in _moved(stage, program, i, i - 1):
            self._try(stage, moved, heat=_ANY)
        self.evaluations = before + 1

    def _clock(self) -> None:
        self.compiled = [self.problem.compile(stage, program) for stage, program in enumerate(self.programs)]
        self.ends = self._ends(self.programs, self.compiled)
        self.now = max(end[-1] for end in self.ends)

    def _ends(self, programs: list[Program], compiled: list[Compiled]) -> list[list[float]]:
        core = self.problem.compiled
        return self.problem.clock(compiled) if core is None else core.ends(programs)

    def _round(self, until: int, goal: float) -> None:
        length, moved = until - self.evaluations, True
        while moved and self.evaluations < until and self.makespan > goal:
            moves = list(self._moves())
            self.random.shuffle(moves)
            moved = False
            for stage, program in moves:
                heat = _HEAT * ((until - self.evaluations) / length) ** 2
                moved = self._try(stage, program, heat)
                if moved or self.evaluations >= until:
                    break

    def _try(self, stage: int, program: Program, heat: float) -> bool:
        """Makes the move if it is good enough."""
        if not self.problem.allows(stage, program):
            return False
        programs, compiled = [*self.programs], [*self.compiled]
        programs[stage], compiled[stage] = program, self.problem.compile(stage, program)
        ends = self._ends(programs, compiled)
        self.evaluations += 1
        makespan = max((end[-1] for end in ends), default=float("inf"))
        if makespan > self.now * (1 + heat * self.random.random()):
            return False
        self.programs, self.compiled, self.ends, self.now = programs, compiled, ends, makespan
        if makespan < self.makespan:
            self.makespan, self.best = makespan, self.programs
        return True

    def _moves(self) -> Iterator[tuple[int, Program]]:
        """(stage, its new program) of every neighbour; some of them are no use, or do not fit."""
        path = critical_path(self.problem, self.compiled, self.ends)
        for stage, i, by_machine in path:
            program = self.programs[stage]
            if by_machine:
                for j in range(max(i - _REACH, 0), i):
                    yield from _moved(stage, program, i, j)
                    yield from _moved(stage, program, j, i)
            kind, k = program[i] & 3, program[i] >> 2
            if kind == B:
                yield from self._around_backward(stage, i, k)
            elif kind in (R, W):
                yield stage, program[:i] + program[i + 1 :]

    def _around_backward(self, stage: int, i: int, k: int) -> Iterator[tuple[int, Program]]:
        """The recomputation leaves the backward for an earlier place, the weight gradient for a later one."""
        program = self.programs[stage]
        if self.problem.early[stage] and 4 * k + R not in program:
            first = program.index(4 * k + F)
            for j in range(max(first + 1, i - _REACH), i + 1):
                yield stage, program[:j] + [4 * k + R] + program[j:]
        if self.problem.split[stage] and 4 * k + W not in program:
            for j in range(i + 1, min(i + 1 + _REACH, len(program)) + 1):
                yield stage, program[:j] + [4 * k + W] + program[j:]


def _moved(stage: int, program: Program, source: int, target: int) -> Iterator[tuple[int, Program]]:
    """The op at `source` goes to `target`, if it passes neither its own kind nor its own micro-batch."""
    code = program[source]
    passed = program[target:source] if target < source else program[source + 1 : target + 1]
    if any(other & 3 == code & 3 or other >> 2 == code >> 2 for other in passed):
        return
    moved = program[:source] + program[source + 1 :]
    moved.insert(target, code)
    yield stage, moved


def critical_path(
    problem: Problem, compiled: list[Compiled], ends: list[list[float]]
) -> Iterator[tuple[int, int, bool]]:
    """(stage, index, whether it waited for the op before it on its stage) of a longest chain, from the end of the step.

    A chain leads on from a message that was late over its producer, over the earlier op that let its receive be posted,
    or over the message before it.
    """
    posted = [_posted(program) for program in compiled]
    places = [{(kind, k): i for i, (kind, k, _) in enumerate(program)} for program in compiled]
    stage = max(range(problem.stages), key=lambda s: ends[s][-1])
    makespan = ends[stage][-1]
    slack = 1e-9 * makespan
    i = len(compiled[stage]) - 1
    while i >= 0:
        kind, k, seconds = compiled[stage][i]
        start = ends[stage][i + 1] - seconds
        by_machine = ends[stage][i] >= start - slack
        yield stage, i, by_machine
        if by_machine:
            i -= 1
            continue
        source = stage - 1 if kind == F else stage + 1
        boundary = min(stage, source)
        transfer = problem.costs.transfer[boundary]
        through = start - problem.costs.latency[boundary]
        while True:
            sent = places[source][kind, k]
            if ends[source][sent + 1] + transfer >= through - slack:
                stage, i = source, sent
                break
            ahead = posted[stage][places[stage][kind, k]]
            if k == 0 or (ahead >= 0 and ends[stage][ahead] + transfer >= through - slack):
                i = ahead - 1
                break
            k, through = k - 1, through - transfer


def _posted(program: Compiled) -> list[int]:
    """For every op, where the last F or B before it is, before which its receive is posted; -1 if there is none."""
    last, posted = -1, []
    for i, (kind, _, _) in enumerate(program):
        posted.append(last)
        if kind in (F, B):
            last = i
    return posted
