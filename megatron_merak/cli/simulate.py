"""Simulate pipeline schedules and plans, and show them beside each other or beside a real run.
Needs no GPU.

The output shows how long a step takes, where ranks wait and how much memory they need: as text, as
a PNG, as one zoomable HTML page, or as a trace for ui.perfetto.dev. Times are milliseconds per
micro-batch. A single number for --forward, --backward, --weight or --recompute is the time of one
pipeline rank, shared by its stages. A list ("10,10,10,14") has one time per piece of the model, in
order: one piece per stage, or per stage of the schedule with the most stages. --transfer and
--latency are per boundary between two stages: one number, or one per boundary.

examples:
  # 1F1B on 8 ranks, with a bubble of 7/32
  merak-simulate --schedule 1f1b --ranks 8 --microbatches 25 --html 1f1b.html

  # several schedules of one model on one time axis; W ops take half of the backward unless
  # --weight is given
  merak-simulate --schedule 1f1b interleaved zb-h1 zb-v --microbatches 12 --transfer 1 \\
      --html side.html

  # recomputation on all stages but the last, which is slower because it has the output layer
  merak-simulate --schedule 1f1b shifted --forward 10,10,10,14 --backward 20,20,20,28 \\
      --recompute 10,10,10,0

  # a schedule searched for uneven stages and a slow link, where no rank holds more than 1F1B's
  # first, beside others
  merak-simulate --schedule auto 1f1b zb-h1 --forward 10,10,10,14 --backward 20,20,20,28 \\
      --latency 4

  # your own schedule, before running it with --schedule-file
  merak-simulate --schedule mine.txt 1f1b --ranks 2 --microbatches 4 --html mine.html

  # a slow link, whose round trip delays the steady state, not only the warm-up and the drain
  merak-simulate --ranks 8 --microbatches 8 --forward 20 --backward 40 --latency 8.4

  # plans stored by merak-plan, with the memory of every rank
  merak-simulate --plan one.json other.json --html plans.html

  # a plan beside the measured step
  torchrun --nproc-per-node 4 pretrain_gpt.py ... --timeline run.json
  merak-simulate --plan plan.json --trace run.json --html both.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import nearest
from ..config.command_line import CommandParser
from ..errors import ConfigError, MerakError, ScheduleError
from ..pipeline_parallel.builders import BUILDERS, OTHERS, build_schedule
from ..pipeline_parallel.check import peak_in_flight
from ..pipeline_parallel.ops import Kind, Schedule, ops_of
from ..pipeline_parallel.passes import add_communication
from ..pipeline_parallel.pictures.draw import draw_text
from ..pipeline_parallel.pictures.files import check_suffix, write
from ..pipeline_parallel.pictures.palette import time_text
from ..pipeline_parallel.pictures.table import aligned, rank_rows, summary_rows
from ..pipeline_parallel.pictures.trace import from_trace
from ..pipeline_parallel.pictures.view import View
from ..pipeline_parallel.schedule_files import read_schedule
from ..pipeline_parallel.search.placement import StageHomes, placements
from ..pipeline_parallel.search.problem import MemoryLimits
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..pipeline_parallel.search.search import search
from ..pipeline_parallel.simulate import StageCosts, simulate
from ..pipeline_parallel.timeline import Timeline
from ..pipeline_parallel.unflushed import updates_text
from ..planner.picture import view
from ..strict_json import parse
from ..training.outputs import check_file
from ..training.plan_file import stored
from .door import command
from .words import described, program

OUTPUTS = {"--png": ".png", "--html": ".html", "--perfetto": ".json"}
WIDTH = 160  # columns of text
AUTO = "auto"
_LONGEST = 1e15  # milliseconds
_MOST = 1024  # ranks, and stages of each


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    text = described(__doc__, "merak-simulate")
    parser = CommandParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to show (any number of each)")
    names = ", ".join([*BUILDERS, *OTHERS, AUTO])
    schedules = f"schedules by name ({names}: searched), or schedule files, as text or as CSV of "
    schedules += "torch.distributed.pipelining [1f1b]"
    what.add_argument(
        "--schedule", "--pipeline-schedule", nargs="+", default=[], metavar="NAME", help=schedules
    )
    what.add_argument(
        "--plan",
        nargs="+",
        default=[],
        metavar="PLAN.json",
        help="stored plans, with their own costs",
    )
    traces = "measured steps, from --timeline FILE.json of a run, or traces from --perfetto"
    what.add_argument("--trace", nargs="+", default=[], metavar="TRACE.json", help=traces)
    size = parser.add_argument_group("schedules")
    size.add_argument(
        "--ranks", "--stages", type=int, default=4, help="pipeline ranks [%(default)s]"
    )
    size.add_argument(
        "--microbatches", type=int, default=8, help="micro-batches per step [%(default)s]"
    )
    size.add_argument(
        "--chunks",
        type=int,
        help="stages per rank, for schedules that support it [the schedule's default; a search "
        "tries 1 to 3]",
    )
    size.add_argument(
        "--group", type=int, help="micro-batches per group of an interleaved schedule [--ranks]"
    )
    in_flight = (
        "micro-batches that a rank may hold in a searched schedule: one number, or one "
        "per rank; with several stages "
    )
    in_flight += (
        "per rank each counts for its share [for every rank, the most that a rank holds in 1F1B]"
    )
    size.add_argument("--in-flight", metavar="N", help=in_flight)
    costs = parser.add_argument_group("costs")
    for name, default, text in (
        ("forward", "10", "forward"),
        ("backward", "20", "backward, with weight gradients"),
        ("weight", None, "part of the backward that is done by a W op [half]"),
        ("recompute", "0", "recomputation, before or inside the backward"),
        ("transfer", "0", "time that a message occupies the link"),
        ("latency", "0", "additional delay of a message, during which the link is free"),
    ):
        known = "" if default is None else " [%(default)s]"
        costs.add_argument(f"--{name}", default=default, metavar="MS", help=text + known)
    hidden = "for ops that run together, the hidden share of the shorter one, 0 to 1 [%(default)s]"
    costs.add_argument("--overlap", type=float, default=0.0, metavar="SHARE", help=hidden)
    out = parser.add_argument_group("output")
    out.add_argument("--png", metavar="FILE.png", help="write a picture")
    out.add_argument("--html", metavar="FILE.html", help="write a self-contained, zoomable page")
    out.add_argument("--perfetto", metavar="FILE.json", help="write a trace for ui.perfetto.dev")
    out.add_argument("--text", action="store_true", help="print the timelines as text")
    out.add_argument(
        "--print-schedule",
        action="store_true",
        help="print the ops of every rank, including communication",
    )
    return parser.parse_args(arguments)


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a number that cannot be what its flag counts."""
    for name, most in (
        ("ranks", _MOST),
        ("microbatches", 1 << 20),
        ("chunks", _MOST),
        ("group", 1 << 20),
    ):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(
                f"--{name}", value, "is out of range", f"Use a value from 1 to {most:,}"
            )
    if not 0 <= arguments.overlap <= 1:
        raise ConfigError(
            "--overlap", arguments.overlap, "is out of range", "Use a value from 0 to 1"
        )


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Seconds."""
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        raise ConfigError(
            flag, text, "it is not a list of numbers", "Write 10 or 10,10,14"
        ) from None
    if wrong := [value for value in values if not 0 <= value <= _LONGEST]:
        reason = f"{wrong[0]:g} is not a number from 0 to {_LONGEST:g}"
        raise ConfigError(flag, text, reason, "Write 10 or 10,10,14")
    return tuple(value / 1e3 for value in values)


def of_stages(flag: str, text: str, stages: int, ranks: int) -> tuple[float, ...]:
    """The seconds of each stage: a rank's share of one number, or the sum or the part of equal
    pieces of the model.
    """
    values = numbers(flag, text)
    if len(values) == 1:
        return (values[0] * ranks / stages,) * stages
    if len(values) % stages == 0:
        pieces = len(values) // stages
        return tuple(sum(values[stage * pieces : (stage + 1) * pieces]) for stage in range(stages))
    if stages % len(values) == 0:
        share = stages // len(values)
        return tuple(values[stage // share] / share for stage in range(stages))
    reason = f"{len(values)} values do not fit {stages} stages"
    raise ConfigError(flag, text, reason, f"Give 1 or {stages} values, or a multiple")


def of_borders(flag: str, text: str, borders: int) -> tuple[float, ...]:
    values = numbers(flag, text)
    if len(values) not in (1, borders):
        raise ConfigError(
            flag, text, f"{len(values)} values, {borders} or 1 are needed", "Correct the list"
        )
    return values * borders if len(values) == 1 else values


def stage_costs(arguments: argparse.Namespace, schedule: Schedule) -> StageCosts:
    def given(name: str) -> tuple[float, ...]:
        return of_stages(
            f"--{name}", getattr(arguments, name), schedule.stages, len(schedule.ranks)
        )

    costs = {name: given(name) for name in ("forward", "backward")}
    if arguments.weight is None:
        costs["weight"] = tuple(value / 2 for value in costs["backward"])
    else:
        costs["weight"] = given("weight")
    costs["recompute"] = given("recompute")
    for name in ("transfer", "latency"):
        costs[name] = of_borders(f"--{name}", getattr(arguments, name), schedule.stages - 1)
    return StageCosts(**costs)


def words(arguments: argparse.Namespace) -> str:
    """The costs as they were given, those that are not 0."""
    values = {
        name: getattr(arguments, name)
        for name in ("forward", "backward", "weight", "recompute", "transfer")
    }
    values["latency"] = arguments.latency
    return ", ".join(
        f"{name} {value} ms" for name, value in values.items() if value not in (None, "0")
    )


def cap(arguments: argparse.Namespace) -> tuple[tuple[int, ...], str]:
    """The micro-batches that each rank may hold, and why as many."""
    ranks = arguments.ranks
    if arguments.in_flight is None:
        most = max(peak_in_flight(build_schedule("1f1b", ranks, arguments.microbatches)))
        return (most,) * ranks, f"{most} micro-batches per rank, as many as 1f1b holds"
    limits = tuple(round(1e3 * value) for value in numbers("--in-flight", arguments.in_flight))
    if len(limits) not in (1, ranks):
        reason = f"{len(limits)} values, {ranks} or 1 are needed"
        raise ConfigError("--in-flight", arguments.in_flight, reason, "Correct the list")
    return (limits * ranks if len(limits) == 1 else limits), f"--in-flight {arguments.in_flight}"


def searched(arguments: argparse.Namespace) -> View:
    """The best schedule found for the costs, wherever stages may be, within the micro-batches that
    ranks may hold.
    """
    limits, why = cap(arguments)
    places = placements(arguments.ranks, arguments.chunks)
    candidates: list[tuple[Timeline, str]] = []
    others = []
    with SearchProgress(SEARCHING) as progress:
        for done, place in enumerate(places):
            progress.part(done, len(places))
            try:
                timeline, text = found_at(
                    arguments, place, MemoryLimits.in_flight(limits, place.chunks), progress
                )
            except ScheduleError as error:
                if len(places) == 1:
                    raise
                others.append(f"{place.name}: none fits ({error.reason})")
                continue
            candidates.append((timeline, f"{place.name}: {text}"))
    if not candidates:
        raise ScheduleError(
            "--in-flight",
            arguments.in_flight,
            "; ".join(others),
            "Allow more micro-batches per rank",
        )
    best, text = min(candidates, key=lambda pair: pair[0].makespan)
    others = [other for timeline, other in candidates if timeline is not best] + others
    return View(best, detail="; ".join([words(arguments), f"within {why}", text, *others]))


def found_at(
    arguments: argparse.Namespace, place: StageHomes, limits: MemoryLimits, progress: SearchProgress
) -> tuple[Timeline, str]:
    """The best schedule found for one placement of the stages, and what it takes beside a bound and
    builders.
    """
    microbatches = arguments.microbatches
    ranks = tuple(() for _ in range(place.ranks))
    costs = stage_costs(
        arguments, Schedule(AUTO, len(place.home), microbatches, ranks, placement=place.home)
    )
    result = search(
        costs,
        microbatches,
        limits=limits,
        split_weights=True,
        placement=place.home,
        report_progress=progress,
    )
    text = f"{time_text(result.makespan)}, no schedule is below {time_text(result.bound)}"
    text += (
        f", {result.builder} takes {time_text(result.builder_makespan)}"
        if result.builder
        else ", no builder fits"
    )
    return simulate(result.schedule, costs, arguments.overlap), text


def scheduled(arguments: argparse.Namespace, name: str) -> View:
    """A schedule by name or from a file, with the costs of the command line."""
    if name == AUTO:
        return searched(arguments)
    builder = {**BUILDERS, **OTHERS}.get(name)
    if builder is not None:
        chunks = arguments.chunks if builder.chunked else None
        group = arguments.group if builder.grouped else None
        schedule = build_schedule(
            name, arguments.ranks, arguments.microbatches, chunks, group=group
        )
    elif Path(name).exists():
        schedule = read_schedule(name, "--schedule")
    else:
        names = [*BUILDERS, *OTHERS, AUTO]
        close = nearest(name, names)
        remedy = f"The nearest is {close}" if close else "Use one of these names, or a file"
        reason = f"it is neither a file nor one of {', '.join(names)}"
        raise ScheduleError("--schedule", name, reason, remedy)
    costs = stage_costs(arguments, schedule)
    timeline = simulate(schedule, costs, arguments.overlap)
    updates = updates_text(schedule)
    parts = [words(arguments), *without_gain(schedule, costs), *([updates] if updates else [])]
    return View(timeline, detail="; ".join(parts))


def without_gain(schedule: Schedule, costs: StageCosts) -> list[str]:
    """Return a sentence for each kind of op that a schedule moves, and that takes no time here."""
    kinds = {op.kind for entry in schedule.entries() for op in ops_of(entry)}
    times = (
        (Kind.R, "recomputations", "--recompute", costs.recompute),
        (Kind.W, "weight gradients", "--weight", costs.weight),
    )
    return [
        f"its order moves {name}, which take no time here: give {flag} to see what that gains"
        for kind, name, flag, seconds in times
        if kind in kinds and not any(seconds)
    ]


def planned(path: str) -> View:
    plan = stored(path)
    return view(plan, f"{Path(path).stem}: {plan.schedule.name}")


def traced(path: str) -> tuple[View, ...]:
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a regular file")
        return from_trace(parse(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, ScheduleError) as error:
        reason = error.reason if isinstance(error, ScheduleError) else str(error)
        remedy = (
            "Use a file written by --timeline FILE.json of a run, or by --perfetto of this tool"
        )
        raise ConfigError("--trace", path, reason, remedy) from error


def views(arguments: argparse.Namespace) -> list[View]:
    names = arguments.schedule or ([] if arguments.plan or arguments.trace else ["1f1b"])
    shown = [scheduled(arguments, name) for name in names]
    shown += [planned(path) for path in arguments.plan]
    shown += [one for path in arguments.trace for one in traced(path)]
    return shown


def report(shown: View, arguments: argparse.Namespace) -> str:
    timeline = shown.timeline
    head = f"{shown.name}: {shown.size}\n{shown.clock} makespan {timeline.makespan * 1e3:.3f} ms, "
    step = f", step {shown.step * 1e3:.3f} ms with what follows" if shown.step else ""
    parts = [
        head + f"bubble {timeline.bubble:.1%}{step}" + (f"\n{shown.detail}" if shown.detail else "")
    ]
    if arguments.print_schedule:
        schedule = timeline.schedule
        parts.append(str(schedule if schedule.has_communication else add_communication(schedule)))
    if arguments.text:
        shortest = min(
            (event.end - event.start for event in timeline.events if event.end > event.start),
            default=1.0,
        )
        parts.append(draw_text(timeline, max(shortest, 3 * timeline.makespan / WIDTH)))
    return "\n\n".join([*parts, aligned(rank_rows(shown))])


@command
def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    outputs = {flag: path for flag in OUTPUTS if (path := getattr(arguments, flag[2:])) is not None}
    try:
        check_numbers(arguments)
        for flag, path in outputs.items():
            check_file(flag, path)
            if Path(path).suffix.lower() != OUTPUTS[flag]:
                raise ConfigError(
                    flag, path, "it has another suffix", f"Use a name that ends in {OUTPUTS[flag]}"
                )
            check_suffix(flag, path)
        shown = views(arguments)
    except (MerakError, OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{program()}: {error}") from None
    print("\n\n".join(report(one, arguments) for one in shown))
    if len(shown) > 1:
        print(f"\n{aligned(summary_rows(shown))}")
    for path in outputs.values():
        write(shown, path)
        print(f"wrote {path}", file=sys.stderr)
