"""What two_lines.py measured: rows, their table, the JSON that keeps them, and pages that show them."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from cases import ONE
from step import processor

OURS = "MerakTrainer"
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
BEGIN, END = "<!-- written by benchmarks/two_lines.py -->", "<!-- end of two_lines -->"
PACKAGES = ("torch", "transformers", "megatron-core", "deepspeed")


class PageError(Exception):
    """A page without the two marks between which the table is written."""


@dataclass
class Row:
    """One contestant in one layout: tokens per second, the losses, and the largest resident set of a rank (MiB), of
    each repeat.

    script: it ran the script of the benchmark; else torch's or Megatron's own step, from other weights.
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


def disagreement(rows: list[Row]) -> str:
    """The first loss that differs from another contestant's with the same weights and precision; "" if all agree."""
    first: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for losses in row.losses:
            expected = first.setdefault((row.precision, "" if row.script else row.layout), losses)
            for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
                if not abs(ours - theirs) <= TOLERANCE[row.precision] * abs(theirs):
                    return f"{row.name}: loss {ours} at step {step}, {theirs} in another"
    return ""


def table(rows: list[Row]) -> str:
    """A row per layout, precision and peer: tokens per second of both, median (range), and their ratio."""
    return "\n".join([HEADER, *(line for ours in rows if ours.contestant == OURS for line in beside(ours, rows))])


HEADER = "| | peer | tokens/s | MerakTrainer, tokens/s | |\n|---|---|--:|--:|--:|"


def beside(ours: Row, rows: list[Row]) -> list[str]:
    """The lines of the table for one of our rows: one for each of its peers."""
    place = "one process" if ours.layout == ONE else ours.layout.upper().replace("2", "=2")
    peers = (row for row in rows if (row.precision, row.layout) == (ours.precision, ours.layout) and row is not ours)
    return [
        f"| {ours.precision}, {place} | {peer.contestant} | {_spread(peer.rates)} | {_spread(ours.rates)} "
        f"| {median(ours.rates) / median(peer.rates):.2f}x |"
        for peer in peers
    ]


def _spread(rates: list[float]) -> str:
    return f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"


def save(path: Path, rows: list[Row], options: dict) -> None:
    """Write all measurements, with the machine and the versions."""
    found = {"options": options, "machine": processor(), "cores": os.cpu_count(), "system": platform.platform()}
    found |= {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    path.write_text(json.dumps(found | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Of those PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def page(path: Path) -> str:
    """The table of a saved run under a line that says where and when it was measured."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["rows"]]
    packages = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
    runs = max(len(row.rates) for row in rows)
    head = (
        f"{found['machine']}, {found['cores']} cores, {packages}, {found['date']}. "
        f"Median of {runs} runs (slowest-fastest), contestants in turns."
    )
    return f"{head}\n\n{table(rows)}"


def write(into: Path, text: str, first: str = BEGIN, last: str = END) -> None:
    """Replace what is between the two marks of a page. Raises PageError where they are missing."""
    before, begin, rest = into.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise PageError(f"{into} has no lines {first} and {last}")
    into.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
