"""Common parts of builders: the order of 1F1B, and the conversion of stages' orders to a
Schedule.
"""

from collections.abc import Sequence

from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule

Step = tuple[Kind, int]
"""What a stage does next: a kind, and the micro-batch."""


def alternate(microbatches: int, ahead: int) -> list[Step]:
    """`ahead` forwards (or all of them), then alternating B and F, then the remaining backwards."""
    ahead = min(ahead, microbatches)
    order = [(Kind.F, k) for k in range(ahead)]
    for k in range(microbatches):
        order.append((Kind.B, k))
        if ahead + k < microbatches:
            order.append((Kind.F, ahead + k))
    return order


def one_stage_per_rank(name: str, microbatches: int, orders: Sequence[Sequence[Step]]) -> Schedule:
    """Return the schedule in which `orders[s]` lists the steps of stage s, on rank s."""
    ranks = tuple(
        tuple(Op(stage, kind, k) for kind, k in order) for stage, order in enumerate(orders)
    )
    return Schedule(name, len(orders), microbatches, ranks)
