"""The output of a run: console lines, a JSON line per iteration, trackers, the files of --run-dir."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TextIO

from ..config import LoggingConfig
from ..config.run import Run
from ..pipeline_parallel.pictures.view import View
from ..report.line_file import LineFile
from ..report.run_files import RunFiles
from .console import Interval, Progress, Throughput, console_line, fitted, put, short_line
from .trackers.chosen import trackers_of

__all__ = ["Progress", "Report", "Throughput"]


class Report:
    """Collects steps and writes lines, on one rank of the job.

    files:    of --run-dir; None without it.
    settings: of the run, for its trackers; None: there are no trackers.

    That trackers are installed, and that files can be written, was checked before. Raises
    ConfigError where a tracker cannot begin.
    """

    def __init__(
        self,
        config: LoggingConfig,
        work: Throughput,
        out: TextIO | None = None,
        files: RunFiles | None = None,
        settings: Run | None = None,
    ):
        self.config = config
        self.work = work
        self.out = out or sys.stdout
        self.files = files
        self.on_terminal = self.out.isatty()
        self.short = config.log_format == "short" or (
            config.log_format == "auto" and self.on_terminal
        )
        if files is not None:
            files.tell(self.print)
        self.records: list[dict] = []
        self._pending: list[dict] = []
        self._before: int | None = None  # the iteration of the step before
        self._metrics = None if config.metrics is None else LineFile(config.metrics, self.print)
        self.trackers = [] if settings is None else trackers_of(config, settings, self.print)

    def note(self, kind: str, iteration: int, **values: float) -> None:
        """Record values of one iteration: kind is 'train', 'valid' or 'test'."""
        record = {"kind": kind, "iteration": iteration, **values}
        self.records.append(record)
        if self._metrics is not None:
            self._metrics.write(json.dumps(record))
        if self.files is not None:
            self.files.note(record)
        for tracker in self.trackers:
            tracker.note(kind, iteration, values)

    def timed(self, what: str, iteration: int, seconds: float, **values: float | str) -> None:
        """Tell trackers how long a part of the run took that has just ended; see `Tracker.span`."""
        for tracker in self.trackers:
            tracker.span(what, iteration, seconds, values)

    def step(self, progress: Progress, seconds: float, report) -> None:
        """Record one training step, and print a line at each log interval. report: a StepReport
        with a loss.
        """
        iteration = progress.iteration
        values = {
            k: v
            for k, v in asdict(report).items()
            if v is not None and k != "zeros" and (k, v) != ("late", False)
        }
        time = {"modelled_seconds" if self.work.clock else "seconds": seconds}
        if self.files is not None:
            self.files.began(iteration - 1, progress.consumed_samples - progress.samples)
        self.note("train", iteration, consumed_samples=progress.consumed_samples, **time, **values)
        self.timed("step", iteration, seconds, loss=report.loss)
        self._pending.append({"samples": progress.samples, "seconds": seconds, **values})
        if report.late:
            self.print(
                f" iteration {iteration}: the gradient was {report.staleness} updates old, and "
                "not applied"
            )
        if report.skipped:
            scale = (
                ""
                if report.loss_scale is None
                else f"; the loss scale is now {report.loss_scale:.1f}"
            )
            self.print(
                f" iteration {iteration}: the gradient norm is {report.grad_norm}, the step was "
                f"skipped{scale}"
            )
        if self._due(iteration, progress.iterations):
            self._line(self._interval(progress, report.zeros))
            self._pending.clear()

    def _due(self, iteration: int, last: int) -> bool:
        """Whether a log interval has passed since the last step.

        A job beside others that it does not wait for may take several steps of an iteration, or
        none.
        """
        before = iteration - 1 if self._before is None else self._before
        self._before = iteration
        interval = self.config.log_interval
        return iteration // interval > before // interval or (iteration == last and before < last)

    def _interval(self, progress: Progress, zeros: int | None) -> Interval:
        pending = self._pending
        good = [row["loss"] for row in pending if not row["skipped"]]
        seconds = sum(row["seconds"] for row in pending)
        return Interval(
            progress,
            seconds / len(pending),
            pending[-1]["learning_rate"],
            sum(good) / len(good) if good else math.nan,
            grad_norm=pending[-1]["grad_norm"],
            skipped=sum(row["skipped"] for row in pending),
            samples_per_second=sum(row["samples"] for row in pending) / seconds,
            zeros=zeros,
            nan=sum(not math.isfinite(row["loss"]) for row in pending),
            loss_scale=pending[-1].get("loss_scale", 1.0),
            staleness=sum(row["staleness"] for row in pending) / len(pending)
            if "staleness" in pending[-1]
            else None,
        )

    def _line(self, interval: Interval) -> None:
        work = self.work
        detailed = self.config.log_throughput
        line = (
            short_line(interval, work, detailed)
            if self.short
            else console_line(interval, work, detailed, datetime.now())
        )
        put(line, self.out)

    def print(self, text: str) -> None:
        """Print a text; on a terminal, break its lines to fit."""
        put(fitted(text) if self.on_terminal else text, self.out)

    def draw(self, path: str, draw: Callable[[], object]) -> bool:
        """Return whether a picture could be drawn into a file; if not, say why."""
        try:
            draw()
        except OSError as error:
            self.print(f"{path} cannot be written ({error.strerror or error})")
            return False
        return True

    def measured(self, views: Sequence[View]) -> None:
        """Store the timeline of a step with the files of the run."""
        files = self.files
        if files is not None:
            self.draw(str(files.directory), lambda: files.measured(views))

    def close(self) -> None:
        """Close the files and print their names."""
        for tracker in self.trackers:
            tracker.close()
        trackers = [tracker.place for tracker in self.trackers]
        for path in filter(None, [self.config.metrics, *trackers, self.config.run_dir]):
            self.print(f"wrote {path}")
        if self.files is not None:
            self.files.close()
        if self._metrics is not None:
            self._metrics.close()
