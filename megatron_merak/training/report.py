"""What a run tells while it trains: Megatron-LM's console line, a JSON line per iteration, TensorBoard."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TextIO

from ..config import LoggingConfig
from ..errors import ConfigError


@dataclass(frozen=True)
class Throughput:
    """tokens, flops: of one sample, the model's FLOPs in forward and backward. peak: FLOP/s of one rank, None if
    unknown. clock: where times come from, empty for this machine's.
    """

    tokens: int
    flops: float
    ranks: int
    peak: float | None
    clock: str = ""

    def per_rank(self, samples_per_second: float) -> float:
        """Model FLOP/s of one rank."""
        return self.flops * samples_per_second / self.ranks


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step: its ``iteration`` of ``iterations``, the samples consumed, those of the step,
    and the size of a batch, where the step was not all of one."""

    iteration: int
    iterations: int
    consumed_samples: int
    samples: int
    batch: int | None = None


@dataclass(frozen=True)
class Interval:
    """Means over the iterations since the last line. nan: iterations whose loss was not finite. loss_scale: of the
    next one. staleness: see ``StepReport``."""

    progress: Progress
    seconds: float
    learning_rate: float
    loss: float
    grad_norm: float
    skipped: int
    samples_per_second: float
    zeros: int | None = None
    nan: int = 0
    loss_scale: float = 1.0
    staleness: float | None = None


def console_line(interval: Interval, work: Throughput, detailed: bool, now: datetime) -> str:
    """Megatron-LM's fields in Megatron-LM's order, then ours: throughput, MFU or GFLOP/s, time left.

    With modelled times every field that is made from one says so, and the time left is not known.
    """
    modelled = f" ({work.clock})" if work.clock else ""
    rate, progress = work.per_rank(interval.samples_per_second), interval.progress
    fields = [
        f"iteration {progress.iteration:8d}/{progress.iterations:8d}",
        f"consumed samples: {progress.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds:.{3 if modelled else 1}f}{modelled}",
    ]
    if detailed:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {rate / 1e12:.1f}{modelled}")
    fields += [
        f"learning rate: {interval.learning_rate:.6E}",
        f"global batch size: {progress.batch or progress.samples:5d}",
    ]
    if not math.isnan(interval.loss):
        fields.append(f"lm loss: {interval.loss:.6E}")
    fields += [f"loss scale: {interval.loss_scale:.1f}", f"grad norm: {interval.grad_norm:.3f}"]
    if interval.zeros is not None:
        fields.append(f"num zeros: {interval.zeros}")
    fields.append(f"number of skipped iterations: {interval.skipped:3d}")
    fields.append(f"number of nan iterations: {interval.nan:3d}")
    if interval.staleness is not None:
        fields.append(f"staleness: {interval.staleness:.1f}")
    fields.append(f"tokens/s: {work.tokens * interval.samples_per_second:.0f}{modelled}")
    known = work.peak is not None
    share = f"MFU: {100 * rate / work.peak:.1f} %" if known else f"GFLOP/s per rank: {rate / 1e9:.1f}"
    fields.append(share + modelled)
    if not modelled:
        left = timedelta(seconds=round((progress.iterations - progress.iteration) * interval.seconds))
        fields.append(f"ETA: {left}")
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


class Report:
    """Collects steps and writes lines; one rank of the job has one, the others none.

    Raises ConfigError where TensorBoard is not installed; that files can be written was checked before.
    """

    def __init__(self, config: LoggingConfig, work: Throughput, out: TextIO | None = None):
        self.config, self.work, self.out = config, work, out or sys.stdout
        self.records: list[dict] = []
        self._pending: list[dict] = []
        self._before: int | None = None  # the iteration of the step before
        self._metrics = None if config.metrics is None else open(config.metrics, "a", buffering=1)
        self._board = self._tensorboard(config.tensorboard_dir)

    def _tensorboard(self, directory: str | None):
        if directory is None:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            remedy = "Install megatron-merak[tracking], or leave it out"
            raise ConfigError("--tensorboard-dir", directory, "TensorBoard is not installed", remedy) from error
        return SummaryWriter(directory)

    def note(self, kind: str, iteration: int, **values: float) -> None:
        """Record values of one iteration: kind is 'train', 'valid' or 'test'."""
        record = {"kind": kind, "iteration": iteration, **values}
        self.records.append(record)
        if self._metrics is not None:
            self._metrics.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, iteration)

    def step(self, progress: Progress, seconds: float, report) -> None:
        """One training step (``report``: a StepReport with a loss); prints a line at each log interval."""
        iteration = progress.iteration
        values = {
            k: v for k, v in asdict(report).items() if v is not None and k != "zeros" and (k, v) != ("late", False)
        }
        time = {"modelled_seconds" if self.work.clock else "seconds": seconds}
        self.note("train", iteration, consumed_samples=progress.consumed_samples, **time, **values)
        self._pending.append({"samples": progress.samples, "seconds": seconds, **values})
        if report.late:
            self.print(f" iteration {iteration}: the gradient was {report.staleness} updates old, and not applied")
        if report.skipped:
            scale = "" if report.loss_scale is None else f"; the loss scale is now {report.loss_scale:.1f}"
            self.print(f" iteration {iteration}: the gradient norm is {report.grad_norm}, the step was skipped{scale}")
        if self._due(iteration, progress.iterations):
            self.print(
                console_line(
                    self._interval(progress, report.zeros),
                    self.work,
                    self.config.log_throughput,
                    datetime.now(),
                )
            )
            self._pending.clear()

    def _due(self, iteration: int, last: int) -> bool:
        """Whether a log interval has passed since the step before: of workers that do not wait for each other, one may
        take several steps of an iteration, or none."""
        before = iteration - 1 if self._before is None else self._before
        self._before, interval = iteration, self.config.log_interval
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
            pending[-1]["grad_norm"],
            sum(row["skipped"] for row in pending),
            sum(row["samples"] for row in pending) / seconds,
            zeros,
            sum(not math.isfinite(row["loss"]) for row in pending),
            pending[-1].get("loss_scale", 1.0),
            sum(row["staleness"] for row in pending) / len(pending) if "staleness" in pending[-1] else None,
        )

    def print(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            self._board.close()
