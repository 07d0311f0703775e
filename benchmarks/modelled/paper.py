"""Merak's paper on a modelled cluster: its three techniques one by one, together, and the best plan found here.

    python -m benchmarks paper --write             all sizes on 8 to 64 GPUs, into docs/evidence/paper.md (minutes)
    python -m benchmarks paper --sizes 1.5B --gpus 8

Every time is MODELLED: plans of the GPT of flags, priced by the cost table of the planner. Nothing is measured here.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

from tqdm import tqdm

from benchmarks import EVIDENCE
from benchmarks.modelled import crossing
from benchmarks.modelled.paper_plans import (
    AWARE,
    BASE,
    CAPACITY,
    CLUSTER,
    DTYPE,
    GLOBAL_BATCH,
    MEMORY_GB,
    SEQUENCE,
    SIZES,
    Layout,
    Size,
    planned,
    seconds,
)
from megatron_merak.cluster import find_cluster
from megatron_merak.plan import Grid, Plan

DOCUMENT = EVIDENCE / "paper.md"
MICRO_BATCHES = (1, 2, 4)
LARGEST_TP = 8
GPUS = (8, 16, 32, 64)

TECHNIQUES = {
    "shifted schedule": {"pipeline_schedule": "shifted"},
    "stage-aware recomputation": {"recompute_method": AWARE},
    "sub-pipelined TMP": {"tp_comm_overlap": "sub-pipeline"},
}
MERAK = {
    "pipeline_schedule": "shifted",
    "recompute_method": AWARE,
    "tp_comm_overlap": "sub-pipeline",
}
FAIR = BASE | {"tp_comm_overlap": "weight-gradient"}
OURS = tuple(
    {"pipeline_schedule": schedule, "recompute_method": CAPACITY, "tp_comm_overlap": "auto"}
    for schedule in ("1f1b", "shifted", "early-recompute", "interleaved", "zb-h1", "zb-v")
)
SEARCHED = {"pipeline_schedule": "auto", "recompute_method": CAPACITY, "tp_comm_overlap": "auto"}


def layouts(size: Size, gpus: int) -> Iterator[Layout]:
    """Every way to lay out a model on so many GPUs."""
    for tp in (
        t for t in (1, 2, 4, 8) if t <= LARGEST_TP and size.heads % t == 0 and gpus % t == 0
    ):
        for pp in (
            p for p in range(1, gpus // tp + 1) if gpus % (tp * p) == 0 and p <= size.layers
        ):
            dp = gpus // (tp * pp)
            for micro in MICRO_BATCHES:
                if GLOBAL_BATCH % (dp * micro) == 0:
                    yield Layout(Grid(tp=tp, pp=pp, dp=dp), micro)


def best(
    size: Size, gpus: int, choices: Sequence[dict], known: Sequence[Layout] = ()
) -> tuple[Plan, Layout] | None:
    """The fastest plan over all layouts, or over ``known`` ones."""
    tried = (
        (planned(size, layout, choice), layout)
        for layout in known or layouts(size, gpus)
        for choice in choices
    )
    found = [(plan, layout) for plan, layout in tried if plan is not None]
    return min(found, key=lambda pair: seconds(pair[0]), default=None)


def fastest(size: Size, gpus: int, count: int) -> list[Layout]:
    """The layouts whose plain plans are fastest."""
    known = [
        (seconds(planned(size, layout, FAIR | {"recompute_method": CAPACITY})), layout)
        for layout in layouts(size, gpus)
    ]
    known = [pair for pair in known if pair[0] < float("inf")]
    return [layout for _, layout in sorted(known, key=lambda pair: pair[0])[:count]]


@dataclass(frozen=True)
class Ablation:
    """Seconds of a step on one layout: of the base, with each technique of the paper, with all
    three.
    """

    layout: Layout
    base: float
    alone: dict[str, float]
    merak: float


def ablation(size: Size, gpus: int, known: Sequence[Layout]) -> Ablation | None:
    """On the layout of ``known`` that is the base's best; None where the model does not fit."""
    found = best(size, gpus, [BASE], known)
    if found is None:
        return None
    base, layout = found
    alone = {
        technique: seconds(planned(size, layout, BASE | change))
        for technique, change in TECHNIQUES.items()
    }
    return Ablation(layout, seconds(base), alone, seconds(planned(size, layout, MERAK)))


@dataclass(frozen=True)
class Row:
    """One size on one number of GPUs. ``divided``: where tensor parallelism must be used, which the
    third technique is for. merak, ours: seconds on the best layout of each. fair: of the base with
    weight gradients behind collectives."""

    size: str
    gpus: int
    free: Ablation
    divided: Ablation | None
    fair: float
    merak: float
    ours: float
    layout: Layout
    plan: Plan


def row(name: str, gpus: int) -> Row | None:
    """None where the model does not fit."""
    size = SIZES[name]
    every = list(layouts(size, gpus))
    free = ablation(size, gpus, every)
    if free is None:
        return None
    divided = ablation(
        size, gpus, [layout for layout in every if min(layout.grid.tp, layout.grid.pp) > 1]
    )
    merak, other = best(size, gpus, [MERAK, MERAK | {"pipeline_schedule": "1f1b"}], every)
    candidates = list(dict.fromkeys([*fastest(size, gpus, 3), free.layout, other]))
    plan, layout = best(size, gpus, [*OURS, SEARCHED], candidates)
    fair, _ = best(size, gpus, [FAIR], every)
    return Row(
        size=name,
        gpus=gpus,
        free=free,
        divided=divided,
        fair=seconds(fair),
        merak=seconds(merak),
        ours=seconds(plan),
        layout=layout,
        plan=plan,
    )


