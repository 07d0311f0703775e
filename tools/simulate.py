"""Simulates a pipeline schedule: how long a step takes, where the ranks wait and what they hold. Needs no GPU.

Times are milliseconds of one micro-batch on one stage. Give one number for all stages, or one per stage, separated by
commas ("10,10,10,14"); --transfer and --latency are per boundary between two stages, so they take one value less.

examples:
  # 1F1B on 8 stages: 7/32 of the time is bubble
  python tools/simulate.py --pipeline-schedule 1f1b --stages 8 --microbatches 25 --out 1f1b.png

  # recomputation on all stages but the last, which is slower (it has the output layer)
  python tools/simulate.py --stages 3 --microbatches 8 --forward 10,10,14 --backward 20,20,28 --recompute 10,10,0

  # a slow link: the steady state pays for the round trip, not only the fill and the drain
  python tools/simulate.py --stages 8 --microbatches 8 --forward 20 --backward 40 --latency 8.4
"""

import argparse
import json
from pathlib import Path

from megatron_merak.errors import ConfigError, MerakError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.draw import draw
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.pipeline_parallel.simulate import StageCosts, Timeline, simulate
from megatron_merak.training.outputs import check_file


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pipeline-schedule", choices=BUILDERS, default="1f1b", help="a schedule by name (default: %(default)s)"
    )
    parser.add_argument(
        "--schedule-file", type=Path, metavar="TXT", help="a schedule as text; names its own stages and micro-batches"
    )
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages, one per rank (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step (default: %(default)s)")
    for name, default, help_text in (
        ("forward", "10", "forward"),
        ("backward", "20", "backward, with weight gradients"),
        ("weight", "0", "the part of the backward that a separate W op runs"),
        ("recompute", "0", "recomputation before or inside the backward"),
        ("transfer", "0", "how long one message occupies the link"),
        ("latency", "0", "further delay of a message, during which the link is free"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="MS", help=f"{help_text} (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="write the timeline as a picture")
    parser.add_argument("--trace", type=Path, metavar="JSON", help="write it for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--print-schedule", action="store_true", help="print every rank's ops, with communication")
    return parser.parse_args()


def stage_costs(arguments: argparse.Namespace, stages: int) -> StageCosts:
    def seconds(name: str, count: int) -> tuple[float, ...]:
        text = getattr(arguments, name)
        try:
            values = tuple(float(value) / 1e3 for value in text.split(","))
        except ValueError:
            raise ConfigError(f"--{name}", text, "it is not a list of numbers", "Write 10 or 10,10,14") from None
        if len(values) not in (1, count):
            reason = f"{len(values)} values, {count} or 1 are needed"
            raise ConfigError(f"--{name}", text, reason, "Correct the list")
        return values * count if len(values) == 1 else values

    compute = {name: seconds(name, stages) for name in ("forward", "backward", "weight", "recompute")}
    return StageCosts(**compute, **{name: seconds(name, stages - 1) for name in ("transfer", "latency")})


def report(timeline: Timeline) -> str:
    schedule, ranks = timeline.schedule, len(timeline.busy)
    lines = [
        f"{schedule.name}: {schedule.stages} stages on {ranks} ranks, {schedule.microbatches} micro-batches",
        f"makespan {timeline.makespan * 1e3:.3f} ms, bubble {timeline.bubble:.1%}",
        "",
        f"{'rank':>4}  {'stages':<12}{'busy ms':>12}{'idle ms':>12}{'bubble':>9}  micro-batches in flight",
    ]
    for rank, busy in enumerate(timeline.busy):
        stages = ",".join(map(str, range(rank, schedule.stages, ranks)))
        held = ",".join(map(str, timeline.peak_in_flight[rank::ranks]))
        idle = (timeline.makespan - busy) * 1e3
        lines.append(f"{rank:>4}  {stages:<12}{busy * 1e3:>12.3f}{idle:>12.3f}{timeline.bubbles[rank]:>9.1%}  {held}")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    try:
        for flag, path in (("--out", arguments.out), ("--trace", arguments.trace)):
            if path is not None:
                check_file(flag, str(path))
        if arguments.schedule_file:
            schedule = Schedule.parse(arguments.schedule_file.read_text())
        else:
            schedule = build_schedule(arguments.pipeline_schedule, arguments.stages, arguments.microbatches)
        if not schedule.has_communication:
            schedule = add_communication(schedule)
        timeline = simulate(schedule, stage_costs(arguments, schedule.stages))
    except (MerakError, OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"simulate.py: {error}") from None
    if arguments.print_schedule:
        print(schedule, end="\n\n")
    print(report(timeline))
    if arguments.trace:
        arguments.trace.write_text(json.dumps(timeline.to_chrome_trace()))
    if arguments.out:
        draw(timeline, arguments.out)


if __name__ == "__main__":
    main()
