"""What recomputing no more than necessary gains: the four GPTs of Merak's paper on modelled 24 GB
cards.

    python -m benchmarks recompute              prints the page
    python -m benchmarks recompute --write      into docs/evidence/recompute.md

Every time is MODELLED: plans of the GPT of flags, priced by the cost table of the planner. Nothing is
measured here.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from benchmarks import EVIDENCE
from benchmarks.modelled.premises import Premises, section
from megatron_merak.cluster import GIB, find_cluster
from megatron_merak.config import ModelConfig, ParallelConfig
from megatron_merak.errors import MerakError
from megatron_merak.plan import DTYPE_BYTES, Grid, Plan, Unit
from megatron_merak.planner.cost import gpt_units
from megatron_merak.planner.layout import StageLayouts
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.predict import priced
from megatron_merak.planner.recompute import Recompute
from megatron_merak.planner.request import Request

DOCUMENT = EVIDENCE / "recompute.md"
CLUSTER = "rtx3090"
DTYPE = "bfloat16"
MEMORY_GB = 22.0
SEQUENCE = 1024
GLOBAL_BATCH = 256
# Layers, hidden size, heads, GPUs. GPT-2's 1.5B has 25 heads, which no degree divides: 20 of 80 do
# the same work.
SIZES = {
    "1.5B": (48, 1600, 20, 8),
    "2.5B": (54, 1920, 20, 8),
    "8.3B": (72, 3072, 24, 32),
    "20B": (44, 6144, 64, 64),
}
SCHEDULES = ("1f1b", "shifted")


@dataclass(frozen=True)
class Case:
    """A model, where it runs, and its micro-batch."""

    size: str
    grid: Grid
    samples: int

    @property
    def microbatches(self) -> int:
        return GLOBAL_BATCH // (self.samples * self.grid.dp)

    def units(self) -> tuple[Unit, ...]:
        layers, hidden, heads, _ = SIZES[self.size]
        model = ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            seq_length=SEQUENCE,
            vocab_size=50257,
        )
        return gpt_units(model, self.samples, DTYPE_BYTES[DTYPE], self.grid.tp)

    def plan(self, method: str, schedule: str) -> Plan | None:
        """None where it does not fit."""
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.grid.tp,
            pipeline_model_parallel_size=self.grid.pp,
            pipeline_schedule=schedule,
            recompute_granularity=None if method == "none" else "full",
            recompute_method=None if method in ("none", "full") else method,
            device_memory_gb=MEMORY_GB,
        )
        request = Request(
            parallel=parallel,
            replicas=self.grid.dp,
            microbatches=self.microbatches,
            micro_batch_size=self.samples,
            sequence_length=SEQUENCE,
            dtype=DTYPE,
        )
        try:
            return plan_chain(self.units(), request, find_cluster(CLUSTER))
        except MerakError:
            return None

    def unbalanced(self, schedule: str) -> float:
        """Seconds with the fewest recomputed units on stages that are cut without regard
        to them.
        """
        full = self.plan("full", schedule)
        made = StageLayouts(full, Recompute("capacity"), MEMORY_GB * GIB).plans(MEMORY_GB)[-1]
        return priced(made).predicted_time


def cases(size: str) -> Iterator[Case]:
    """Pipelines of four stages or more on which full recomputation fits and none does not."""
    _, _, heads, gpus = SIZES[size]
    for tp in (tp for tp in (1, 2, 4, 8) if heads % tp == 0):
        for pp in (4, 8, 16):
            for samples in (1, 2, 4, 8, 16):
                if gpus % (tp * pp) == 0 and GLOBAL_BATCH % (samples * gpus // (tp * pp)) == 0:
                    case = Case(size, Grid(tp=tp, dp=gpus // (tp * pp), pp=pp), samples)
                    enough = case.microbatches >= max(pp, 4)
                    if (
                        enough
                        and case.plan("full", "1f1b") is not None
                        and case.plan("none", "1f1b") is None
                    ):
                        yield case


@cache
def best_case(size: str) -> Case | None:
    """The layout on which full recomputation is fastest; None where everything fits."""
    return min(cases(size), key=lambda case: case.plan("full", "1f1b").predicted_time, default=None)


def premises_of(case: Case) -> Premises:
    aware, shifted = (case.plan("stage-aware", schedule) for schedule in SCHEDULES)
    return Premises(aware, shifted, MEMORY_GB * GIB)


def rows(size: str) -> list[list[str]]:
    """The layout on which full recomputation is fastest, under each schedule."""
    best = best_case(size)
    if best is None:
        return [[size, "everything fits"]]
    found = []
    for schedule in SCHEDULES:
        full, aware, exact = (
            best.plan(method, schedule) for method in ("full", "stage-aware", "capacity")
        )
        if full is None or exact is None:
            continue
        again = [sum(len(stage.recompute) for stage in plan.stages) for plan in (full, exact)]
        peak = max(memory.total for memory in rank_memory(exact)) / GIB
        grid = f"tp{best.grid.tp} pp{best.grid.pp} dp{best.grid.dp} mb{best.samples}"
        gain = [
            f"{full.predicted_time / seconds:.3f}x" if seconds else "does not fit"
            for seconds in
            # fmt: skip
            (aware and aware.predicted_time, best.unbalanced(schedule), exact.predicted_time)
        ]
        recomputed = f"{again[1]} of {again[0]}"
        found.append(
            [
                size,
                grid,
                schedule,
                f"{full.predicted_time:.2f} s",
                *gain,
                recomputed,
                f"{peak:.1f} GiB",
            ]
        )
    return found


TEXT = """# Recomputing no more than necessary, modelled

Recomputation (activation checkpointing) costs time, so it pays to recompute only what does not fit. This page shows
how much each `--recompute-method` saves over recomputing every layer.

**Every number on this page is modelled**: the planner's cost table prices plans of the GPT of flags on RTX 3090s with
{memory:.0f} of their 24 GiB for the model, sequences of {sequence} tokens, {batch} samples per step, and 16-bit
weights with fp32 master weights. The eight GPUs of a node share one network card. Layouts have at least four stages;
the model fits with full recomputation and does not fit without recomputation. Each row uses the layout on which full
recomputation is fastest.

The table lists the step time with full recomputation, and the speed-up over it:

- *stage-aware*: Merak's ratio rule;
- *fewest*: as few units as fit, on the same stages;
- *capacity*: as few units as fit, on stages rebalanced by what they recompute.

{table}

With the ratio rule later stages keep more activations, but the first stage remains the slowest, so only the warm-up
and the drain of the pipeline get shorter. With rebalanced stages the later ones take over layers. Under the shifted
schedule, full recomputation already lets the last stage keep its activations, and recomputing ahead of a backward
stores all activations of a stage at once, which leaves less memory to keep others.

{premises}

Regenerate: `python -m benchmarks recompute --write`
"""


def page() -> str:
    head = [
        "model",
        "layout",
        "schedule",
        "full (modelled)",
        "stage-aware",
        "fewest",
        "capacity",
        "recomputed",
        "peak",
    ]
    lines = [head, ["---"] * len(head), *(row for size in SIZES for row in rows(size))]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    best = {size: best_case(size) for size in SIZES}
    found = {size: premises_of(case) for size, case in best.items() if case is not None}
    return TEXT.format(
        memory=MEMORY_GB,
        sequence=SEQUENCE,
        batch=GLOBAL_BATCH,
        table=table,
        premises=section(found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/evidence/recompute.md; else print"
    )
    options = parser.parse_args()
    text = page()
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    print(text)
