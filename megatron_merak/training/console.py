"""The console lines of a run: Megatron-LM's, and a short one for terminals."""

import errno
import math
import os
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TextIO

WIDTH = 120  # columns of a terminal that lines fit into
# left out, in order, until a line fits
_DROPPED = ("zeros", "flops", "staleness", "rate", "norm", "scale", "left")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST = (errno.EPIPE, errno.EIO)  # its reader has left; its terminal is closed


@dataclass(frozen=True)
class Throughput:
    """The work of a run.

    tokens, flops: of one sample; the model's FLOPs in forward and backward.
    ranks:         that share the work.
    peak:          FLOP/s of one rank; None if unknown.
    clock:         origin of the times; "" for this machine's.
    """

    tokens: int
    flops: float
    ranks: int
    peak: float | None
    clock: str = ""

    def per_rank(self, samples_per_second: float) -> float:
        """Return the model FLOP/s of one rank."""
        return self.flops * samples_per_second / self.ranks


@dataclass(frozen=True)
class Progress:
    """The position of a run after a step.

    iteration, iterations: done, and of the complete run.
    consumed_samples:      so far.
    samples:               of the step.
    batch:                 size of a batch, if the step was only a part of one.
    """

    iteration: int
    iterations: int
    consumed_samples: int
    samples: int
    batch: int | None = None


@dataclass(frozen=True)
class Interval:
    """Means over the iterations since the last line.

    nan:        iterations whose loss was not finite.
    loss_scale: of the next iteration.
    staleness:  see ``StepReport``.
    """

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
    """Return Megatron-LM's fields in Megatron-LM's order, then ours: throughput, MFU or GFLOP/s,
    remaining time.

    With modelled times, every field that depends on one says so, and the remaining time is omitted.
    """
    modelled = f" ({work.clock})" if work.clock else ""
    rate = work.per_rank(interval.samples_per_second)
    progress = interval.progress
    fields = [
        f"iteration {progress.iteration:8d}/{progress.iterations:8d}",
        f"consumed samples: {progress.consumed_samples:12d}",
        "elapsed time per iteration (ms): "
        f"{1000 * interval.seconds:.{3 if modelled else 1}f}{modelled}",
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
    share = (
        f"GFLOP/s per rank: {rate / 1e9:.1f}"
        if work.peak is None
        else f"MFU: {100 * rate / work.peak:.1f} %"
    )
    fields.append(share + modelled)
    if not modelled:
        left = timedelta(
            seconds=round((progress.iterations - progress.iteration) * interval.seconds)
        )
        fields.append(f"ETA: {left}")
    return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


def short_line(interval: Interval, work: Throughput, detailed: bool) -> str:
    """Return the same facts in at most 120 columns; skipped and nan iterations, and a loss scale,
    only if there are any.
    """
    progress = interval.progress
    rate = work.per_rank(interval.samples_per_second)
    known = work.peak is not None
    total = f"{progress.iterations:,}"
    left = timedelta(seconds=round((progress.iterations - progress.iteration) * interval.seconds))
    counts = {
        "zeros": interval.zeros,
        "skipped": interval.skipped or None,
        "nan": interval.nan or None,
    }
    fields = {
        "iteration": f" {progress.iteration:>{len(total)},}/{total}",
        "loss": "" if math.isnan(interval.loss) else f"loss {_loss(interval.loss)}",
        "rate": f"lr {interval.learning_rate:.2e}",
        "norm": f"norm {_significant(interval.grad_norm)}",
        "scale": "" if interval.loss_scale == 1.0 else f"scale {_significant(interval.loss_scale)}",
        **{
            name: "" if count is None else f"{name} {_large(count)}"
            for name, count in counts.items()
        },
        "staleness": "" if interval.staleness is None else f"staleness {interval.staleness:.1f}",
        "time": f"{_significant(1000 * interval.seconds)} ms",
        "tokens": f"{_large(work.tokens * interval.samples_per_second)} tokens/s",
        "flops": f"{rate / 1e12:.1f} TFLOP/s/GPU"
        if detailed
        else ""
        if known
        else f"{rate / 1e9:.1f} GFLOP/s/rank",
        "share": "" if work.peak is None else f"MFU {100 * rate / work.peak:.1f} %",
        "left": "modelled"
        if work.clock
        else f"ETA {str(left).replace(' days, ', 'd ').replace(' day, ', 'd ')}",
    }
    for name in ("", *_DROPPED):
        fields[name] = ""
        line = " | ".join(filter(None, fields.values()))
        if len(line) <= WIDTH:
            break
    return line


def fitted(text: str, width: int = WIDTH) -> str:
    """Break longer lines of a text at spaces; continuation lines are indented."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        fits = len(line) <= width
        lines += (
            [line]
            if fits
            else textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


def print_fitted(text: str) -> None:
    """Print a text; on a terminal, break its lines to fit."""
    put(fitted(text) if sys.stdout.isatty() else text, sys.stdout)


def put(text: str, out: TextIO) -> None:
    """Print a text; if that fails, print it to standard error: training goes on.

    A stream whose reader or terminal is lost discards everything from then on.
    """
    try:
        print(text, file=out, flush=True)
    except OSError as error:
        if error.errno in _LOST:
            _discard(out)
            text = f"standard output is lost ({error.strerror}): the run goes on without it\n{text}"
        elif error.errno not in _FULL:
            raise
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError as lost:
            if lost.errno in _LOST:
                _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Let a stream write to nowhere; what it still holds would fail again when the interpreter
    ends.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    with suppress(OSError):
        stream.flush()


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def _significant(value: float) -> str:
    """Return three or four digits: "0.562", "12.3", "4,321", "1.2e+09"."""
    if not math.isfinite(value) or abs(value) >= 1e7:
        return f"{value:.3g}"
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


def _large(value: float) -> str:
    """Return an integer, a large one in millions and so on: "12,345", "12M"."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= 10 * unit:
            return f"{value / unit:,.0f}{letter}"
    return f"{value:,.0f}"
