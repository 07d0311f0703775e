"""What ranks of a layer send in a step, counted call by call, is what the units of their plan say: to
the byte.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import product
from math import ceil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_merak.config import ParallelConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.plan import Grid
from megatron_merak.runtime import engine
from megatron_merak.segment import Collective
from tests.engines import engine_of
from tests.graph.tiny import randomise, tiny
from tests.ranks import run_ranks

REDUCE, STACK, GATHER, SCATTER, EXCHANGE, ROWS, ROTATE, BACK = (
    Collective.ALL_REDUCE,
    Collective.STACK,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.EXCHANGE,
    Collective.ROWS,
    Collective.ROTATE,
    Collective.ROTATE_BACK,
)
CALLED = {
    REDUCE: "allreduce_",
    STACK: "_allgather_base_",
    GATHER: "_allgather_base_",
    SCATTER: "_reduce_scatter_base_",
    EXCHANGE: "alltoall_base_",
    ROWS: "alltoall_base_",
    ROTATE: "alltoall_base_",
    BACK: "alltoall_base_",
}
ROUND = (ROTATE, BACK)  # one of the steps of an all-reduce in a ring


class Sent(TorchDispatchMode):
    """Counts what a rank of a layer sends while its segments run.

    Attributes:
    calls: (unit, whether in a backward) -> (kind, ranks, bytes that enter, bytes that leave) of each
           call.
    """

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(list)
        self._step = self._kind = self._ranks = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and self._step is not None:
            name = func.overloadpacket.__name__
            assert name == CALLED[self._kind]
            given = [*args, *(x for each in args if isinstance(each, list) for x in each)]
            tensors = [x for x in given if isinstance(x, Tensor)]
            sizes = tensors[-1].nbytes, tensors[0].nbytes
            self.calls[self._step].append((self._kind, self._ranks, *sizes))
        return func(*args, **(kwargs or {}))

    def perform(self, perform, own, state, step, *rest):
        self._step = (step[1].unit, step[0] is Kind.B)
        perform(own, state, step, *rest)
        self._step = None

    def launch(self, launch, tensor, kind, group, *rest):
        self._kind, self._ranks = kind, dist.get_world_size(group)
        return launch(tensor, kind, group, *rest)

    def exchange_rows(self, exchange_rows, rows, counts, group):
        self._kind, self._ranks = ROWS, dist.get_world_size(group)
        return exchange_rows(rows, counts, group)

    def step(self, model, batch):
        """Run a step of a model."""
        perform = engine.Interpreter.perform
        launch, exchange_rows = engine.launch, engine.exchange_rows
        with (
            mock.patch.object(
                engine.Interpreter, "perform", partialmethod(_swapped, self.perform, perform)
            ),
            mock.patch.object(engine, "launch", partial(self.launch, launch)),
            mock.patch.object(engine, "exchange_rows", partial(self.exchange_rows, exchange_rows)),
            self,
        ):
            model.gradients([batch])


def _swapped(own, noted, perform, *rest):
    return noted(perform, own, *rest)


@dataclass(frozen=True)
class Layout:
    """A layout of ranks of a layer, and how many calls of each kind (forwards and recomputations,
    backwards) have.
    """

    name: str
    grid: Grid
    ways: dict
    forward: dict
    backward: dict


def rank_of(rank, layout):
    """What this rank sends, and its plan."""
    real, _, example = tiny(layout.name)
    experts = layout.ways.get("expert_model_parallel_size", 1)
    parallel = ParallelConfig(
        tensor_model_parallel_size=layout.grid.tp,
        context_parallel_size=layout.grid.cp,
        **layout.ways,
    )
    cpu = torch.device("cpu")
    mesh = build_mesh(layout.grid, rank, cpu, expert_group=experts, cp_inner=parallel.cp_inner)
    model = engine_of(randomise(real()), example, mesh, parallel=parallel, microbatches=1)
    sent = Sent()
    sent.step(model, example)
    return dict(sent.calls), model.plan


def ranks_of(rank, world_size, layouts):
    return [rank_of(rank, layout) for layout in layouts]


SEQUENCE = {"sequence_parallel": True}
GATHERS = {"cp_comm_type": "all_gather"}
RING = {"cp_comm_type": "p2p"}
BOTH = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": ("2", "2")}
AGAIN = {"recompute_granularity": "full"}
EXPERTS = {"expert_model_parallel_size": 2}
ROOM = {"moe_expert_rank_capacity_factor": 2.0}
TWO = [
    Layout("llama", Grid(tp=2), {}, {REDUCE: 5, STACK: 1}, {REDUCE: 5}),
    Layout(
        "llama",
        Grid(tp=2),
        SEQUENCE,
        {GATHER: 5, SCATTER: 5, STACK: 1},
        {GATHER: 10, SCATTER: 5},
    ),
    Layout("llama", Grid(cp=2), {}, {EXCHANGE: 8, REDUCE: 1}, {EXCHANGE: 8}),
    Layout("llama", Grid(cp=2), GATHERS, {GATHER: 4, REDUCE: 1}, {GATHER: 4, SCATTER: 4}),
    # what a recomputation has gathered a backward does not gather again
    Layout("llama", Grid(cp=2), GATHERS | AGAIN, {GATHER: 8, REDUCE: 1}, {SCATTER: 4}),
    Layout("mixtral", Grid(dp=2), EXPERTS, {EXCHANGE: 2, ROWS: 6}, {ROWS: 6}),
    Layout("mixtral", Grid(dp=2), EXPERTS | ROOM, {EXCHANGE: 8}, {EXCHANGE: 6}),
]
FOUR = [
    Layout(
        "llama", Grid(tp=2, cp=2), {}, {REDUCE: 6, STACK: 1, EXCHANGE: 8}, {REDUCE: 5, EXCHANGE: 8}
    ),
    Layout(
        "llama",
        Grid(tp=2, cp=2),
        SEQUENCE | GATHERS,
        {GATHER: 9, SCATTER: 5, STACK: 1, REDUCE: 1},
        {GATHER: 14, SCATTER: 9},
    ),
    Layout("llama", Grid(cp=4), RING, {ROTATE: 6, REDUCE: 1}, {BACK: 12}),
    Layout("llama", Grid(cp=4), BOTH, {EXCHANGE: 6, ROTATE: 2, REDUCE: 1}, {EXCHANGE: 6, BACK: 4}),
]


def kinds(found, backward):
    """How many calls of each kind in one direction of all units."""
    return Counter(
        kind for (_, side), each in found.items() if side == backward for kind, *_ in each
    )


def cost(kind, ranks, size):
    """How many all-reduces cost as much as a call, and the bytes of one that sends as much."""
    if kind in ROUND:
        steps = 2 * (ranks - 1)
        return 1 / steps, size * ranks // steps
    if kind is REDUCE:
        return 1, size
    return (1 if kind is STACK else 0.5), size // 2


def equivalent(calls):
    """The same of several calls."""
    costs = [cost(kind, ranks, max(sizes)) for kind, ranks, *sizes in calls]
    return ceil(sum(count for count, _ in costs)), sum(size for _, size in costs)


def level(calls, *kinds):
    """(number, bytes) of the calls of some kinds of the two ranks of a level."""
    sizes = [max(sizes) for kind, ranks, *sizes in calls if ranks == 2 and kind in kinds]
    return len(sizes), sum(sizes)


def planned(unit, again, backward):
    """The same by a plan. again: whether the unit is recomputed."""
    count, size = unit.reduces[backward], unit.reduced_bytes[backward]
    if not again:
        return count, size
    left = unit.regathered_bytes[0]
    return (count - (left > 0), size - left) if backward else (2 * count, 2 * size)


@pytest.mark.parametrize(
    "layouts", [TWO, pytest.param(FOUR, marks=pytest.mark.long)], ids=["2", "4"]
)
def test_ranks_send_what_their_plan_says(layouts):
    world = layouts[0].grid.size
    ranks = run_ranks(ranks_of, world, layouts, timeout=300)
    for layout, *of_ranks in zip(layouts, *ranks, strict=True):
        for found, _ in of_ranks:
            assert (kinds(found, False), kinds(found, True)) == (layout.forward, layout.backward)
        plan = of_ranks[0][1]
        for (index, unit), backward in product(enumerate(plan.units), (False, True)):
            calls = [found.get((index, backward), []) for found, _ in of_ranks]
            if unit.routed_bytes[0]:  # how many a rank gets follows from the batch
                entering = sum(given for each in calls for _, _, given, _ in each)
                assert entering == world * unit.routed_bytes[backward]
                continue
            if unit.cp_inner > 1:
                expected = (unit.inner_sent[backward], unit.outer_sent[backward])
                pairs = [(level(each, EXCHANGE), level(each, *ROUND)) for each in calls]
                assert pairs == [expected] * world
                calls = [[call for call in each if call[1] != 2] for each in calls]
            expected = planned(unit, index in plan.stages[0].recompute, backward)
            assert [equivalent(each) for each in calls] == [expected] * world
