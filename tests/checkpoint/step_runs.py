"""Runs that write checkpoints and increments without a model: the gradient of step n is n everywhere."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_merak.checkpoint.directory import read_manifest
from megatron_merak.checkpoint.increment_writer import IncrementWriter
from megatron_merak.checkpoint.increments import RUN, PlacedTensor, StepRecord, read_gradient
from megatron_merak.checkpoint.recoverable import Recoverable, StepChain
from megatron_merak.checkpoint.save import save
from megatron_merak.checkpoint.shard import Shard

SHAPE = (6, 4)
NAMES = ("0123456789abcdef", "fedcba9876543210")


def checkpoint(root: Path, iteration: int, run: str | None = None) -> tuple[int, str]:
    """Save a checkpoint whose values are its iteration; return iteration and save_id."""
    full = torch.full(SHAPE, iteration * 1.0)
    shards = {kind: [Shard("w", SHAPE, None, (), full)] for kind in ("model", "exp_avg")}
    path = save(root, iteration, shards, {} if run is None else {RUN: run}, None, "cpu")
    return iteration, read_manifest(path)[1].save_id


def record(iteration: int, skipped: bool = False) -> StepRecord:
    return StepRecord(
        iteration,
        4 * iteration,
        skipped_iterations=0,
        skipped_samples=0,
        optimizer_steps=iteration,
        loss_scale=None,
        square=None if skipped else 1.5,
        scaled=1.0,
        rates=[(0.1, 0.0)],
    )


def writer(
    root: Path,
    base: tuple[int, str],
    run: str = NAMES[0],
    group: dist.ProcessGroup | None = None,
    shape: tuple[int, int] = SHAPE,
) -> IncrementWriter:
    """Return what writes the steps of a run whose parameter has one tensor, transposed."""
    placed = PlacedTensor("w", shape, None, (), shape, (1, shape[0]), offset=0)
    return IncrementWriter(root, run, base, {"0/p": [placed]}, group)


def write_steps(
    steps: IncrementWriter,
    iterations: Sequence[int],
    rank: int = 0,
    world: int = 1,
    size: int = 24,
    skipped: Sequence[int] = (),
) -> Path:
    """Write steps, each rank its part, and complete the directory of them."""
    interval = (size * rank // world, size * (rank + 1) // world)
    for iteration in iterations:
        values = torch.full((interval[1] - interval[0],), iteration * 1.0)
        part = Shard("0/p", (size,), 0, (interval,), values)
        steps.write_step(iteration, [] if iteration in skipped else [part])
    return steps.seal([record(n, n in skipped) for n in iterations], {"iteration": iterations[-1]})


def check_gradients(
    root: Path, states: Recoverable, chain: StepChain, shape: tuple[int, int] = SHAPE
) -> None:
    """Compare the gradient of each step of a chain with what was written."""
    number = chain.checkpoint + 1
    for increment in states.increments(chain):
        for each in increment.records:
            if chain.checkpoint < each.iteration <= chain.last:
                assert each.iteration == number, "a gap"
                number += 1
                found = Shard("w", shape, None, (), torch.full(shape, -1.0))
                if each.square is not None:
                    read_gradient(increment, each.iteration, [found])
                    assert (found.tensor == each.iteration).all(), "torn"
    assert number == chain.last + 1


def best(root: Path, iteration: int | None = None) -> tuple[int, int, list[str]]:
    """Return checkpoint and last step of the best state, after a look at all it needs, and what is
    told.
    """
    states = Recoverable(root, None, iteration)
    chain = states.best()
    check_gradients(root, states, chain)
    return chain.checkpoint, chain.last, [*states.messages, *([chain.note] if chain.note else [])]