TEXT = """# Merak's paper, modelled

This page models the experiments of Merak's paper: its three techniques one by one, all together, and the best plan
that this library finds. **Every number is modelled**: the planner's cost table prices plans of the GPT of flags. No GPU
was involved.

- **Cluster**: {gpus} RTX 3090s, {ranks} per node over PCIe 4.0 ({inside:.0f} GB/s per direction), nodes over 100
  Gbit/s Ethernet ({between:.0f} GB/s). 16-bit matrix products reach {efficiency:.0%} of {flops:.0f} TFLOP/s. The
  model may use {memory:.0f} of 24 GiB.
- **Work**: sequences of {sequence} tokens, {batch} samples per step, 16-bit weights with fp32 master weights and
  gradients. The paper's batch sizes, degrees and cluster are not public in what we could read, so these are ours.
- ***Base***: Megatron-LM's way, that is 1F1B, every layer recomputed and blocking tensor-parallel collectives, on the
  layout (degrees and micro-batch) that is fastest for it.
- **Techniques**: each one alone, and the three together, run on **the same layout**; numbers are speed-ups over the
  base.
- ***Merak*** and ***ours*** choose their own layouts. *Ours* chooses among all schedules (including a searched one),
  recomputes as few units as fit, with rebalanced stages, and overlaps as the cost model says.
- ***Fair base***: the base with weight gradients overlapping the collectives of the backward, which costs nothing.
- **Published**: the paper reports measured speed-ups of **up to** {published} over the best of Megatron-LM and
  DeepSpeed on up to 64 GPUs.

## Complete runs

{whole}

{best}

## The techniques one by one, on the base's best layout

{free}

## With tensor and pipeline parallelism

The third technique needs tensor parallelism. Over PCIe this cost model avoids it wherever memory allows, so this
table requires it.

{divided}

## Where the schedule and stage-aware recomputation cross

{crossing}

Regenerate: `python -m benchmarks paper --write`
"""


def factor(base: float, other: float) -> str:
    return "not defined" if other == float("inf") else f"{base / other:.2f}x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def whole(rows: Sequence[Row]) -> str:
    head = ["model", "GPUs", "base layout", "base step (modelled)", "Merak", "ours", "ours over Merak",
            "ours over fair base", "our plan"]  # fmt: skip
    cells = []
    for one in rows:
        base, again = one.free.base, sum(len(stage.recompute) for stage in one.plan.stages)
        how = f"{one.layout}, {one.plan.schedule.name}, {one.plan.overlap}, recomputes {again} of {len(one.plan.units)}"
        gains = [factor(base, one.merak), factor(base, one.ours), factor(one.merak, one.ours)]
        cells.append([one.size, str(one.gpus), str(one.free.layout), f"{base:.2f} s", *gains,
                      factor(one.fair, one.ours), how])  # fmt: skip
    return table(head, cells)


def ablations(rows: Sequence[Row], found: Sequence[Ablation | None]) -> str:
    cells = []
    for one, each in zip(rows, found, strict=True):
        if each is None:
            cells.append([one.size, str(one.gpus), "does not fit", *[""] * (len(TECHNIQUES) + 2)])
            continue
        gains = [factor(each.base, value) for value in (*each.alone.values(), each.merak)]
        cells.append([one.size, str(one.gpus), str(each.layout), f"{each.base:.2f} s", *gains])
    return table(
        ["model", "GPUs", "layout", "base step (modelled)", *TECHNIQUES, "all three"], cells
    )


def largest(rows: Sequence[Row]) -> str:
    head = [
        "model",
        "published, up to",
        "Merak's techniques here, up to",
        "ours here, up to",
        "ours over fair base",
    ]
    cells = []
    for name, size in SIZES.items():
        mine = [one for one in rows if one.size == name]
        if mine:
            merak, ours = (
                max(one.free.base / getattr(one, who) for one in mine) for who in ("merak", "ours")
            )
            fair = median(one.fair / one.ours for one in mine)
            cells.append(
                [
                    name,
                    f"{size.published:.2f}x",
                    f"{merak:.2f}x",
                    f"{ours:.2f}x",
                    f"{fair:.2f}x (median)",
                ]
            )
    return table(head, cells)


def page(rows: Sequence[Row]) -> str:
    cluster = find_cluster(CLUSTER)
    device = cluster.device
    return TEXT.format(
        gpus=" to ".join(map(str, (GPUS[0], GPUS[-1]))),
        ranks=cluster.ranks_per_node,
        inside=cluster.inside.bandwidth / 1e9,
        between=cluster.between.bandwidth / 1e9,
        flops=device.flops(DTYPE) / 1e12,
        efficiency=device.matmul_efficiency,
        memory=MEMORY_GB,
        sequence=SEQUENCE,
        batch=GLOBAL_BATCH,
        published=", ".join(f"{size.published:.2f}x ({name})" for name, size in SIZES.items()),
        whole=whole(rows),
        best=largest(rows),
        free=ablations(rows, [one.free for one in rows]),
        divided=ablations(rows, [one.divided for one in rows]),
        crossing=crossing.section(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models [all]"
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        type=int,
        default=list(GPUS),
        metavar="N",
        help="numbers of GPUs [8 to 64]",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes [2]")
    parser.add_argument(
        "--write", action="store_true", help="write docs/evidence/paper.md; else print"
    )
    chosen = parser.parse_args()
    cases = [(name, gpus) for name in chosen.sizes for gpus in chosen.gpus]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        found = list(
            tqdm(
                pool.map(row, *zip(*cases, strict=True)),
                total=len(cases),
                desc="modelled",
                unit="case",
            )
        )
    text = page([one for one in found if one is not None])
    if chosen.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    print(text)
