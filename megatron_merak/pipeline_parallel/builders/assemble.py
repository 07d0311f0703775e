"""What all builders share: how the orders of stages become a Schedule."""

from collections.abc import Sequence

from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule

Step = tuple[Kind, int]
"""What a stage does next: a kind, and the micro-batch."""


def one_stage_per_rank(name: str, microbatches: int, orders: Sequence[Sequence[Step]]) -> Schedule:
    """`orders[s]` lists the steps of stage s, which lives on rank s."""
    ranks = tuple(tuple(Op(stage, kind, k) for kind, k in order) for stage, order in enumerate(orders))
    return Schedule(name, len(orders), microbatches, ranks)
