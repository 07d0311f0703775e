"""Ranks that drift apart during a job are told at the next comparison: weights, collectives and
samples.
"""

from contextlib import contextmanager

import pytest
import torch

from megatron_merak.errors import PlanError
from megatron_merak.runtime.executor import Executor
from megatron_merak.stages.replicas import Replicas
from tests.ranks import run_ranks
from tests.training.jobs import job


@contextmanager
def _harmed(harm):
    """Call ``harm(executor, step)`` after each run of a schedule."""
    run = Executor.run

    def harmed(self, batches, step, **others):
        result = run(self, batches, step, **others)
        harm(self, step)
        return result

    Executor.run = harmed
    try:
        yield
    finally:
        Executor.run = run


def _told(rank, world, flags):
    with pytest.raises(PlanError) as caught:
        job(
            rank,
            world,
            f"--train-iters 4 --check-weight-hash-across-dp-replicas-interval 2 {flags}",
        )
    return str(caught.value)


def _flipped(rank, world):
    def flip(executor, step):
        if (rank, step) == (0, 1):
            executor.stages[0].parameters.buffer.data[3:4].view(torch.int32).bitwise_xor_(1)

    with _harmed(flip):
        return _told(rank, world, "--global-batch-size 6")


def test_of_three_replicas_two_know_which_one_has_a_flipped_bit():
    told, *others = run_ranks(_flipped, 3, timeout=120.0)
    assert others == [told, told]
    assert "rank 0 has other weights than the same position of most replicas" in told


def _other_sequence(rank, world):
    def launch(executor, step):
        if (rank, step) == (1, 2):
            executor.stages[0].launched += 1

    flags = "--tensor-model-parallel-size 2"
    with _harmed(launch):
        sequence = _told(rank, world, flags)
    note = Replicas.note_samples

    def other(self, batches):
        note(self, [{"tokens": batch["tokens"] + rank} for batch in batches])

    Replicas.note_samples = other
    return sequence, _told(rank, world, flags)


def test_other_collectives_and_samples_of_a_rank_are_told():
    (sequence, samples), again = run_ranks(_other_sequence, 2, timeout=120.0)
    assert again == (sequence, samples)
    assert (
        "rank 1 has launched other collectives, or in another order, than the tensor-parallel ranks"
        in sequence
    )
    assert "in steps 3 to 4" in sequence
    assert (
        "rank 1 has read other samples than the ranks of the same replica, in steps 1 to 2"
        in samples
    )
