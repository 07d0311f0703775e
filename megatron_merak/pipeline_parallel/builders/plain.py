"""Schedules whose backward is one op: naive, GPipe and 1F1B."""

from megatron_merak.pipeline_parallel.builders.assemble import alternate, one_stage_per_rank
from megatron_merak.pipeline_parallel.ops import Kind, Schedule


def naive(stages: int, microbatches: int) -> Schedule:
    """One micro-batch at a time: one stage works, the others wait. Time m S (F + B); one
    micro-batch in flight.

    rank 0 | F0 .  .  .  .  .  .  B0--- F1 .  .  .  .  .  .  B1---
    rank 1 | .  F0 .  .  .  B0--- .  .  .  F1 .  .  .  B1--- .  .
    rank 2 | .  .  F0 B0--- .  .  .  .  .  .  F1 B1--- .  .  .  .
    """
    order = [(kind, k) for k in range(microbatches) for kind in (Kind.F, Kind.B)]
    return one_stage_per_rank("naive", microbatches, [order] * stages)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Time (m + S - 1)(F + B); all m micro-batches in flight on
    every stage.

    Huang et al., GPipe (2019). Backwards run in micro-batch order, so that gradients are summed as
    in one process.

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1 | .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2 | .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
    rank 3 | .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """
    order = [(kind, k) for kind in (Kind.F, Kind.B) for k in range(microbatches)]
    return one_stage_per_rank("gpipe", microbatches, [order] * stages)


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """Each stage alternates F and B once its pipe is full. Time (m + S - 1)(F + B); min(S - s, m)
    in flight on stage s.

    Narayanan et al., PipeDream-Flush (2021), as in Megatron-LM: stage s runs S - s forwards before
    its first backward.

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1 | .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .
    rank 2 | .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5--- .  .  .  .
    rank 3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .
    """
    orders = [alternate(microbatches, stages - stage) for stage in range(stages)]
    return one_stage_per_rank("1f1b", microbatches, orders)
