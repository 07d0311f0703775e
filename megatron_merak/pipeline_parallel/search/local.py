"""Local search: small changes of the programs where the critical path runs, kept when they do not
make the step longer.

The moves are those of job-shop scheduling (van Laarhoven et al., 1992; Nowicki and Smutnicki,
1996): the makespan can only fall when two neighbours on the critical path change places, or when
something on it is taken off it. Here that may also be a recomputation or a weight gradient that
leaves its backward, or returns to it.
"""

from collections.abc import Callable, Iterator
from random import Random

from megatron_merak.pipeline_parallel.search.problem import B, F, Problem, Program, R, Step, W

_REACH = 4
_HEAT = 0.02
_ROUND = 400
_KICKS = 4
_ANY = 1e9
# A change of a rank's program: the op at an index moves to another, is removed (None), or a code is
# inserted there.
Move = tuple[int, int, int | None, int | None]  # rank, index, the other index, code


class LocalSearch:
    """A walk from given programs. ``best`` and ``makespan`` are the best seen; ``evaluations``
    counts simulations.

    report_progress: called after every simulation.
    """

    def __init__(
        self,
        problem: Problem,
        programs: list[Program],
        seed: int = 0,
        report_progress: Callable[[], object] = lambda: None,
    ):
        self.problem = problem
        self.random = Random(seed)
        self.report_progress = report_progress
        self.programs = self.best = [list(program) for program in programs]
        self._clock()
        self.makespan = self.now
        self.evaluations = 1

    def run(self, evaluations: int, goal: float) -> None:
        """Walk in rounds, each from the best so far, until as many neighbours are evaluated, or the
        goal is reached.

        Every round but the first starts with a few random changes. At its start a move may increase
        the makespan a little, to leave local minima; at its end not at all.
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
        """Swap two neighbours somewhere, whatever that costs."""
        rank = self.random.randrange(self.problem.ranks)
        i = self.random.randrange(1, len(self.programs[rank]))
        before = self.evaluations
        self._try((rank, i, i - 1, None), heat=_ANY)
        self.evaluations = before + 1

    def _clock(self) -> None:
        self.compiled = [
            self.problem.compile(rank, program) for rank, program in enumerate(self.programs)
        ]
        self.ends = self._ends(self.programs, self.compiled)
        self.now = max(end[-1] for end in self.ends)

    def _ends(self, programs: list[Program], compiled: list[list[Step]]) -> list[list[float]]:
        core = self.problem.compiled
        return self.problem.clock(compiled) if core is None else core.ends(programs)

    def _round(self, until: int, goal: float) -> None:
        length = until - self.evaluations
        moved = True
        while moved and self.evaluations < until and self.makespan > goal:
            moves = list(self._moves())
            self.random.shuffle(moves)
            moved = False
            for move in moves:
                heat = _HEAT * ((until - self.evaluations) / length) ** 2
                moved = self._try(move, heat)
                if moved or self.evaluations >= until:
                    break

    def _try(self, move: Move, heat: float) -> bool:
        """Make the move if it is good enough."""
        rank = move[0]
        program = _moved(self.programs[rank], len(self.problem.stages_of[rank]), *move[1:])
        if program is None or not self.problem.allows(rank, program):
            return False
        programs = [*self.programs]
        compiled = [*self.compiled]
        programs[rank], compiled[rank] = program, self.problem.compile(rank, program)
        ends = self._ends(programs, compiled)
        self.evaluations += 1
        self.report_progress()
        makespan = max((end[-1] for end in ends), default=float("inf"))
        if makespan > self.now * (1 + heat * self.random.random()):
            return False
        self.programs = programs
        self.compiled = compiled
        self.ends = ends
        self.now = makespan
        if makespan < self.makespan:
            self.makespan, self.best = makespan, self.programs
        return True

    def _moves(self) -> Iterator[Move]:
        """Yield every neighbour, including some that are useless or do not fit."""
        separate = [{code for code in program if code & 1} for program in self.programs]  # R and W
        for rank, i, by_machine in critical_path(self.problem, self.compiled, self.ends):
            if by_machine:
                for j in range(max(i - _REACH, 0), i):
                    yield rank, i, j, None
                    yield rank, j, i, None
            kind = self.programs[rank][i] & 3
            if kind == B:
                yield from self._around_backward(rank, i, separate[rank])
            elif kind in (R, W):
                yield rank, i, None, None

    def _around_backward(self, rank: int, i: int, separate: set[int]) -> Iterator[Move]:
        """Move the recomputation out of the backward to an earlier place, the weight gradient to a
        later one.
        """
        program = self.programs[rank]
        stage = self.compiled[rank][i][1]
        again = program[i] - B + R
        weight = program[i] - B + W
        if self.problem.early[stage] and again not in separate:
            forward = program[i] - B + F
            for j in range(i, max(i - 1 - _REACH, -1), -1):
                if program[j] == forward:
                    break
                yield rank, j, None, again
        if self.problem.split[stage] and weight not in separate:
            for j in range(i + 1, min(i + 1 + _REACH, len(program)) + 1):
                yield rank, j, None, weight


def _moved(
    program: Program, width: int, source: int, target: int | None, code: int | None
) -> Program | None:
    """Return the program after a move; None if an op passed one of its own kind and stage, or of
    its own micro-batch.

    width: stages of the rank.
    """
    if code is not None:
        return [*program[:source], code, *program[source:]]
    if target is None:
        return program[:source] + program[source + 1 :]
    code = program[source]
    kind = code & 3
    item = code >> 2
    place = item % width
    between = program[target:source] if target < source else program[source + 1 : target + 1]
    for other in between:
        if other >> 2 == item or (other & 3 == kind and (other >> 2) % width == place):
            return None
    moved = program[:source] + program[source + 1 :]
    moved.insert(target, code)
    return moved


def critical_path(
    problem: Problem, compiled: list[list[Step]], ends: list[list[float]]
) -> Iterator[tuple[int, int, bool]]:
    """Return (rank, index, whether it waited for the op before it on its rank) of a longest chain,
    from the end of the step.

    From a message that was late, a chain continues with its producer, with the earlier op that
    delayed posting its receive, or with the message before it.
    """
    posted = [_posted(program) for program in compiled]
    places = [{step[:3]: i for i, step in enumerate(program)} for program in compiled]
    rank = max(range(problem.ranks), key=lambda r: ends[r][-1])
    slack = 1e-9 * ends[rank][-1]
    i = len(compiled[rank]) - 1
    while i >= 0:
        kind, stage, k, seconds = compiled[rank][i]
        start = ends[rank][i + 1] - seconds
        by_machine = ends[rank][i] >= start - slack
        yield rank, i, by_machine
        if by_machine:
            i -= 1
            continue
        source = stage - 1 if kind == F else stage + 1
        origin = problem.home[source]
        boundary = min(stage, source)
        transfer = problem.transfer[boundary]
        through = start - problem.latency[boundary]
        while True:
            sent = places[origin][kind, source, k]
            if origin == rank or ends[origin][sent + 1] + transfer >= through - slack:
                rank = origin
                i = sent
                break
            ahead = posted[rank][places[rank][kind, stage, k]]
            if k == 0 or (ahead >= 0 and ends[rank][ahead] + transfer >= through - slack):
                i = ahead - 1
                break
            k = k - 1
            through = through - transfer


def _posted(program: list[Step]) -> list[int]:
    """Return for every op the last F or B before it, before which its receive is posted; -1 if
    there is none.
    """
    last = -1
    posted = []
    for i, (kind, *_) in enumerate(program):
        posted.append(last)
        if kind in (F, B):
            last = i
    return posted
