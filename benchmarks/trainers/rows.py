"""What a training script measured: rows, their table, and the JSON that keeps them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.runs import circumstances, heading, spread
from benchmarks.step.cases import ONE

OURS = "MerakTrainer"
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass
class Row:
    """One contestant in one layout: tokens per second, the losses, and the largest resident set of
    a rank (MiB), of each repeat.

    script: it ran the script of the benchmark; else torch's or Megatron's own step, from other
            weights.
    """

    precision: str
    layout: str
    contestant: str
    rates: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    script: bool = True

    @property
    def name(self) -> str:
        return f"{self.precision} {self.layout} {self.contestant}"


def check_chosen(rows: Sequence[object], text: str) -> None:
    """End the program if no row is left of those with ``text``, the value of ``--only``."""
    if not rows:
        raise SystemExit(f"--only {text}: no row has this in its name")


def disagreement(rows: list[Row]) -> str:
    """The first loss that differs from another contestant's with the same weights and precision; ""
    if all agree.
    """
    first: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for losses in row.losses:
            expected = first.setdefault((row.precision, "" if row.script else row.layout), losses)
            for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
                if not abs(ours - theirs) <= TOLERANCE[row.precision] * abs(theirs):
                    return f"{row.name}: loss {ours} at step {step}, {theirs} in another"
    return ""


def table(rows: list[Row]) -> str:
    """A row per layout, precision and peer: tokens per second of both, median (range), and their
    ratio.
    """
    return "\n".join(
        [HEADER, *(line for ours in rows if ours.contestant == OURS for line in beside(ours, rows))]
    )


HEADER = "| | peer | tokens/s | MerakTrainer, tokens/s | |\n|---|---|--:|--:|--:|"


def beside(ours: Row, rows: list[Row]) -> list[str]:
    """The lines of the table for one of our rows: one for each of its peers."""
    place = "one process" if ours.layout == ONE else ours.layout.upper().replace("2", "=2")
    peers = (
        row
        for row in rows
        if (row.precision, row.layout) == (ours.precision, ours.layout) and row is not ours
    )
    return [
        f"| {ours.precision}, {place} | {peer.contestant} | {spread(peer.rates)} | {spread(ours.rates)} "
        f"| {median(ours.rates) / median(peer.rates):.2f}x |"
        for peer in peers
    ]


def save(path: Path, rows: list[Row], options: dict) -> None:
    """Write all measurements, with the machine and the versions."""
    found = {"options": options} | circumstances() | {"rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def page(path: Path, tabulate: Callable[[list[Row]], str] = table) -> str:
    """The table of a saved run under a line that says where and when it was measured."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["rows"]]
    head = heading(found, max(len(row.rates) for row in rows), "contestants")
    return f"{head}\n\n{tabulate(rows)}"
