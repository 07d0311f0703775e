"""From measurements to rows: medians and spread, ratios of ours to each peer, the numeric check,
the table.
"""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.step.cases import OURS, Case, ModelShape

# Relative difference of losses allowed: on step 0 (same weights), on later steps.
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (5e-3, 5e-3)}


@dataclass
class Spread:
    """Median of the repeats, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        return Spread(median(values), min(values), max(values))


@dataclass
class Series:
    """All repeats of one case; `runs[i]` is what the ranks of repeat i measured."""

    case: Case
    runs: list[list[dict[str, Any]]] = field(default_factory=list)

    def step_ms(self) -> Spread:
        """Wall time of a step: the slowest rank's, median over the steps of a run, then over the
        runs.
        """
        slowest = [
            map(max, zip(*(rank["wall_s"] for rank in run), strict=True)) for run in self.runs
        ]
        return Spread.of([1e3 * median(steps) for steps in slowest])

    def tokens_per_second(self, shape: ModelShape) -> Spread:
        time = self.step_ms()
        return Spread(*(shape.tokens * 1e3 / t for t in (time.median, time.high, time.low)))

    def cpu_ms(self) -> list[Spread]:
        """User plus system time of a step, by rank."""
        ranks = range(self.case.world_size)
        return [
            Spread.of([1e3 * median(self._cpu(run[rank])) for run in self.runs]) for rank in ranks
        ]

    def system_share(self) -> float:
        """Part of the CPU time spent in the kernel (page faults, sockets)."""
        ranks = [rank for run in self.runs for rank in run]
        return sum(sum(rank["system_s"]) for rank in ranks) / max(
            1e-9, sum(sum(self._cpu(rank)) for rank in ranks)
        )

    def peak_mib(self) -> list[float]:
        return [
            median(run[rank]["peak_bytes"] for run in self.runs) / 2**20
            for rank in range(self.case.world_size)
        ]

    def losses(self) -> list[float]:
        return self.runs[0][-1]["losses"]

    @staticmethod
    def _cpu(rank: dict[str, Any]) -> list[float]:
        return [u + s for u, s in zip(rank["user_s"], rank["system_s"], strict=True)]

    def to_dict(self, shape: ModelShape) -> dict[str, Any]:
        last = self.runs[0][-1]
        return {
            **asdict(self.case),
            "name": self.case.name,
            "repeats": len(self.runs),
            "tokens_per_second": vars(self.tokens_per_second(shape)),
            "step_ms": vars(self.step_ms()),
            "cpu_ms_by_rank": [vars(spread) for spread in self.cpu_ms()],
            "system_share": self.system_share(),
            "peak_mib_by_rank": self.peak_mib(),
            "losses": self.losses(),
            "notes": last["notes"],
            "versions": last["versions"],
        }


def disagreements(series: list[Series]) -> list[str]:
    """One line per loss that is not the one of the first measured case of the same precision."""
    lines = []
    reference: dict[str, Series] = {}
    for one in series:
        other = reference.setdefault(one.case.precision, one)
        first, later = TOLERANCE[one.case.precision]
        for run in one.runs:
            for step, (a, b) in enumerate(zip(run[-1]["losses"], other.losses(), strict=True)):
                if not abs(a - b) <= (first if step == 0 else later) * abs(b):
                    lines.append(
                        f"{one.case.name}: loss {a:.7g} at step {step}, {b:.7g} in {other.case.name}"
                    )
    return lines


def ratios(series: list[Series], shape: ModelShape) -> list[dict[str, Any]]:
    """Each of ours against each flavour of the peer in its group (of several tuned splits the
    fastest counts), and against ours with the GPT of flags."""
    ours = [one for one in series if one.case.contestant in OURS]
    best: dict[tuple[str, bool], Series] = {}
    for one in series:
        key = (one.case.group, one.case.tuned)
        if one not in ours and (
            key not in best or one.step_ms().median < best[key].step_ms().median
        ):
            best[key] = one
    of_flags = [one for one in ours if one.case.contestant == "ours"]
    pairs = [(mine, other) for mine in ours for other in [*of_flags, *best.values()]]
    return [
        compare(mine, other) for mine, other in pairs if mine is not other and mine.case.group == other.case.group
        if mine.case.contestant != "ours" or other not in ours
    ]  # fmt: skip


def compare(mine: Series, theirs: Series) -> dict[str, Any]:
    speed = theirs.step_ms().median / mine.step_ms().median
    cpu = sum(s.median for s in theirs.cpu_ms()) / sum(s.median for s in mine.cpu_ms())
    memory = max(theirs.peak_mib()) / max(mine.peak_mib())
    rows = {"group": mine.case.group, "ours": mine.case.row, "peer": theirs.case.row}
    return rows | {"speed": speed, "cpu": cpu, "memory": memory}


def table(series: list[Series], shape: ModelShape) -> str:
    names = f"{'group':10} {'contestant':58}"
    head = f"{names} {'tokens/s':>22} {'step ms':>9} {'CPU ms by rank':>16} {'sys':>4} {'peak MiB':>12}"
    lines = [head, "-" * len(head)]
    for one in series:
        speed = one.tokens_per_second(shape)
        rate = f"{speed.median:.0f} ({speed.low:.0f}-{speed.high:.0f})"
        cpu = " / ".join(f"{spread.median:.0f}" for spread in one.cpu_ms())
        memory = " / ".join(f"{mib:.0f}" for mib in one.peak_mib())
        numbers = f"{rate:>22} {one.step_ms().median:9.0f} {cpu:>16} {one.system_share():4.0%} {memory:>12}"
        lines.append(f"{one.case.group:10} {one.case.row:58} {numbers}")
    for ratio in ratios(series, shape):
        lines.append(
            f"{ratio['group']}: {ratio['ours']} is {ratio['speed']:.2f}x the tokens/s of {ratio['peer']} "
            f"(CPU time {ratio['cpu']:.2f}x less, memory of the largest rank {ratio['memory']:.2f}x less)"
        )
    return "\n".join(lines)
