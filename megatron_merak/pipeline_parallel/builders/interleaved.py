"""Interleaved 1F1B: several stages per rank, so that the pipeline fills and drains in smaller
steps.
"""

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule


def interleaved(ranks: int, microbatches: int, chunks: int, group: int | None) -> Schedule:
    """1F1B over S ranks of v stages each. Time (m v + S - 1)(F + B)/v for a rank's F and B, where S
    divides m.

    Narayanan et al. (2021), in the order of Megatron-LM: stage s lives on rank s mod S; a rank runs
    a group of micro-batches on its first stage, the same on its next one, and so on, backwards
    likewise from its last stage. Its first backward comes after 2 (S - 1 - r) + (v - 1) group + 1
    forwards on rank r. Without a `group`: see ``default_group``; Megatron-LM's is S. The figure has
    S = 2, v = 2; small letters are the second stage of a rank.

    rank 0 | F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
    rank 1 | .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .
    """
    group = (
        default_group(ranks, microbatches) if group is None else _legal(group, ranks, microbatches)
    )
    starts = range(0, microbatches, group)
    order = [
        (c, k)
        for k0 in starts
        for c in range(chunks)
        for k in range(k0, min(k0 + group, microbatches))
    ]
    programs = []
    for rank in range(ranks):
        forwards = [Op(chunk * ranks + rank, Kind.F, k) for chunk, k in order]
        backwards = [Op((chunks - 1 - chunk) * ranks + rank, Kind.B, k) for chunk, k in order]
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * group, len(order))
        program = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            program += [forward, backward]
        programs.append((*program, *backwards[len(order) - ahead :]))
    return Schedule("interleaved", ranks * chunks, microbatches, tuple(programs))


def default_group(ranks: int, microbatches: int) -> int:
    """The smallest group of at least `ranks` micro-batches that leaves no rest, or one of at least
    `ranks`.

    With a smaller group or rest a rank waits for its own micro-batches to come around, or two ranks
    for each other; Megatron-LM refuses them too. Fewer micro-batches than ranks are one group.
    """
    sizes = range(ranks, microbatches)
    return next(
        (size for size in sizes if microbatches % size == 0 or microbatches % size >= ranks),
        microbatches,
    )


def _legal(group: int, ranks: int, microbatches: int) -> int:
    """Return `group`, unless ranks would wait for each other with it."""
    least = min(ranks, microbatches)
    rest = microbatches % group
    if least <= group <= microbatches and (rest == 0 or rest >= least):
        return group
    reason = (
        f"{microbatches} micro-batches on {ranks} ranks: a group, and a rest, are of "
        f"{least} to {microbatches}"
    )
    remedy = f"Use {default_group(ranks, microbatches)}, as when it is unset"
    raise ScheduleError("--microbatch-group-size-per-virtual-pipeline-stage", group, reason, remedy)
