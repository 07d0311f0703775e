"""1F1B for stages that recompute: some recomputations are ops of their own, run while a stage waits
for a gradient.

The figures have forward = 1, backward = 2 and recomputation = 1 units of time, the latter on its
own (R) or inside B, which is then one unit longer. The last stage, whose backward follows its
forward at once, keeps its activations.
"""

from collections.abc import Collection, Sequence

from megatron_merak.pipeline_parallel.builders.assemble import Step, alternate, one_stage_per_rank
from megatron_merak.pipeline_parallel.ops import Kind, Schedule


def early_recompute(stages: int, microbatches: int) -> Schedule:
    """1F1B whose stages recompute before they wait: once before the steady state, and all through
    the drain.

    With the costs of the figure 4 (m + S - 1) - (S + 1), which no other choice of R in this order
    betters; 1F1B takes S - 1 longer. Stage s holds min(S - s, m) micro-batches, as there, one of
    them recomputed while it waits.

    rank 0 | F0 F1 F2 F3 R0 .  .  .  .  .  B0--- R1 .  .  B1--- R2 B2--- R3 B3---
    rank 1 | .  F0 F1 F2 R0 .  .  .  B0--- F3 .  B1------ R2 B2--- R3 B3--- .  .
    rank 2 | .  .  F0 F1 R0 .  B0--- F2 B1------ F3 B2------ R3 B3--- .  .  .  .
    rank 3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- .  F3 B3--- .  .  .  .  .  .  .
    """
    orders = []
    for stage in range(stages):
        drain = stages - 1 - stage
        early = {0, *range(microbatches - drain, microbatches)} if drain else ()
        orders.append(_recompute_before(alternate(microbatches, stages - stage), early))
    return one_stage_per_rank("early-recompute", microbatches, orders)


def shifted(stages: int, microbatches: int) -> Schedule:
    """The shifted critical path of Merak. Time 4m + 3S - 6 with the costs of the figure, for m >= max(S, 4), S >= 2.

    Lai et al. (2023). As 1F1B, but stage S - 2 runs a forward ahead and recomputes two micro-batches while it waits for
    its first gradient; stage S - 3 recomputes one there; all stages up to that one recompute in the drain, before the
    gradient comes. Stage S - 2 holds 3 micro-batches, the others what they hold in 1F1B.

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0------ F4 B1------ F5 B2------ R3 B3--- R4 B4--- R5 B5---
    rank 1 | .  F0 F1 F2 R0 .  .  .  B0--- F3 B1------ F4 B2------ F5 B3------ R4 B4--- R5 B5--- .  .
    rank 2 | .  .  F0 F1 F2 R0 B0--- R1 B1--- F3 B2------ F4 B3------ F5 B4------ B5------ .  .  .  .
    rank 3 | .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  F4 B4--- .  F5 B5--- .  .  .  .  .  .  .
    """
    orders = []
    for stage in range(stages):
        order = alternate(microbatches, stages - stage)
        later = stages - 1 - stage
        drain = range(microbatches - later, microbatches)
        if later == 1:
            order[2], order[3] = order[3], order[2]  # F2 runs ahead of B0
        early = {0: (), 1: (0, 1), 2: (0, *drain)}.get(later, drain)
        orders.append(_recompute_before(order, early))
    return one_stage_per_rank("shifted", microbatches, orders)


def _recompute_before(order: Sequence[Step], early: Collection[int]) -> list[Step]:
    """The order with an R of its own right before the backwards of the micro-batches `early`."""
    steps = []
    for kind, k in order:
        if kind is Kind.B and k in early:
            steps.append((Kind.R, k))
        steps.append((kind, k))
    return steps
