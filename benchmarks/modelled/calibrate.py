"""Fits the planner's constants to published step times, and predicts rows that it did not fit.

python -m benchmarks calibrate                      # --into docs/evidence/planner.md; 2 minutes
python -m benchmarks calibrate --judge --rows FILE  # rows of your own, by the constants as they are

A file of rows has the columns of benchmarks/modelled/measured_steps.csv.
"""

import argparse
import csv
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.runs import add_into, show
from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import PRACTICE, Practice, find_cluster
from megatron_merak.config import Config
from megatron_merak.plan import Plan, interval
from megatron_merak.planner import plan
from megatron_merak.planner.predict import step_time, timeline

ROWS = Path(__file__).with_name("measured_steps.csv")
# What is fitted, by family: where a fit starts, and the spread of the logarithm around it. Rows
# are few, so that constants which they do not tell stay where hardware and micro-benchmarks put
# them: large products of cuBLAS, NCCL's all-reduce in a node (NVLS on H100) and over InfiniBand
# (SHARP with it), passes that move what is counted at three quarters of the bandwidth.
STARTS = {
    "A100": {
        "product": (0.84, 0.05),
        "passes": (1.3, 0.3),
        "inside": (0.9, 0.25),
        "between": (0.9, 0.4),
        "step": (0.01, 0.5),
    },
    "H100": {
        "product": (0.72, 0.05),
        "passes": (1.3, 0.3),
        "inside": (1.2, 0.3),
        "between": (1.6, 0.4),
        "step": (0.01, 0.5),
    },
}
SPREAD = 0.03  # of the logarithm of a row's error; larger errors count less than squared
FREEDOM = 2.0  # degrees of it, of Student's distribution of errors
TRIES = 6  # steps of a fit
BEGIN = "<!-- written by: python -m benchmarks calibrate -->"
END = "<!-- end of calibrate -->"
EXTRA = "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --lr 1e-4".split()


@dataclass(frozen=True, eq=False)
class Row:
    """A published step: who measured it, of what, its plan and its seconds."""

    source: str
    case: str
    plan: Plan
    measured: float

    @property
    def family(self) -> str:
        return self.plan.cluster.device.name.split()[0]

    def error(self, practice: Practice | None) -> float:
        """The logarithm of predicted by measured seconds, with these constants."""
        device = replace(self.plan.cluster.device, practice=practice)
        cluster = replace(self.plan.cluster, device=device)
        return _error(replace(self.plan, cluster=cluster), self.measured)

    @property
    def expected(self) -> bool:
        """Whether the measured step is in the interval of its plan."""
        low, high = interval(self.plan) or (0.0, math.inf)
        return low <= self.measured <= high


def _error(made: Plan, measured: float) -> float:
    return math.log(step_time(made, timeline(made)) / measured)


def rows_of(path: Path) -> list[Row]:
    """Read a file of published steps. Rows are planned as if memory were without limit: those of
    other systems may keep less.
    """
    rows = []
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            words = [*shlex.split(line["plan_flags"]), *EXTRA, "--device-memory-gb", "100000"]
            config, _ = read(build_parser("", Config), words, Config)
            made = plan(config, int(line["gpus"]), find_cluster(line["cluster"]))
            measured = float(line["measured_seconds_per_step"])
            rows.append(Row(line["source"], line["case"], made, measured))
    return rows


def fit(rows: Sequence[Row]) -> Practice:
    """Return the constants of a family that explain its rows best: Gauss-Newton steps on robust
    errors, with the distance from where they start as further errors.
    """
    family = rows[0].family
    starts = STARTS[family]
    names = list(starts)

    def constants(place: np.ndarray) -> Practice:
        moved = {
            name: starts[name][0] * math.exp(starts[name][1] * float(x))
            for name, x in zip(names, place, strict=True)
        }
        return replace(PRACTICE[family], **moved)

    def errors(place: np.ndarray) -> np.ndarray:
        return np.array([row.error(constants(place)) for row in rows]) / SPREAD

    def badness(found: np.ndarray, place: np.ndarray) -> float:
        return float((FREEDOM + 1) * np.log1p(found**2 / FREEDOM).sum() + place @ place)

    place = np.zeros(len(names))
    found = errors(place)
    for _ in range(TRIES):
        slopes = np.stack(
            [(errors(place + side) - found) / 0.1 for side in 0.1 * np.eye(len(names))], axis=1
        )
        weights = (FREEDOM + 1) / (FREEDOM + found**2)
        square = slopes.T @ (weights[:, None] * slopes) + np.eye(len(names))
        step = np.linalg.solve(square, -(slopes.T @ (weights * found) + place))
        while np.abs(step).max() > 1e-2:
            moved = errors(place + step)
            if badness(moved, place + step) < badness(found, place):
                break
            step = step / 2
        else:
            break
        place = place + step
        found = moved
    return constants(place)


