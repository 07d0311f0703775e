"""The files in the directory that --run-dir names, written by the rank that reports.

DIR/plan.json        the plan that ran last, in the form that --plan reads
    run.json         every start of the run: time, command, ranks, device, predicted step, settings,
                     versions of libraries
    metrics.jsonl    a line per iteration and evaluation, as --metrics writes them, and a line per start
    timeline.json    the last step as it was measured, with --timeline
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_merak.durable import make_directory, replaced
from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.pictures.trace import to_trace
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.plan import Plan
from megatron_merak.report.line_file import LineFile
from megatron_merak.strict_json import parse

PLAN = "plan.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
TIMELINE = "timeline.json"
FORMAT = 1


def parse_run(text: str) -> list[dict[str, Any]]:
    """Return the starts in a run.json, first to last. Raises ValueError for any other text."""
    record = parse(text, finite=False)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is no object of format {FORMAT}")
    starts = record.get("starts")
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ValueError("it has no list of starts")
    return starts


def starts_before(directory: str | Path) -> list[dict[str, Any]]:
    """Return the earlier starts in a directory. Raises ConfigError if its run.json is damaged."""
    path = Path(directory) / RUN
    try:
        return parse_run(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError) as error:
        reason = f"{RUN} in it cannot be read ({error})"
        raise ConfigError(
            "--run-dir", directory, reason, "Name another directory, or remove that file"
        ) from error


class RunFiles:
    """Writes the files of one start of a run.

    directory: created if it does not exist.
    start:     facts of this start, JSON-safe.
    plan:      of the run.
    """

    def __init__(self, directory: str | Path, start: Mapping[str, Any], plan: Plan):
        self.directory = Path(directory)
        make_directory(self.directory)
        starts = [*starts_before(self.directory), dict(start)]
        self._number = len(starts) - 1
        _replace(self.directory / PLAN, plan.to_json())
        _replace(
            self.directory / RUN, json.dumps({"format": FORMAT, "starts": starts}, indent=1) + "\n"
        )
        _drop_cut_off_line(self.directory / METRICS)
        self._metrics = LineFile(self.directory / METRICS)
        self._began = False

    def tell(self, say: Callable[[str], object]) -> None:
        """Call ``say`` with a line for the user where metrics cannot be written; training
        goes on.
        """
        self._metrics.say = say

    def began(self, iteration: int, consumed_samples: int) -> None:
        """Record that training continues from ``iteration``; what a file says of later ones was
        lost.

        Only the first call counts.
        """
        if not self._began:
            self._began = True
            row = {"kind": "start", "start": self._number, "iteration": iteration}
            self.note(row | {"consumed_samples": consumed_samples})

    def note(self, row: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        self._metrics.write(json.dumps(row))

    def measured(self, views: Sequence[View]) -> None:
        """Write the measured timeline of a step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        _replace(self.directory / TIMELINE, json.dumps(to_trace(views)))

    def close(self) -> None:
        self._metrics.close()


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    with replaced(path, path.with_name(f".{path.name}.{os.getpid()}.tmp")) as file:
        file.write(text.encode())


def _drop_cut_off_line(path: Path) -> None:
    """Remove the incomplete last line that a killed run left."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
