"""Where Merak's shifted critical path and its stage-aware recomputation cross: which of them is faster, and both
together.

    python -m benchmarks crossing                                    prints the tables
    python -m benchmarks crossing --into docs/evidence/paper.md      (half a minute)

Every time is MODELLED: schedules on the simulator, and plans priced by the planner. Nothing is measured here.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from benchmarks.modelled.paper_plans import (
    AWARE,
    BASE,
    CAPACITY,
    GLOBAL_BATCH,
    SIZES,
    Layout,
    planned,
    seconds,
)
from benchmarks.runs import add_into, show
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.plan import Grid

BEGIN = "<!-- written by: python -m benchmarks crossing -->"
END = "<!-- end of crossing -->"
SHARES = (0.0625, 0.125, 0.25, 0.5)
STAGES = (2, 4, 8, 16)
FACTORS = (1, 2, 4, 8, 16)
# (F, B, R): in the first three B >= F + R and R <= F.
RATIOS = (
    (1, 2, 1),
    (1, 2, 0.5),
    (1, 3, 1),
    (1, 1.5, 1),
    (1, 1, 1),
    (1, 2, 1.5),
)
STEPS = 30  # of bisections
HEAD = (
    "model and layout",
    "m",
    "GiB",
    "base (modelled)",
    "shifted",
    "stage-aware",
    "both",
    "fastest of these",
    "capacity",
)
CASES = (
    ("1.5B", Layout(Grid(tp=1, pp=4, dp=2), 16), (18, 19, 20, 21, 22, 24, 28, 32, 40)),
    ("1.5B", Layout(Grid(tp=1, pp=4, dp=8), 1), (8, 9, 10)),
    ("8.3B", Layout(Grid(tp=1, pp=8, dp=4), 1), (21, 22, 23, 24, 26, 32)),
    ("20B", Layout(Grid(tp=2, pp=16, dp=2), 1), (14, 15, 16, 18)),
)


@dataclass(frozen=True)
class Pipeline:
    """Stages of equal times: seconds of a micro-batch's forward, backward and recomputation."""

    stages: int
    microbatches: int
    forward: float = 1.0
    backward: float = 2.0
    recompute: float = 1.0

    def shares(self, first: float) -> list[float]:
        """The share of activations that each stage keeps, by Merak's rule."""
        last = self.stages - 1
        return [min(1.0, first * last / (last - index)) for index in range(last)] + [1.0]

    def step(self, schedule: str, shares: Sequence[float]) -> float:
        """Seconds of a step whose stages keep these shares of their activations."""
        free = (0.0,) * (self.stages - 1)
        costs = StageCosts(
            forward=(self.forward,) * self.stages,
            backward=(self.backward,) * self.stages,
            weight=(0.0,) * self.stages,
            recompute=tuple(self.recompute * (1 - share) for share in shares),
            transfer=free,
            latency=free,
        )
        return simulate(build_schedule(schedule, self.stages, self.microbatches), costs).makespan

    def full(self) -> float:
        """1F1B whose stages recompute everything."""
        return self.step("1f1b", [0.0] * self.stages)

    def shifted(self) -> float:
        """The shifted schedule, whose last stage keeps everything and the others nothing."""
        return self.step("shifted", [0.0] * (self.stages - 1) + [1.0])

    def aware(self, first: float) -> float:
        """1F1B with stage-aware recomputation."""
        return self.step("1f1b", self.shares(first))

    def both(self, first: float) -> float:
        return self.step("shifted", self.shares(first))

    def crossing(self) -> float | None:
        """The share on the first stage from which stage-aware recomputation alone is faster than
        the shifted schedule alone; None: never."""
        shifted = self.shifted()
        return _least(lambda share: self.aware(share) <= shifted)


def saved_by_shifting(stages: int) -> int:
    """How many recomputations a step of the shifted schedule is shorter than 1F1B, where
    B >= F + R and R <= F.
    """
    return stages + 2


def saved_by_keeping(stages: int, microbatches: int, shares: Sequence[float]) -> float:
    """How many recomputations a step of 1F1B is shorter whose stages keep these shares, under the
    same conditions.
    """
    return (microbatches - stages + 1) * shares[0] + 2 * sum(shares[1:])


def _least(holds: Callable[[float], bool]) -> float | None:
    """The least share for which something holds that holds for all larger ones; None: for none."""
    if not holds(1.0):
        return None
    low = 0.0
    high = 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _share(value: float | None) -> str:
    return "never" if value is None else f"{value:.1%}"


def crossings() -> str:
    """By stages and micro-batches."""
    rows = []
    for stages in STAGES:
        cells = [str(stages)]
        for factor in FACTORS:
            one = Pipeline(stages, factor * stages)
            cells.append(_share(one.crossing()) if one.microbatches >= 4 else "not defined")
        rows.append(cells)
    return _table(["stages S", *(f"m = {factor} S" for factor in FACTORS)], rows)


def ratios() -> str:
    """By times."""
    rows = []
    for times in RATIOS:
        cells = [" : ".join(f"{time:g}" for time in times)]
        for factor in (1, 4):
            one = Pipeline(8, 8 * factor, *times)
            base = one.full()
            gains = [one.shifted(), one.aware(0.25), one.both(0.25)]
            cells += [_share(one.crossing()), *(f"{base / gain:.3f}x" for gain in gains)]
        rows.append(cells)
    head = ["F : B : R"]
    for count in (8, 32):
        head += [f"crossing, m = {count}", "shifted", "stage-aware", "both"]
    return _table(head, rows)


