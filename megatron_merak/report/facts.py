"""Everything known of a run, read from its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_merak.counting import counted
from megatron_merak.errors import MerakError, ReportError
from megatron_merak.pipeline_parallel.pictures.trace import from_trace
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.plan import Plan
from megatron_merak.report.hf_state import (
    arguments_beside,
    history_of_state,
    newest_state,
    plan_beside,
)
from megatron_merak.report.history import History
from megatron_merak.report.run_files import METRICS, PLAN, RUN, TIMELINE, parse_run
from megatron_merak.strict_json import parse

REMEDY = (
    "Name a directory that --run-dir of a training command wrote, or the output_dir of a "
    "HuggingFace trainer"
)
_SHOWN = 60  # characters of a damaged line


@dataclass(frozen=True)
class Facts:
    """What is known of a run.

    name:      of the directory.
    starts:    of run.json, first to last.
    state:     of a trainer_state.json.
    arguments: of a HuggingFace trainer.
    notes:     what a reader should know of the files.
    """

    name: str
    history: History
    starts: tuple[Mapping[str, Any], ...] = ()
    plan: Plan | None = None
    measured: View | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start."""
        return self.starts[-1] if self.starts else {}

    @property
    def work(self) -> Mapping[str, Any]:
        """The work of a sample, as the last start recorded it: tokens, flops, ranks, peak,
        clock.
        """
        work = self.start.get("work")
        return work if isinstance(work, Mapping) else {}

    @property
    def iterations(self) -> int:
        """Iterations of the complete run; 0 if unknown."""
        planned = self.start.get("iterations") or self.state.get("max_steps")
        return planned if type(planned) is int else 0


def facts_of(directory: Path) -> Facts:
    """Read the directory of a run. Raises ReportError."""
    if not directory.is_dir():
        reason = "it is not a directory" if directory.exists() else "it does not exist"
        raise ReportError("RUN_DIR", directory, reason, REMEDY)
    name = directory.resolve().name
    if (directory / METRICS).is_file() or (directory / RUN).is_file():
        return _run(directory, name)
    state = newest_state(directory)
    if state is None:
        reason = f"it has neither {METRICS} nor trainer_state.json, nor a checkpoint-N with one"
        raise ReportError("RUN_DIR", directory, reason, REMEDY)
    return _trainer(state, name)


def _run(directory: Path, name: str) -> Facts:
    history, cut_off = _history(directory / METRICS)
    starts = _read(directory / RUN, parse_run, "the page has no settings and versions then") or []
    plan = _read(directory / PLAN, Plan.from_json, "the page has no plan then")
    timeline = _read(
        directory / TIMELINE, lambda text: from_trace(parse(text)), "the page has no timeline then"
    )
    notes = []
    if cut_off:
        notes.append(
            f"The last line of {METRICS} is cut off, as the run was killed while it wrote it; it "
            "is left out."
        )
    return Facts(
        name,
        history,
        tuple(starts),
        plan,
        measured=timeline[0] if timeline else None,
        notes=tuple(notes),
    )


def _trainer(path: Path, name: str) -> Facts:
    history, state = _read(path, history_of_state, "name a checkpoint-N whose file is complete")
    logged = state.get("logging_steps")
    notes = []
    if type(logged) in (int, float) and logged > 1:
        notes.append(
            f"Losses are means over {counted(round(logged), 'step')}, as logging_steps asks for."
        )
    return Facts(
        name,
        history,
        plan=plan_beside(path),
        state=state,
        arguments=arguments_beside(path),
        notes=tuple(notes),
    )


def _read(path: Path, read, otherwise: str):
    """Return ``read`` of a file; None without it. Raises ReportError."""
    if not path.is_file():
        return None
    try:
        return read(path.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        MerakError,
    ) as error:
        reason = f"it is damaged ({error.reason if isinstance(error, MerakError) else error})"
        raise ReportError("file", path, reason, f"Restore it, or remove it: {otherwise}") from error


def _history(path: Path) -> tuple[History, bool]:
    """Return the history in a file of metrics, and whether its last line is truncated. Raises
    ReportError.
    """
    history = History()
    if not path.is_file():
        return history, False
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            "file", path, f"it cannot be read ({error.strerror})", "Check its permissions"
        ) from error
    *lines, rest = text.split("\n")
    for number, line in enumerate([*lines, rest], 1):
        if not line.strip():
            continue
        try:
            row = parse(line, finite=False)
            if not isinstance(row, dict):
                raise ValueError("it is no JSON object")
            history.add(row)
        except ValueError as error:
            if number > len(lines):
                return history, True
            shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
            reason = f"line {number} is damaged ({error}): {shown}"
            raise ReportError(
                "file", path, reason, "Remove that line, or restore the file"
            ) from error
    return history, False
