"""Pictures of what parameter_server.py models."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.servers.learner import Curve
from benchmarks.servers.modelled import STRATEGIES, Trace

COLORS = dict(zip(STRATEGIES, ("#4A5568", "#C05621", "#2B6CB0"), strict=True))
# of a number of servers
SHADES = {0: "#2B6CB0", 1: "#C05621", 2: "#DD8A4A", 4: "#E8B88F", 8: "#F0D5BE"}


def losses(found: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Loss over modelled time, a panel for each kind of workers."""
    figure, save = _figure(3.6)
    panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (who, some) in zip(panels, found.items(), strict=True):
        for name, curve in some.items():
            style = {"color": COLORS[name], "lw": 1.2, "ls": "--" if name == "allreduce" else "-"}
            axes.plot(curve.seconds, curve.losses, label=name, **style)
        axes.set_title(f"workers: {who}", fontsize=10)
        axes.set_xlabel("modelled seconds")
    panels[0].set_ylabel("validation loss (nats per byte)")
    panels[0].legend(frameon=False)
    save(path)


def staleness_and_times(
    found: Mapping[str, Mapping[str, Curve]],
    timed: Mapping[tuple[int, int], list[Trace]],
    path: Path,
) -> None:
    """Staleness of each worker's gradients, and the time of a step over the number of workers."""
    figure, save = _figure(6.4)
    above, below = figure.subplots(2, 2, sharey="row")
    for axes, (who, some) in zip(above, found.items(), strict=True):
        counters, setup = some["ps-async"].staleness, some["ps-async"].trace.setup
        width = 0.8 / len(counters)
        for worker, ages in enumerate(counters):
            shares = [100 * ages[age] / ages.total() for age in sorted(ages)]
            slow = setup.computing(worker) > setup.compute
            color = (
                COLORS["ps-sync"]
                if slow
                else (0.17, 0.42, 0.69, 0.4 + 0.6 * worker / len(counters))
            )
            places = [age + width * (worker - (len(counters) - 1) / 2) for age in sorted(ages)]
            axes.bar(
                places,
                shares,
                width,
                color=color,
                label=f"worker {worker}" + (", slow" if slow else ""),
            )
        axes.set_title(f"ps-async, workers: {who}", fontsize=10)
        axes.set_xlabel("staleness (updates)")
        axes.legend(frameon=False, fontsize=8)
    above[0].set_ylabel("gradients of a worker, %")
    sizes = list(dict.fromkeys(workers for workers, _ in timed))
    for place, axes in enumerate(below, 1):
        for servers in dict.fromkeys(number for _, number in timed):
            steps = [timed[workers, servers][place].step for workers in sizes]
            label = f"{servers} server{'s' * (servers > 1)}" if servers else "co-located"
            axes.plot(sizes, steps, color=SHADES[servers], marker="o", ms=3, lw=1.2, label=label)
        reduced = [timed[workers, 0][0].step for workers in sizes]
        axes.plot(sizes, reduced, color=COLORS["allreduce"], ls="--", lw=1.2, label="allreduce")
        axes.set_title(STRATEGIES[place], fontsize=10)
        axes.set_xlabel("workers")
        axes.set_xticks(sizes)
    below[0].set_ylabel("seconds per step of all workers")
    below[0].set_ylim(0, None)
    below[0].legend(frameon=False, fontsize=8)
    save(path)


def _figure(height: float):
    """A figure of ``height`` inches, and what writes it to a path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)

    def save(path: Path) -> None:
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)

    return figure, save
