"""1F1B that never waits for an update of the weights: PipeDream.

A step is one schedule, in which each stage updates its weights several times. The pipeline fills
once per step and drains once, at its end; in between there is no bubble. The figure is that of
1F1B.
"""

from dataclasses import replace

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders.plain import one_forward_one_backward
from megatron_merak.pipeline_parallel.ops import Schedule, Updates

INTERVAL = "--pipeline-update-interval"


def pipedream(stages: int, microbatches: int, every: int | None = None) -> Schedule:
    """1F1B that updates a stage after each of its backwards. Time (m + S - 1)(F + B), with m
    updates.

    Narayanan et al., PipeDream (2019). A micro-batch runs forwards and backwards with the weights
    that a stage has at its forward, so stage s keeps S - s versions of them. Its gradient is
    applied S - 1 - s updates later: the last stage has none of this delay, the first has most.
    """
    if every not in (None, 1):
        reason = "pipedream updates weights after every micro-batch"
        raise ScheduleError(INTERVAL, every, reason, "Leave it out, or use pipedream-2bw")
    delays = tuple(stages - 1 - stage for stage in range(stages))
    return _updating("pipedream", stages, microbatches, Updates(1, delays))


def pipedream_2bw(stages: int, microbatches: int, every: int | None = None) -> Schedule:
    """1F1B that updates a stage after the backwards of every ``every`` micro-batches (default: S).
    Time (m + S - 1)(F + B), with m / every updates.

    Narayanan et al., PipeDream-2BW (2021). All stages compute a micro-batch with the weights
    before the last update, so that each keeps two versions of them, and every gradient is applied
    one update later; those of the first update of a step are not.
    """
    every = stages if every is None else every
    if every < stages:
        reason = f"with two versions of the weights, {stages} stages need at least {stages}"
        raise ScheduleError(INTERVAL, every, reason, "Raise it, or use pipedream")
    if microbatches % every:
        reason = f"a step has {microbatches} micro-batches, which it does not divide"
        raise ScheduleError(INTERVAL, every, reason, "Change it, or the global batch size")
    return _updating("pipedream-2bw", stages, microbatches, Updates(every, (1,) * stages))


def _updating(name: str, stages: int, microbatches: int, updates: Updates) -> Schedule:
    order = one_forward_one_backward(stages, microbatches)
    return replace(order, name=name, updates=updates)
