"""The page of `overlap.py`: what is left exposed of tensor-parallel communication, modelled and
measured apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.schedules.page import table

# of the all-reduce time of a forward and backward hidden
ENOUGH_MODELLED, ENOUGH_MEASURED = 0.90, 0.85
HIDING = ("sub-pipeline", "pair")


@dataclass(frozen=True)
class Outcome:
    """Seconds by phase of one way of overlap: in all, and of these exposed, that is not spent
    computing.
    """

    total: Mapping[str, float]
    exposed: Mapping[str, float]

    @classmethod
    def modelled(cls, accounts: Mapping[str, Any]) -> "Outcome":
        exposed = {phase: account.exposed + account.idle for phase, account in accounts.items()}
        return cls({phase: account.now for phase, account in accounts.items()}, exposed)

    @classmethod
    def measured(
        cls, steps: Sequence[Mapping[str, float]], compute: Mapping[str, float]
    ) -> "Outcome":
        """Medians of the repeats; ``compute``: of a run without communication."""
        total = {phase: median(step[phase] for step in steps) for phase in steps[0]}
        busy = (
            compute
            if total.keys() == compute.keys()
            else {phase: sum(compute.values()) for phase in total}
        )
        return cls(total, {phase: seconds - busy[phase] for phase, seconds in total.items()})

    def hidden(self, blocking: "Outcome", phase: str | None = None) -> float | None:
        """The share of the all-reduce time, which a blocking run exposes, that is not
        exposed here.
        """
        if phase is not None and (phase not in self.exposed or phase not in blocking.exposed):
            return None
        mine, whole = (
            sum(one.exposed.values()) if phase is None else one.exposed[phase]
            for one in (self, blocking)
        )
        return 1 - mine / whole


Outcomes = Mapping[tuple[str, bool], Outcome]  # by way of overlap and whether it recomputes


@dataclass(frozen=True)
class Wall:
    """What was measured: by way of overlap; seconds of computing alone, by phase; or why there is
    nothing.

    ``predicted``: modelled seconds by phase, as ``outcomes``.
    """

    outcomes: Outcomes
    compute: Mapping[bool, Mapping[str, float]]
    description: str
    reason: str = ""
    predicted: Mapping[tuple[str, bool], Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Mapping]], description: str) -> "Wall":
        """``ranks``: the runs of both ranks, in the same order; the slower one of each counts."""
        steps: dict[tuple[str, bool], list[dict[str, float]]] = {}
        for pair in zip(*ranks, strict=True):
            slower = {
                phase: max(run["seconds"][phase] for run in pair) for phase in pair[0]["seconds"]
            }
            steps.setdefault((pair[0]["mode"], pair[0]["recompute"]), []).append(slower)
        compute = {
            again: {
                phase: median(step[phase] for step in steps["compute", again]) for phase in phases
            }
            for again, phases in ((False, "FB"), (True, "FRB"))
        }
        outcomes = {
            key: Outcome.measured(found, compute[key[1]])
            for key, found in steps.items()
            if key[0] != "compute"
        }
        return cls(outcomes, compute, description)


def page(links: Mapping[str, Outcomes], distance: float, wall: Wall) -> str:
    """All of docs/evidence/overlap.md. ``links``: modelled outcomes by link; ``distance``: of
    gradients.
    """
    sections = [
        INTRODUCTION,
        _modelled_summary(links, distance),
        "### Without recomputation",
        _table(links, False),
    ]
    sections += ["### With recomputation", RECOMPUTING, _table(links, True), MEASURED]
    if wall.reason:
        sections.append(f"Skipped in the run that wrote this page: {wall.reason}.")
    else:
        sections += [wall.description, _measured_summary(wall)]
        sections += [_table({"1 Gbit/s": wall.outcomes}, again) for again in (False, True)]
        sections += [PREDICTED, _prediction(wall)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _cell(one: Outcome, phase: str) -> str:
    if phase not in one.total:
        return ""
    return f"{_milliseconds(one.total[phase])} ({_milliseconds(max(0.0, one.exposed[phase]))})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("-0%", "0%")


def _table(links: Mapping[str, Outcomes], recompute: bool) -> str:
    phases = ["F", "R", "B"] if recompute else ["F", "B"]
    header = [
        "link",
        "overlap",
        *(f"{phase}, ms (exposed)" for phase in phases),
        "together, ms (exposed)",
    ]
    header += [*(f"{phase} hidden" for phase in phases), "hidden", "against weight-gradient"]
    rows = []
    for link, outcomes in links.items():
        found = {mode: one for (mode, again), one in outcomes.items() if again == recompute}
        baseline = sum(found["weight-gradient"].total.values())
        for mode, one in found.items():
            total = sum(one.total.values())
            sums = f"{_milliseconds(total)} ({_milliseconds(max(0.0, sum(one.exposed.values())))})"
            shares = [_percent(one.hidden(found["none"], phase)) for phase in phases]
            cells = [_cell(one, phase) for phase in phases]
            overall = _percent(one.hidden(found["none"]))
            rows.append([link, mode, *cells, sums, *shares, overall, f"{baseline / total:.3f}x"])
    return table(header, rows)


def covered(outcomes: Outcomes) -> bool:
    """Whether computing takes at least as long as the all-reduces, in the forward and in the
    backward.
    """
    one = outcomes["none", False]
    return all(one.total[phase] >= 2 * one.exposed[phase] for phase in one.total)


def shares(outcomes: Outcomes) -> dict[str, float]:
    """Of the all-reduce time of a forward and a backward: hidden, by way of overlap."""
    return {
        mode: outcomes[mode, False].hidden(outcomes["none", False])
        for mode in ("weight-gradient", *HIDING)
    }


def _modelled_summary(links: Mapping[str, Outcomes], distance: float) -> str:
    lines = []
    for link, outcomes in links.items():
        blocking = outcomes["none", False]
        ratios = (
            blocking.exposed[phase] / (blocking.total[phase] - blocking.exposed[phase])
            for phase in "FB"
        )
        text = ", ".join(f"{mode} {share:.1%}" for mode, share in shares(outcomes).items())
        ratio = " and ".join(f"{value:.2f}" for value in ratios)
        lines.append(
            f"- {link}: all-reduces take {ratio} of the computing of F and B. Hidden of F + B: {text}."
        )
    lines.append(
        f"- Gradients of all ways are those of the blocking run, but for a relative distance of {distance:.1e} where "
        "halves sum in another order (bfloat16)."
    )
    return "\n".join(lines)


def _measured_summary(wall: Wall) -> str:
    text = ", ".join(f"{mode} {share:.1%}" for mode, share in shares(wall.outcomes).items())
    compute = ", ".join(
        f"{phase} {_milliseconds(seconds)} ms" for phase, seconds in wall.compute[True].items()
    )
    return f"Without communication the engine takes {compute}. Hidden of F + B: {text}."


def _prediction(wall: Wall) -> str:
    rows = []
    for (mode, again), one in wall.outcomes.items():
        told = wall.predicted[mode, again]
        cells = [_milliseconds(sum(seconds.values())) for seconds in (told, one.total)]
        ratio = sum(one.total.values()) / sum(told.values())
        rows.append([mode, "yes" if again else "no", *cells, f"{ratio:.3f}"])
    return table(
        ["overlap", "recomputation", "modelled, ms", "measured, ms", "measured / modelled"], rows
    )


INTRODUCTION = """
# Overlap of tensor-parallel communication

