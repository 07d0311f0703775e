"""Replicas that shard inside groups of neighbours and have twins in the others: what one process
computes, and sums in a known order."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.engines import gradient_step
from tests.ranks import run_ranks

from .batches import replica_batch
from .cases import Case
from .compare import TOLERANCE, distance
from .reference import reference
from .rig import launch, mesh_of, new_trainer, parts, put_together

FOUR = Case("llama", dp=4, instances=2, micro_batch=1, steps=4)
QUICK = [replace(FOUR, sharding=sharding) for sharding in ("optim", "optim_grads_params")]
SLOW = [
    replace(FOUR, sharding="optim_grads"),
    replace(FOUR, sharding="optim", early=False, bucket=10**9, loss="per-token"),
    *(
        replace(FOUR, sharding=f"optim{rest}", dtype="bf16", family="qwen")
        for rest in ("", "_grads", "_grads_params")
    ),
    *(
        replace(FOUR, sharding=f"optim{rest}", dtype="fp16")
        for rest in ("", "_grads", "_grads_params")
    ),
    replace(
        FOUR,
        sharding="optim_grads_params",
        recompute="full",
        early=False,
        family="gpt2",
        loss="per-token",
    ),
    replace(FOUR, sharding="optim", tp=2, sequence_parallel=True),
    replace(FOUR, sharding="optim_grads_params", tp=2, sequence_parallel=True, recompute="full"),
    replace(FOUR, sharding="optim_grads", tp=2, family="gpt2"),
    replace(FOUR, sharding="optim", pp=2, family="gpt2", schedule="gpipe"),
    replace(FOUR, sharding="optim_grads_params", pp=2, family="gpt2", schedule="zb-h1"),
    replace(
        FOUR,
        sharding="optim_grads_params",
        pp=2,
        family="qwen",
        schedule="interleaved",
        dtype="bf16",
    ),
    replace(FOUR, sharding="optim_grads", pp=2, family="gpt2", schedule="zb-v"),
]


def check(cases):
    for case, outcomes in launch(cases).items():
        run = put_together(outcomes)
        found = distance(run, reference(case.family, case.dtype, case.loss, case.micro_batch))
        assert run.first_loss == run.curve[0] and found.within(TOLERANCE[case.dtype]), (
            f"{case}: {found}"
        )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_instances_of_two_replicas_equal_one_process():
    check(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_instances_equal_one_process_everywhere(case):
    check([case])


def gradient(case: Case, rank: int, alone: bool = False) -> dict[str, torch.Tensor]:
    """The gradient of a batch of one micro-batch for each replica; ``alone``: of that of this rank
    only.
    """
    mesh = mesh_of(case, rank)
    trainer = new_trainer(case, replace(mesh, dp=None) if alone else mesh)
    gradient_step(trainer, replica_batch(case, 1, mesh.dp_rank))
    buffer = trainer.model.buffer
    return {
        part.name: part.tensor
        for part in parts(trainer, trainer.model.gatherer.full(buffer.own_gradient()))
    }


def in_known_order(rank, world_size, cases):
    own, found = (
        gradient(replace(FOUR, instances=1), rank, alone=True),
        [gradient(case, rank) for case in cases],
    )
    unequal = []
    for name, mine in own.items():
        all_four = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(all_four, mine)
        a, b, c, d = all_four
        wanted = (a + b) + (c + d)
        unequal += [
            (str(case), name)
            for case, each in zip(cases, found, strict=True)
            if not wanted.equal(each[name])
        ]
        assert not a.equal(b) and not b.equal(c) and not c.equal(d)
    return unequal


@pytest.mark.timeout(120)
def test_gradients_are_sums_of_sums_to_the_bit():
    """Two addends have one order: in an instance, then over instances."""
    cases = [replace(FOUR, sharding=f"optim{rest}") for rest in ("", "_grads", "_grads_params")]
    assert run_ranks(in_known_order, 4, cases) == [[]] * 4