def together() -> str:
    """Gains alone and together at several shares."""
    rows = []
    for stages in (4, 8, 16):
        for factor in (1, 2, 8):
            one = Pipeline(stages, stages * factor)
            base = one.full()
            pairs = [
                f"{base / one.aware(share):.3f}x, {base / one.both(share):.3f}x" for share in SHARES
            ]
            count = str(one.microbatches)
            rows.append([str(stages), count, f"{base / one.shifted():.3f}x", *pairs])
    kept = [f"a_1 = {share:.2%}" for share in SHARES]
    return _table(["stages S", "m", "shifted", *kept], rows)


@dataclass(frozen=True)
class Memory:
    """Seconds of a step of one model, layout and memory of a GPU; infinite where it does not fit.

    base:     1F1B, everything recomputed.
    alone:    of each technique, and of both.
    capacity: the fewest units recomputed, on rebalanced stages.
    """

    name: str
    layout: Layout
    gib: int
    base: float
    alone: dict[str, float]
    capacity: float

    @classmethod
    def of(cls, name: str, layout: Layout, gib: int) -> "Memory":
        def step(change: dict[str, str]) -> float:
            limit = {"device_memory_gb": float(gib)}
            return seconds(planned(SIZES[name], layout, BASE | limit | change))

        shift = {"pipeline_schedule": "shifted"}
        keep = {"recompute_method": AWARE}
        alone = {"shifted": step(shift), "stage-aware": step(keep), "both": step(shift | keep)}
        capacity = step({"recompute_method": CAPACITY})
        return cls(name, layout, gib, step({}), alone=alone, capacity=capacity)

    @property
    def fastest(self) -> str:
        """The technique, or several that are equal to a thousandth."""
        best = min(self.alone.values())
        return ", ".join(name for name, each in self.alone.items() if each <= best * 1.001)

    def cells(self) -> list[str]:
        count = GLOBAL_BATCH // (self.layout.grid.dp * self.layout.micro_batch)
        steps = [*self.alone.values(), self.capacity]
        gains = [f"{self.base / step:.3f}x" if isfinite(step) else "does not fit" for step in steps]
        what = [f"{self.name} {self.layout}", str(count), str(self.gib), f"{self.base:.2f} s"]
        return [*what, *gains[:-1], self.fastest, gains[-1]]


def memories() -> list[Memory]:
    """The planner's steps by the memory of a GPU."""
    return [Memory.of(name, layout, gib) for name, layout, sizes in CASES for gib in sizes]


TEXT = """{begin}
*S* stages of equal times run *m* micro-batches; *F*, *B* and *R* are the times of a forward, a backward and a
recomputation of a whole stage, transfers take none. Stage *i* (from 1) keeps the share *a_i* of its activations, so
its recomputation takes (1 - *a_i*) *R*. With B >= F + R and R <= F, the simulated steps are exactly

    1F1B, everything recomputed    (m + S - 1) (F + B + R)
    shifted critical path          R (S + 2) less
    stage-aware recomputation      R [(m - S + 1) a_1 + 2 (a_2 + ... + a_S)] less

so **stage-aware recomputation alone is faster than the shifted schedule alone where
(m - S + 1) a_1 + 2 (a_2 + ... + a_S) > S + 2**, whatever the ratio of the times. The schedule saves a number of
recomputations that does not depend on m, since it shortens the fill and the drain only; recomputing less saves in
every micro-batch. The least share *a_1* from which that is so:

{crossings}

Outside these conditions the schedule saves less, as its additional forward and its early recomputations no longer
fit into the time that stages wait. The crossing, and the gain over full recomputation with a_1 = 25%, for S = 8:

{ratios}

Together, with the same shares, the two were never slower than either alone in any simulated pipeline, but their
savings do not add up: what a stage keeps it need not recompute early. Each cell has the gain of stage-aware
recomputation and that of both:

{together}

Equal shares are not equal memory. Under the shifted schedule stage S - 1 holds three micro-batches instead of two, and
a recomputation of its own holds all activations of its stage at once. The planner counts both, so the same memory of a
GPU keeps fewer layers, and both together can be slower than one alone. Plans of the paper's models by the memory that a
GPU has for them, as gains over 1F1B that recomputes everything:

{memories}

Little memory favours the schedule, and enough of it favours stage-aware recomputation; between them both together may
be the fastest. Where nothing is recomputed any more, there is nothing to shift. In the least memory of all even the
schedule costs more than it saves: what its early recomputations hold forces other cuts of the model. `capacity`, which
is not in the paper, recomputes the fewest units on rebalanced stages under 1F1B; it is at least as fast as stage-aware
recomputation in every row.
{end}"""


def section() -> str:
    """The section of the page between its marks, and the marks."""
    return TEXT.format(
        begin=BEGIN,
        crossings=crossings(),
        ratios=ratios(),
        together=together(),
        memories=_table(HEAD, [memory.cells() for memory in memories()]),
        end=END,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_into(parser)
    given = parser.parse_args(argv)
    inner = section().removeprefix(BEGIN).removesuffix(END).strip()
    return show(inner, given.into, BEGIN, END)