This page shows how much of the tensor-parallel all-reduces each value of `--tp-comm-overlap` hides.
`python -m benchmarks overlap` writes it.

| value | what overlaps |
| --- | --- |
| *none* | nothing: every all-reduce blocks |
| *weight-gradient* | all-reduces of the backward with the weight gradients of the same segment; the fair baseline |
| *sub-pipeline* | the two halves of a micro-batch: each computes while the other communicates |
| *pair* | the forward of one micro-batch and the backward of another, in steady state; only their sum is known |

*Exposed* is the time of a phase in which the rank does not compute. *Hidden* is the share of the all-reduce time that
is not exposed; the blocking run exposes all of it. F, R and B are forward, recomputation (as a separate op) and
backward.

## Modelled

- **Model**: the GPT of flags, a Llama with 8 layers (hidden 4096, MLP 11008, 32 heads, vocabulary 32000, bfloat16); 8
  sequences of 2048 tokens per micro-batch.
- **Devices**: two ranks with 156 TFLOP/s and 1.5 TB/s each: half of an A100's FLOP/s, which large kernels reach, and
  its memory bandwidth.
- **Times**: all times in this section are **modelled**. Real processes run the real engine on the backend `emu`,
  which moves real data and charges every operation by its roofline and every all-reduce by its link (5 us, and the
  bandwidth in the table).
- **Scale**: the processes run a model that is 16 times smaller in widths and length, on a device with 16^3 times
  fewer FLOP/s and memory and links with 16^2 times fewer bytes/s, which takes the same times.

The model leaves out what small or concurrent kernels lose on a real device.
"""

RECOMPUTING = """
Every layer is recomputed. In a pair, the recomputation is part of the backward, and all three run together.
"""

MEASURED = """
## Measured

Times are measured on the machine's clock over a link of 1 Gbit/s: two network namespaces joined by a virtual cable
with a token bucket at each end. The real engine runs layers with two all-reduces in each direction. Kernels sleep;
all-reduces are real, by gloo.
"""

PREDICTED = """
### Modelled and measured

The same chain on the backend `emu`. Kernels take the times measured without communication, and the link is
`ethernet-1g` of the cost table (0.1 ms, 119 MB/s):
"""
