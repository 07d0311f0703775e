"""Schedules that no builder makes: drawn at random, and those that torch.distributed.pipelining
writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from megatron_merak.pipeline_parallel.ops import Entry, Kind, Op, Schedule
from megatron_merak.pipeline_parallel.order import needs

F, R, B, W = Kind.F, Kind.R, Kind.B, Kind.W


def dump(
    path: Path, name: str, ranks: int, microbatches: int, chunks: int, how: str = "compute_only"
) -> Path:
    """What torch's schedule of this name writes by itself."""
    stages = [
        SimpleNamespace(
            stage_index=chunk,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    getattr(schedules, name)(stages, microbatches)._dump_csv(path, format=how)
    return path


def drawn(
    seed: int,
    placement: Sequence[int],
    microbatches: int,
    split: float = 0,
    early: float = 0,
    paired: float = 0,
) -> Schedule:
    """Any order that can run.

    split, early, paired: the share of backwards with a W, of those with an R, and of forwards that
    a backward joins,
    where one is ready.
    """
    random = Random(seed)
    every = [(stage, number) for stage in range(len(placement)) for number in range(microbatches)]
    steps = {
        kind: {place for place in every if random.random() < share}
        for kind, share in ((W, split), (R, early))
    }
    queues = {(stage, kind): [] for stage in range(len(placement)) for kind in (F, R, B, W)}
    for stage, number in every:
        for kind in (F, R, B, W):
            if (stage, number) in steps.get(kind, every):
                queues[stage, kind].append(Op(stage, kind, number))
    order = Schedule(
        "drawn", len(placement), microbatches, ((),) * (max(placement) + 1), tuple(placement)
    )
    programs: list[list[Entry]] = [[] for _ in order.ranks]
    done: set[Op] = set()

    def ready(op: Op) -> bool:
        before = [*needs(order, op)]
        if op.kind is B:
            before += [Op(op.stage, R, op.microbatch)] * ((op.stage, op.microbatch) in steps[R])
            if (op.stage, op.microbatch) not in steps[W]:
                before += [
                    Op(op.stage, W, m) for m in range(op.microbatch) if (op.stage, m) in steps[W]
                ]
        return done.issuperset(before)

    while any(queues.values()):
        (stage, kind), queue = random.choice(
            [item for item in queues.items() if item[1] and ready(item[1][0])]
        )
        here = [
            q
            for (s, k), q in queues.items()
            if k is B and placement[s] == placement[stage] and q and ready(q[0])
        ]
        ops = [queue.pop(0)]
        if kind is F and here and random.random() < paired:
            ops.append(random.choice(here).pop(0))
        done.update(ops)
        programs[placement[stage]].append(ops[0] if len(ops) == 1 else tuple(ops))
    return replace(order, ranks=tuple(map(tuple, programs)))
