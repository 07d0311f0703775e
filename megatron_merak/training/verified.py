"""--parallel-verify: the plans that a search expects to be fastest are each run for some steps, and
the one that is fastest stays.

Nothing of these steps reaches the run: a plan that is tried has its own capture, weights, optimizer,
data and groups, which end with it, and random numbers are set back. The run begins as one that was
given the plan.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..config import flag_name
from ..counting import counted
from ..errors import PlanError
from ..parallel.attempt import attempt, check_attempts
from ..parallel.ranks import Ranks
from ..plan import time_text
from ..planner.search import Choice
from ..stages.randomness import same_afterwards

SETTING = "parallel_verify"
WARM_UP = 2  # steps that are not counted: the first ones capture, compile and allocate
TIMED = 3


@dataclass(frozen=True)
class Expected:
    """A plan to try, by what was chosen. predicted: seconds of its step."""

    choice: Choice
    predicted: float


@dataclass(frozen=True)
class Measured:
    """A plan that was tried.

    seconds: of a step: of those that are timed the median, of each the slowest rank's.
    """

    choice: Choice
    seconds: float


# runs a candidate on the ranks given for a number of steps, and returns their seconds on this rank
Trial = Callable[[Choice, Ranks, int], Sequence[float]]


def fastest(
    candidates: Sequence[Expected],
    wanted: int,
    ranks: Ranks,
    trial: Trial,
    say: Callable[[str], object],
    graph_warm_up: int | None,
    flag: str = flag_name(SETTING),
) -> Measured:
    """Return the candidate that is fastest on these ranks. Collective.

    wanted:        so many were asked for.
    say:           called on every rank with each line for the user.
    graph_warm_up: steps before one is recorded in CUDA graphs, which later ones replay; None: none
                   is.
    flag:          by which plans to try were asked for.

    Raises PlanError on every rank where none runs to its end.
    """
    check_attempts(ranks)
    # a step that is recorded is like no later one
    untimed = WARM_UP if graph_warm_up is None else max(WARM_UP, graph_warm_up + 1)
    count = untimed + TIMED
    for line in _opening(candidates, wanted, flag, count):
        say(line)
    measured: list[Measured] = []
    failures: list[str] = []
    for each in candidates:
        with same_afterwards(ranks.device):
            outcome = attempt(ranks, partial(_steps, trial, each.choice, count=count))
        if outcome.failure:
            failures.append(f"{each.choice}: {outcome.failure}")
            say(f"  {each.choice}: passed over: {outcome.failure}")
            continue
        steps = [max(times) for times in zip(*outcome.values, strict=True)]
        seconds = statistics.median(steps[untimed:])
        measured.append(Measured(each.choice, seconds))
        predicted = f"predicted {time_text(each.predicted)}"
        if each.predicted:
            predicted += f" (x {seconds / each.predicted:.2f})"
        say(f"  {each.choice}: {time_text(seconds)} a step, {predicted}")
    if not measured:
        reason = f"none of {counted(len(candidates), 'plan')} ran to its end"
        error = PlanError(flag, wanted, reason, "Leave it out to see the error of the best one")
        for line in failures:
            error.add_note(line)
        raise error
    return min(measured, key=lambda each: each.seconds)


def _steps(trial: Trial, choice: Choice, ranks: Ranks, count: int) -> list[float]:
    return list(trial(choice, ranks, count))


def _opening(candidates: Sequence[Expected], wanted: int, flag: str, steps: int) -> list[str]:
    """Return what is said before plans are tried, each for so many steps."""
    plans = counted(len(candidates), "plan")
    lines = [
        f"{flag} {wanted}: {plans} run {steps} steps each, of which {TIMED} are timed, with weights "
        "and data of their own"
    ]
    if len(candidates) < wanted:
        lines.append(f"  the search found no more than {plans} that do not run alike")
    layouts = {(each.choice.layer, each.choice.pp) for each in candidates}
    if len(candidates) > 1 and len(layouts) == 1:
        names = [row.name for row in dataclasses.fields(Choice)]
        apart = [
            name for name in names if len({getattr(each.choice, name) for each in candidates}) > 1
        ]
        choice = candidates[0].choice
        lines.append(
            f"  all have one layout, tp={choice.tp},cp={choice.cp},pp={choice.pp}: they differ in "
            f"{', '.join(apart)}"
        )
    return lines