def rounded(practice: Practice) -> Practice:
    """Constants with three digits, as the table has them."""
    return Practice(**{name: float(f"{value:.3g}") for name, value in asdict(practice).items()})


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every other row of each source."""
    first: list[Row] = []
    second: list[Row] = []
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        # the longer half of one source goes with the shorter one of the next
        swapped = len(first) > len(second)
        (second if swapped else first).extend(own[::2])
        (first if swapped else second).extend(own[1::2])
    return first, second


def unseen(
    rows: Sequence[Row], groups: Iterable[Sequence[Row]], inside: bool = False
) -> dict[Row, float]:
    """The error of each row of each group by constants that were fitted to all rows outside of it.

    inside: by those fitted to the group itself instead.
    """
    errors = {}
    for group in groups:
        practice = fit([row for row in rows if (row in group) == inside])
        errors |= {row: row.error(practice) for row in group}
    return errors


def rank_correlation(rows: Sequence[Row], errors: dict[Row, float]) -> float:
    """Spearman's, of predicted and measured seconds within each source; their mean."""
    found = []
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        if len(own) < 3:
            continue
        measured = [row.measured for row in own]
        predicted = [row.measured * math.exp(errors[row]) for row in own]
        ranks = [np.argsort(np.argsort(values)) for values in (measured, predicted)]
        found.append(float(np.corrcoef(*ranks)[0, 1]))
    return float(np.mean(found))


def summary(name: str, rows: Sequence[Row], errors: dict[Row, float]) -> str:
    """One line of the table: how wrong these predictions are."""
    off = np.array([math.exp(errors[row]) - 1 for row in rows])
    size = np.abs(off)
    order = rank_correlation(rows, errors) if len(rows) > 4 else float("nan")
    cells = [
        f"{np.median(size):.1%}",
        f"{np.quantile(size, 0.9):.1%}",
        f"{size.max():.1%}",
        f"{off.mean():+.1%}",
        "" if math.isnan(order) else f"{order:.2f}",
    ]
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


HEADER = (
    "| predictions | rows | p50 | p90 | worst | mean | order | in the interval |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)


def constants_table(fits: dict[str, Practice]) -> str:
    names = list(asdict(next(iter(fits.values()))))
    lines = [f"| constant | {' | '.join(fits)} |", f"|---|{'--:|' * len(fits)}"]
    for name in names:
        values = []
        for family, practice in fits.items():
            kind = "" if name in (*STARTS[family], "low", "high") else " (assumed)"
            values.append(f"{getattr(practice, name):g}{kind}")
        lines.append(f"| `{name}` | {' | '.join(values)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Judged:
    """A family's rows with their errors by constants fitted to nothing (``bare``), to all rows, to
    the other half, and to the other sources; and the constants fitted to all.

    fitted_half: errors of each half by its own constants.
    """

    rows: list[Row]
    practice: Practice
    bare: dict[Row, float]
    fitted: dict[Row, float]
    fitted_half: dict[Row, float]
    half: dict[Row, float]
    source: dict[Row, float]


def judge(rows: list[Row]) -> Judged:
    parts = halves(rows)
    half = unseen(rows, parts)
    # what a plan says of its step: measured by predicted seconds of rows that were not fitted
    low, high = (math.exp(-np.quantile([*half.values()], share)) for share in (0.9, 0.1))
    practice = rounded(replace(fit(rows), low=low, high=high))
    return Judged(
        rows,
        practice,
        bare={row: row.error(None) for row in rows},
        fitted={row: row.error(practice) for row in rows},
        fitted_half=unseen(rows, parts, inside=True),
        half=half,
        source=unseen(rows, by_source(rows)),
    )


def by_source(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each source."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row)
    return list(found.values())


def page(judged: dict[str, Judged]) -> str:
    """The tables of the evidence page."""
    lines = [constants_table({name: one.practice for name, one in judged.items()}), ""]
    everything = [row for one in judged.values() for row in one.rows]
    for name, rows, found in [
        *((name, one.rows, [one]) for name, one in judged.items()),
        ("both", everything, list(judged.values())),
    ]:
        lines += [f"**{name}**", "", HEADER]
        for title, key in TITLES.items():
            errors = {row: error for one in found for row, error in getattr(one, key).items()}
            within = covered(found, key)
            lines.append(f"{summary(title, rows, errors)} {within:.0%} |")
        lines.append("")
    lines += ["| source | step | measured | figures alone | fitted | other half | other sources |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|"]
    for one in judged.values():
        for row in one.rows:
            found = (one.bare, one.fitted, one.half, one.source)
            errors = " | ".join(f"{math.exp(each[row]) - 1:+.0%}" for each in found)
            lines.append(f"| {row.source} | {row.case} | {row.measured:g} s | {errors} |")
    return "\n".join(lines)


def covered(found: Sequence[Judged], key: str) -> float:
    """The share of rows whose measured step is in the interval around these predictions."""
    inside = [
        one.practice.low <= math.exp(-error) <= one.practice.high
        for one in found
        for error in getattr(one, key).values()
    ]
    return sum(inside) / len(inside)


TITLES = {
    "by figures alone": "bare",
    "fitted to these rows": "fitted",
    "halves, as fitted": "fitted_half",
    "fitted to the other half": "half",
    "fitted to the other sources": "source",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, default=ROWS, metavar="FILE", help="published steps [the shared ones]"
    )
    parser.add_argument(
        "--judge", action="store_true", help="fit nothing: predict by the constants of the table"
    )
    add_into(parser)
    given = parser.parse_args(argv)
    rows = rows_of(given.rows)
    if given.judge:
        print(HEADER)
        errors = {row: _error(row.plan, row.measured) for row in rows}
        within = sum(row.expected for row in rows) / len(rows)
        print(f"{summary('by the table', rows, errors)} {within:.0%} |")
        return
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    judged = {name: judge(own) for name, own in families.items()}
    show(page(judged), given.into, BEGIN, END)


if __name__ == "__main__":
    main()
