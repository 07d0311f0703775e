"""What the page shows of a run's numbers: charts, the figures at its top, and notes."""

import math
import statistics
from collections.abc import Iterator

from megatron_merak.counting import counted
from megatron_merak.report.chart import Chart, Line
from megatron_merak.report.facts import Facts
from megatron_merak.report.history import History, LoggedStep

_KINDS = {"valid": ("validation", 2), "test": ("test", 3)}


def span(history: History) -> tuple[int, int]:
    """Return the first and the last iteration of all charts."""
    places = [*history.steps, *(at for points in history.evaluations.values() for at in points)]
    places += [at for points in history.metrics.values() for at in points]
    return (min(places), max(places)) if places else (0, 1)


def charts(facts: Facts) -> list[Chart]:
    """Return the charts for which there are values."""
    history = facts.history
    steps = [history.steps[at] for at in sorted(history.steps)]
    shown = [_loss(history, steps)]
    rows = (
        ("learning_rate", "Learning rate", "in each iteration", False),
        ("grad_norm", "Gradient norm", "before clipping", True),
    )
    for name, title, unit, logs in rows:
        line = Line(title.lower(), [(one.iteration, getattr(one, name)) for one in steps])
        shown.append(Chart(name, title, unit, (line,), zero=True, logs=logs))
    shown.append(_throughput(facts, steps))
    if any(one.loss_scale not in (None, 1.0) for one in steps):
        line = Line("loss scale", [(one.iteration, one.loss_scale) for one in steps])
        shown.append(
            Chart(
                "loss_scale", "Loss scale", "of the next iteration", (line,), zero=True, logs=True
            )
        )
    for name, points in history.metrics.items():
        line = Line(name, sorted(points.items()), colour=2, dots=True)
        shown.append(
            Chart(f"eval_{name}", name.replace("_", " ").capitalize(), "in evaluations", (line,))
        )
    return [chart for chart in shown if any(line.values() for line in chart.lines)]


def _loss(history: History, steps: list[LoggedStep]) -> Chart:
    lines = [Line("training", [(one.iteration, one.loss) for one in steps])]
    lines += [
        Line(name, sorted(history.evaluations[kind].items()), colour, dots=True)
        for kind, (name, colour) in _KINDS.items()
        if history.evaluations.get(kind)
    ]
    skipped = tuple(one.iteration for one in steps if one.skipped)
    filled = tuple(line for line in lines if line.points)
    return Chart(
        "loss", "Loss", "nats per token", filled or tuple(lines[:1]), marks=skipped, wide=True
    )


def _throughput(facts: Facts, steps: list[LoggedStep]) -> Chart:
    tokens = facts.work.get("tokens")
    clock = str(facts.work.get("clock") or "")
    unit = "tokens per second" if tokens else "samples per second"
    unit += f", {clock or 'modelled'}" if facts.history.modelled else ""
    points = [
        (one.iteration, None if one.rate is None else one.rate * (tokens or 1)) for one in steps
    ]
    line = Line("tokens/s" if tokens else "samples/s", points, colour=4)
    return Chart("throughput", "Throughput", unit, (line,), zero=True, digits=0 if tokens else 4)


def tiles(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Return (name, value, more) of the figures at the top."""
    history = facts.history
    last = facts.history.last
    of = f"of {facts.iterations:,}" if facts.iterations else ""
    yield "iterations", f"{last:,}", of
    losses = [
        (at, step.loss) for at, step in sorted(history.steps.items()) if step.loss is not None
    ]
    if losses:
        yield "training loss", f"{losses[-1][1]:.4f}", f"at iteration {losses[-1][0]:,}"
    for kind, (name, _) in _KINDS.items():
        points = history.evaluations.get(kind)
        if points:
            at = max(points)
            yield (
                f"{name} loss",
                f"{points[at]:.4f}",
                f"perplexity {math.exp(min(points[at], 700)):,.1f}",
            )
    yield from _speed(facts)


def _speed(facts: Facts) -> Iterator[tuple[str, str, str]]:
    steps = facts.history.steps.values()
    work = facts.work
    rates = [step.rate for step in steps if step.rate is not None]
    if rates and work.get("tokens"):
        rate = statistics.median(rates)
        yield "tokens per second", f"{rate * work['tokens']:,.0f}", _utilization(facts, rate)
    seconds = sum(step.seconds for step in steps if step.seconds)
    if seconds:
        samples = sum(step.samples for step in steps if step.samples)
        tokens = f"{samples * work['tokens']:,} tokens" if work.get("tokens") and samples else ""
        yield (
            "modelled time" if facts.history.modelled else "time in iterations",
            time(seconds),
            tokens,
        )
    for entry in facts.state.get("log_history", ()):
        if "train_runtime" in entry:
            speed = entry.get("train_samples_per_second")
            yield (
                "training time",
                time(entry["train_runtime"]),
                f"{speed:,.1f} samples/s" if speed else "",
            )


def _utilization(facts: Facts, rate: float) -> str:
    """Return the FLOP/s of ranks at so many samples per second."""
    flops, ranks, peak = (facts.work.get(name) for name in ("flops", "ranks", "peak"))
    if not flops or not ranks:
        return ""
    each = flops * rate / ranks
    return f"MFU {100 * each / peak:.1f} %" if peak else f"{each / 1e9:,.1f} GFLOP/s per rank"


def time(seconds: float) -> str:
    """Return a time in its two largest units: "2 h 5 min", "1 min 6 s"."""
    left = round(seconds)
    if left < 10:
        return f"{seconds:.1f} s"
    parts = []
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if left >= unit:
            parts.append(f"{left // unit} {name}")
            left %= unit
        elif parts:
            break
    return " ".join(parts[:2])


def notes(facts: Facts) -> list[str]:
    """Return what a reader should know, in sentences."""
    history = facts.history
    lines = list(facts.notes)
    last = history.last
    planned = facts.iterations
    if planned and last < planned and history.steps:
        lines.append(f"The run has done {last:,} of {counted(planned, 'iteration')}.")
    for start in history.starts[1:]:
        repeated = (
            f"; {counted(start.repeated, 'iteration')} done before were repeated, and the "
            "later values are shown"
        )
        lines.append(
            "The run was restarted after iteration "
            f"{start.iteration:,}{repeated * bool(start.repeated)}."
        )
    skipped = [step.iteration for step in history.steps.values() if step.skipped]
    if skipped:
        named = ", ".join(f"{at:,}" for at in sorted(skipped)[:8]) + (
            ", ..." if len(skipped) > 8 else ""
        )
        lines.append(
            f"{counted(len(skipped), 'iteration')} skipped, as the gradient was not finite "
            f"({named}): "
            "marked below the loss."
        )
    if history.modelled:
        lines.append("Times are modelled: the run emulated a cluster on this machine.")
    if facts.starts and facts.measured is None:
        lines.append("No step was measured; --timeline FILE measures the last one.")
    return lines
