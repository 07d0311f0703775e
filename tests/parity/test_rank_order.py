"""Ranks laid over the axes in any order train the same model: losses, every gradient, every weight,
to the bit.
"""

import os
from dataclasses import dataclass
from math import isclose
from sys import float_info

import pytest
import torch

from megatron_merak.config import Config
from megatron_merak.parallel.mesh import Mesh, build_mesh
from megatron_merak.planner.request import request_of
from tests.choice import later
from tests.ranks import run_ranks

from .batches import replica_batch
from .cases import Case
from .rig import CPU, Outcome, Run, new_trainer, put_together, train


@dataclass(frozen=True)
class Ordered(Case):
    """order: see ``--rank-order``."""

    order: str = "tp-dp-pp"
    steps: int = 3

    def config(self) -> Config:
        plain = super().config()
        parallel = {**vars(plain.parallel), "rank_order": self.order}
        return Config(**{**vars(plain), "parallel": type(plain.parallel)(**parallel)})

    def mesh(self, rank: int) -> Mesh:
        return build_mesh(request_of(self.config(), self.world).grid, rank, CPU)


# Of each layout the orders that place its ranks in different ways. zb-v: the last stage is on the
# first pipeline rank.
LAYOUTS = [
    ({"tp": 2, "pp": 2, "schedule": "zb-v"}, ("tp-dp-pp", "pp-tp-dp")),
    ({"dp": 2, "pp": 2, "sharding": "optim_grads_params"}, ("tp-dp-pp", "tp-pp-dp")),
    ({"tp": 2, "dp": 2, "sharding": "optim", "dtype": "bf16"}, ("tp-dp-pp", "pp-dp-tp")),
]
ORDERED = [
    [Ordered("llama", order=order, **layout) for order in orders] for layout, orders in LAYOUTS
]
ALL = [
    Ordered("gpt2", tp=2, pp=2, dp=2, sharding="optim", order=order)
    for order in ("tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "dp-pp-tp", "pp-tp-dp", "pp-dp-tp")
]


def _train(rank: int, world_size: int, cases: list[Ordered]) -> list[Outcome]:
    return [train(case, case.mesh(rank)) for case in cases]


def _compared(cases: list[Ordered]) -> None:
    grids = [request_of(case.config(), case.world).grid for case in cases]
    assert len({tuple(map(grid.coordinates, range(grid.size))) for grid in grids}) == len(cases)
    outcomes = run_ranks(_train, cases[0].world, cases, timeout=250)
    first, *others = (put_together(each) for each in zip(*outcomes, strict=True))
    for case, other in zip(cases[1:], others, strict=True):
        _equal(first, other, case.order)


def _equal(one: Run, other: Run, order: str) -> None:
    assert one.curve == other.curve and len(set(one.curve)) == 3, order
    assert (one.evaluated, one.first_loss) == (other.evaluated, other.first_loss), order
    for norm, same in zip(one.norms, other.norms, strict=True):
        assert isclose(norm, same, rel_tol=4 * float_info.epsilon), (
            order
        )  # float64 sums of the ranks' parts, in the ranks' order
    for mine, theirs in ((one.gradients, other.gradients), (one.weights, other.weights)):
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]) and tensor.any(), f"{order}: {name}"


@pytest.mark.parametrize(
    "cases", [ORDERED[0], *map(later, ORDERED[1:])], ids=lambda cases: str(cases[0])
)
def test_an_order_changes_nothing_but_places(cases):
    _compared(cases)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_order_of_eight_ranks():
    _compared(ALL)


def _resume(
    rank: int, world_size: int, cases: list[Ordered], root: str
) -> list[list[float | None]]:
    """Save after two steps of the first case; then each case goes on from there."""
    saved = new_trainer(cases[0], cases[0].mesh(rank))
    for step in range(2):
        saved.step(replica_batch(cases[0], step, saved.mesh.dp_rank))
    saved.save(root)
    found = []
    for case in cases:
        trainer = new_trainer(case, case.mesh(rank))
        trainer.load(root)
        assert trainer.iteration == 2
        steps = [trainer.step(replica_batch(case, step, trainer.mesh.dp_rank)) for step in (2, 3)]
        found.append([step.loss for step in steps] + [steps[-1].grad_norm])
    return found


def test_a_checkpoint_of_one_order_resumes_under_another(tmp_path):
    ranks = run_ranks(_resume, 4, ORDERED[1], os.fspath(tmp_path), timeout=100)
    first, other = (
        [[value for value in values if value is not None][0] for values in zip(*each, strict=True)]
        for each in zip(*ranks, strict=True)
    )
    assert first == other and len(set(first)) == 3
