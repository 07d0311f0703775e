"""What benchmarks of whole runs share: their options, where they ran, and where their tables go."""

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.two_lines_page import PageError, processor, versions, write


def add_from(parser: argparse.ArgumentParser) -> None:
    """Add what shows the measurements of an earlier run."""
    parser.add_argument(
        "--from",
        dest="saved",
        type=Path,
        metavar="FILE",
        help="run nothing: the table of this JSON",
    )
    add_into(parser)


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a parser with `add_from`. A page is written from a file alone, so
    that its run can be looked at first.
    """
    given = parser.parse_args(argv)
    if given.into and not given.saved:
        parser.error("--into: writes what a run has measured. Give its --json FILE as --from FILE")
    return given


def add_into(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--into",
        type=Path,
        nargs="+",
        default=[],
        metavar="PAGE",
        help="write the table into these pages",
    )


def add_options(parser: argparse.ArgumentParser, repeats: int, timeout: float) -> None:
    """Add what runs in turns need, with these defaults."""
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help=f"runs of each contestant, in turns ({repeats})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=timeout,
        help=f"seconds that one run may take ({timeout:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    add_from(parser)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement"
    )


def circumstances() -> dict[str, Any]:
    """Return what a file of measurements says of the machine, the versions and the day."""
    return {
        "machine": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def heading(saved: Mapping[str, Any], runs: int, contestants: str) -> str:
    """Return the line above the table of a saved run: where and when it was measured, and how.

    contestants: what they are called.
    """
    packages = ", ".join(f"{package} {number}" for package, number in saved["versions"].items())
    where = f"{saved['machine']}, {saved['cores']} cores, {packages}, {saved['date']}"
    return f"{where}. Median of {runs} runs (slowest-fastest), {contestants} in turns."


def spread(rates: Sequence[float]) -> str:
    """Return the median, and the range in brackets."""
    return f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"


def show(text: str, into: Sequence[Path], begin: str, end: str) -> int:
    """Print a table, or write it into pages; return the exit status, 2 for one without marks."""
    try:
        for page in into:
            write(page, text, begin, end)
    except PageError as error:
        print(error, file=sys.stderr)
        return 2
    if not into:
        print(text)
    return 0
