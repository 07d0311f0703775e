"""What a session on a GPU measured, as tables: printed, kept in DIR/summary.json, written into a page.

python benchmarks/gpu_page.py DIR                        # prints the tables of what is in DIR
python benchmarks/gpu_page.py DIR --into docs/gpu.md     # between its marks; refused for results of a CPU
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_results import results
from gpu_results import write as store
from gpu_rows import SHAPES, TITLES
from gpu_trace import CLASSES
from two_lines_page import PageError, write

BEGIN, END = "<!-- written by benchmarks/gpu_page.py -->", "<!-- end of gpu_page -->"
LOSS_TOLERANCE = 2e-2  # of bf16, between contestants that start from the same weights and data
SAME_START = ("trainer", "hf", "hf-compile", "hf-liger", "hf-recompute")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---" if place < 2 else "--:" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _named(row: dict) -> tuple[str, str]:
    return SHAPES[row["model"]].title, f"{TITLES[row['contestant']]}, {row['micro_batches']}"


def steps(rows: Sequence[dict]) -> str:
    """A line per row that was measured; then those that were not, and why."""
    lines = []
    for row in (row for row in rows if row["status"] == "measured"):
        memory = f"{row['peak_allocated'] / 1e9:.1f}", f"{row['peak_reserved'] / 1e9:.1f}"
        spread = f"{1e3 * min(row['seconds']):.0f} - {1e3 * max(row['seconds']):.0f}"
        share = f"{row['mfu']:.1%}" if row["mfu"] else ""
        speed = f"{row['tokens_per_s']:.0f}", f"{row['tflops']:.3g}", f"{row['tflops_all_scores']:.3g}", share
        lines.append([*_named(row), *speed, spread, *memory])
    head = ["model", "way, micro-batches", "tokens/s", "TFLOP/s", "all scores", "MFU", "ms per step", "GB", "reserved"]
    others = [
        f"- {', '.join(_named(row))}: {row['status']}, {row['why']}" for row in rows if row["status"] != "measured"
    ]
    return "\n\n".join(part for part in (markdown(head, lines) if lines else "", "\n".join(others)) if part)


def profiles(rows: Sequence[dict]) -> str:
    """Where the time of one step goes, of the rows that were profiled."""
    lines = []
    for row in rows:
        profile = row.get("profile", {})
        if "class_ms" in profile:
            classes = [f"{profile['class_ms'][name]:.1f}" for name in (*CLASSES, "other")]
            kernel = ", ".join(name[:60] for name in profile["attention_kernels"][:2]).replace("|", "/")
            lines.append([*_named(row), *classes, f"{profile['idle_ms']:.1f}", f"`{kernel}`" if kernel else ""])
    head = ["model", "way, micro-batches", *CLASSES, "other", "idle", "kernels of attention"]
    return markdown(head, lines) if lines else ""


def disagreements(rows: Sequence[dict]) -> list[str]:
    """Rows whose first loss is not that of the others with the same model, weights and data."""
    first: dict[tuple, dict] = {}
    wrong = []
    for row in rows:
        if row["status"] == "measured" and row["contestant"] in SAME_START and row["losses"]:
            other = first.setdefault((row["model"], row["micro_batches"]), row)
            mine, theirs = row["losses"][0], other["losses"][0]
            if not abs(mine - theirs) <= LOSS_TOLERANCE * abs(theirs):
                wrong.append(f"{row['row']}: first loss {mine:.4f}, {other['row']} has {theirs:.4f}")
    return wrong


def told(rows: Sequence[dict]) -> str:
    """Where and when, with what, then the tables. Raises PageError where nothing was measured."""
    measured = [row for row in rows if row["status"] == "measured"]
    if not measured:
        raise PageError("no step was measured")
    versions = {name: number for row in measured for name, number in row["versions"].items()}
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    dates = sorted({row["date"][:10] for row in measured})
    sequence = measured[0]["sequence"]
    head = f"{measured[0]['device']}, {dates[-1]}; {named}. bf16, sequences of {sequence} tokens, medians."
    parts = [head, steps(rows)]
    if table := profiles(rows):
        parts += ["Milliseconds of one step by class of kernel, and of the gaps in which nothing ran:", table]
    if wrong := disagreements(rows):
        parts += ["Losses differ. " + "; ".join(wrong)]
    return "\n\n".join(part for part in parts if part)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what gpu_step.py or gpu_session.sh wrote")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables into this page")
    given = parser.parse_args(argv)
    rows = results(given.folder)
    try:
        text = told(rows)
        if given.into and any(row.get("device") == "cpu" for row in rows):
            raise PageError(f"{given.into}: these are results of a CPU, which only try the code")
        if given.into:
            write(given.into, text, BEGIN, END)
    except (PageError, OSError) as error:
        print(f"gpu_page.py: {error}", file=sys.stderr)
        return 2
    short = [{key: value for key, value in row.items() if key not in ("profile", "said", "shape")} for row in rows]
    store(given.folder / "summary.json", short)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
