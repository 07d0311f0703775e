"""Schedules that update weights without a flush of the pipeline, beside 1F1B: modelled.

python -m benchmarks unflushed                                      prints the section
python -m benchmarks unflushed --into docs/evidence/schedules.md    (a second)
"""

import argparse

from benchmarks.runs import add_into, show
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import Op, Schedule
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.pipeline_parallel.unflushed import held_versions, ops_of_stage

BEGIN = "<!-- written by: python -m benchmarks unflushed -->"
END = "<!-- end of unflushed -->"
FORWARD_MS = 50.0
RANKS = (2, 4, 8)
UPDATES = (1, 4, 16, 64)

TEXT = """{begin}
`pipedream` (Narayanan et al., SOSP 2019) and `pipedream-2bw` (Narayanan et al., ICML 2021) update the weights of a
stage while micro-batches are in flight, so that no update drains the pipeline. They are **other algorithms**:
gradients are stale, losses differ from those of all schedules above, and `auto` and `merak-plan search` never choose
them.

- *pipedream* updates a stage after each of its backwards. A micro-batch computes its forward and its backward with the
  weights that the stage had at the forward (weight stashing), of which stage s = 0, ..., S - 1 keeps S - s versions.
  Its gradient is applied to weights that are S - 1 - s updates newer.
- *pipedream-2bw* updates all stages after every *M* micro-batches, `--pipeline-update-interval`, at least S. They
  compute with the weights before the last update, so every stage keeps two versions, and each gradient is one update
  late everywhere.

A step here is one stretch of updates, `--global-batch-size` / (`--micro-batch-size` x M) of them, with one learning
rate; at its end the pipeline drains, for logs, evaluation and checkpoints. So the first gradients of each step are less
stale than that, a checkpoint holds everything, and a resumed run goes on to the bit. Larger steps drain less often. The
loss of a step is the mean over its micro-batches, and the norm of the gradient that of its last update. A
gradient that is not finite ends the run, where other schedules skip the step.

Times are modelled as above, {forward:.0f} ms for a forward. Cells have the time of a micro-batch, the bubble, and the
speed-up over `1f1b` that flushes after every S micro-batches, by the micro-batches of a step:

{table}

With n updates per step the bubble is (S - 1) / (n M + S - 1), which vanishes; that of 1F1B stays at
(S - 1) / (M + S - 1). In the steady state an update takes M (F + B), without any bubble. Updates take no time here; the
planner adds them to the step, and counts all versions of the weights.

`tests/training/test_unflushed.py` compares losses and weights of three steps, on 2 and 4 stages, in fp32 and bf16, with
one process that computes micro-batch after micro-batch and gives each stage the weights stated here: equal to the bit.
The GPT of flags only, without tensor or data parallelism, tied embeddings, clipping by the global norm and fp16, for
which each stage would wait for others; all of these are refused by name.
{end}"""


def step(schedule: Schedule) -> float:
    """Milliseconds of a step."""
    costs = StageCosts.uniform(schedule.stages, FORWARD_MS, 2 * FORWARD_MS)
    return simulate(schedule, costs).makespan


def staleness(schedule: Schedule, stage: int) -> int:
    """The staleness of the last micro-batch on a stage."""
    ops: list[Op] = ops_of_stage(schedule, stage)
    assert schedule.updates is not None
    return schedule.updates.staleness(ops[-1])


def rows() -> list[list[str]]:
    found = []
    for ranks in RANKS:
        flushed = step(build_schedule("1f1b", ranks, ranks)) / ranks
        for name in ("pipedream", "pipedream-2bw"):
            every = 1 if name == "pipedream" else ranks
            last = build_schedule(name, ranks, max(UPDATES) * every)
            stale = [staleness(last, stage) for stage in range(ranks)]
            held = held_versions(last)
            per = []
            for updates in UPDATES:
                count = updates * ranks
                time = step(build_schedule(name, ranks, count)) / count
                bubble = 1 - 3 * FORWARD_MS / time
                per.append(f"{time:.1f} ms, {bubble:.1%}, {flushed / time:.2f}x")
            versions = " ".join(map(str, held))
            found.append([str(ranks), name, " ".join(map(str, stale)), versions, *per])
    return found


def section() -> str:
    head = ["S", "schedule", "staleness by stage", "versions by stage"]
    head += [f"{count} S" for count in UPDATES]
    lines = [head, ["--:", "---", "---", "---", *["--:"] * len(UPDATES)], *rows()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return TEXT.format(begin=BEGIN, end=END, forward=FORWARD_MS, table=table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_into(parser)
    given = parser.parse_args(argv)
    inner = section().removeprefix(BEGIN).removesuffix(END).strip()
    return show(inner, given.into, BEGIN, END)
