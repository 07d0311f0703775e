"""What sessions on a GPU measured, as a page: of one or more session.tgz, the last first.

python benchmarks/gpu_page.py session.tgz...                     # prints it
python benchmarks/gpu_page.py session.tgz... --into docs/gpu.md  # between its marks
"""

import argparse
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from gpu_rows import SHAPES, TITLES
from gpu_trace import CLASSES
from two_lines_page import PageError, write

BEGIN, END = "<!-- written by benchmarks/gpu_page.py -->", "<!-- end of gpu_page -->"
LOSS_TOLERANCE = 2e-2  # of bf16, between contestants that start from the same weights and data
SAME_START = ("trainer", "hf", "hf-compile")
CLOCKS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
)


def session(path: Path) -> tuple[dict, list[dict]]:
    """The head and the rows of a session.tgz. Raises PageError."""
    try:
        with tarfile.open(path) as packed:
            file = packed.extractfile("results.jsonl")
            lines = file.read().decode().splitlines() if file else []
        head, *rows = map(json.loads, lines)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise PageError(f"{path}: it is no session.tgz ({error})") from None
    return head, rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if place < 2 else "--:" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def measured(rows: Sequence[dict]) -> list[dict]:
    """The results of training steps."""
    return [row["result"] for row in rows if "tokens_per_s" in row.get("result", {})]


def _named(row: dict) -> tuple[str, str]:
    return SHAPES[row["model"]].title, f"{TITLES[row['contestant']]}, {row['micro_batches']}"


def speeds(rows: Sequence[dict]) -> str:
    """A line per row of training steps."""
    lines = []
    for row in rows:
        memory = f"{row['peak_allocated'] / 1e9:.1f}", f"{row['peak_reserved'] / 1e9:.1f}"
        spread = f"{1e3 * min(row['seconds']):.0f} - {1e3 * max(row['seconds']):.0f}"
        share = f"{row['mfu']:.1%}" if row["mfu"] else ""
        speed = (
            f"{row['tokens_per_s']:.0f}",
            f"{row['tflops']:.3g}",
            f"{row['tflops_all_scores']:.3g}",
            share,
        )
        lines.append(
            [*_named(row), *speed, spread, *memory, row.get("card", {}).get("clocks.sm", "")]
        )
    head = [
        "model",
        "way, micro-batches",
        "tokens/s",
        "TFLOP/s",
        "all scores",
        "MFU",
        "ms per step",
        "GB",
        "reserved",
    ]
    return markdown([*head, "clock"], lines) if lines else ""


def profiles(rows: Sequence[dict]) -> str:
    """Where the time of one step goes, of the rows that were profiled."""
    lines = []
    for row in rows:
        profile = row.get("profile", {})
        if "class_ms" in profile:
            classes = [f"{profile['class_ms'][name]:.1f}" for name in (*CLASSES, "other")]
            kernel = ", ".join(name[:60] for name in profile["attention_kernels"][:2]).replace(
                "|", "/"
            )
            idle = f"{profile['idle_ms']:.1f}"
            lines.append(
                [
                    *_named(row),
                    *classes,
                    idle,
                    str(profile["kernels"]),
                    f"`{kernel}`" if kernel else "",
                ]
            )
    head = ["model", "way, micro-batches", *CLASSES, "other", "idle", "kernels", "of attention"]
    return markdown(head, lines) if lines else ""


def disagreements(rows: Sequence[dict]) -> list[str]:
    """Rows whose first loss is not that of the others with the same model, weights and data."""
    first: dict[tuple, dict] = {}
    wrong = []
    for row in rows:
        if row["contestant"] in SAME_START and row["losses"]:
            other = first.setdefault((row["model"], row["micro_batches"]), row)
            mine, theirs = row["losses"][0], other["losses"][0]
            if not abs(mine - theirs) <= LOSS_TOLERANCE * abs(theirs):
                wrong.append(
                    f"{row['row']}: first loss {mine:.4f}, {other['row']} has {theirs:.4f}"
                )
    return wrong


def told(head: dict, rows: Sequence[dict]) -> str:
    """A session: where and when, with what; steps; then the tables."""
    start = next(
        (row["result"] for row in rows if row["step"] == "start" and row.get("result")), {}
    )
    card = start.get("card", {"name": "unknown card"})
    named = ", ".join(f"{name} {number}" for name, number in start.get("versions", {}).items())
    clocks = ", ".join(f"{name} {card[name]}" for name in CLOCKS if name in card)
    where = f"### {card['name']}, {head['date'][:10]}, part {head['part']}"
    lines = [
        [
            row["step"],
            row["status"],
            f"{row['seconds']:.0f}",
            row["figure"].replace("|", "/").replace("\n", " "),
        ]
        for row in rows
    ]
    about = f"{named}. {clocks}. {head.get('kit', '')}. {head['seconds']:.0f} s of {head['budget']:.0f}."
    parts = [where, about, markdown(["step", "ended", "s", "figure"], lines)]
    found = measured(rows)
    if table := speeds(found):
        parts += ["Training steps, bf16, sequences of 4096 tokens, medians:", table]
    if table := profiles(found):
        parts += [
            "Milliseconds of one step by class of kernel, and of the gaps in which nothing ran:",
            table,
        ]
    if wrong := disagreements(found):
        parts += ["Losses differ. " + "; ".join(wrong)]
    for row in rows:
        if isinstance(operations := row.get("result", {}).get("table"), str):
            parts += ["Operations, times in ms, with the fastest and the slowest call:", operations]
    return "\n\n".join(parts)


def page(paths: Sequence[Path]) -> str:
    """All sessions. Raises PageError, also where steps of one did not run on a GPU."""
    sessions = []
    for path in paths:
        head, rows = session(path)
        if "cpu" in {row.get("result", {}).get("device") for row in rows}:
            raise PageError(f"{path}: steps of it ran on a CPU, which only tries the code")
        sessions.append((head, rows))
    sessions.sort(key=lambda one: one[0]["date"], reverse=True)
    return "\n\n".join(told(*one) for one in sessions)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sessions", type=Path, nargs="+", metavar="FILE", help="what gpu_session.py wrote"
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write between the marks of this page"
    )
    given = parser.parse_args(argv)
    try:
        text = page(given.sessions)
        if given.into:
            write(given.into, text, BEGIN, END)
    except (PageError, OSError) as error:
        print(f"gpu_page.py: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
