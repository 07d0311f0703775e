"""The random pipelines on which ``auto`` is measured: one per seed, every combination of five
properties among them.
"""

from dataclasses import dataclass
from random import Random

from megatron_merak.pipeline_parallel.search.problem import MemoryLimits, Problem
from megatron_merak.pipeline_parallel.search.search import Found, search
from megatron_merak.pipeline_parallel.simulate import StageCosts


@dataclass(frozen=True)
class Instance:
    """A pipeline, in seconds: `uneven` stages, `slow` links, `recomputing`, `capped` memory, W of
    its own (`split`).
    """

    seed: int
    costs: StageCosts
    microbatches: int
    limits: MemoryLimits | None
    uneven: bool
    slow: bool
    recomputing: bool
    capped: bool
    split: bool

    @property
    def stages(self) -> int:
        return len(self.costs.forward)

    def search(self) -> Found:
        return search(self.costs, self.microbatches, limits=self.limits, split_weights=self.split)

    def problem(self) -> Problem:
        return Problem(self.costs, self.microbatches, self.limits, None, self.split)


def instance(seed: int) -> Instance:
    """Stages of 10 ms forward and 20 ms backward, or uneven: 5 to 15 ms, and 1.6 to 2.4 times as
    long.

    Links: 0.1 ms a message and 0.02 ms latency, or slow: 2 to 10 ms and 0 to 5 ms. Recomputation:
    all of the forward on
    every stage but the last, or none. A cap leaves room for the micro-batches of 1F1B and up to two
    more, and for one or two tapes, of four times what is kept of a micro-batch. Half of the
    backward is weight gradients.
    """
    draw = Random(seed)
    uneven, slow, recomputing, capped = (bool(seed >> bit & 1) for bit in range(4))
    split = seed // 16 % 3 == 0
    stages = draw.choice([2, 3, 4, 6, 8])
    microbatches = max(4, stages * draw.choice([1, 2, 4]))
    forward = tuple(0.01 * (draw.uniform(0.5, 1.5) if uneven else 1) for _ in range(stages))
    backward = tuple(value * (draw.uniform(1.6, 2.4) if uneven else 2) for value in forward)
    weight = tuple(value / 2 for value in backward)
    recompute = (*forward[:-1], 0.0) if recomputing else (0.0,) * stages
    transfer = tuple(draw.uniform(0.002, 0.01) if slow else 0.0001 for _ in range(stages - 1))
    latency = tuple(draw.uniform(0, 0.005) if slow else 0.00002 for _ in range(stages - 1))
    costs = StageCosts(forward, backward, weight, recompute, transfer=transfer, latency=latency)
    limits = _cap(draw, stages, recomputing) if capped else None
    return Instance(
        seed,
        costs,
        microbatches,
        limits,
        uneven=uneven,
        slow=slow,
        recomputing=recomputing,
        capped=capped,
        split=split,
    )


def _cap(draw: Random, stages: int, recomputing: bool) -> MemoryLimits:
    tapes = [4.0 if recomputing and stage < stages - 1 else 0.0 for stage in range(stages)]
    caps = [
        stages - stage + draw.choice([0, 1, 2]) + tape * draw.choice([1, 2])
        for stage, tape in enumerate(tapes)
    ]
    return MemoryLimits(tuple(caps), (1.0,) * stages, tuple(tapes), (0.5,) * stages)
