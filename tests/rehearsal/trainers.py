"""One rank's trainer, of the GPT of flags or of any model, on a GPU that only pretends; its peers do not exist."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_merak.config import OptimizerConfig, ParallelConfig
from megatron_merak.parallel.mesh import AXES, USES, Mesh, new_groups
from megatron_merak.plan import Grid
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.training.trainer import Trainer
from tests.engines import engine_of, gpt_trainer, step
from tests.parity.batches import replica_batch
from tests.parity.cases import MICRO_BATCH, Case

from .device import DEVICE

LAYERS = 2


@contextmanager
def mesh_of(grid: Grid, rank: int) -> Iterator[Mesh]:
    """The mesh of one rank whose collectives move nothing."""
    if grid.size == 1:
        yield Mesh(grid, rank, DEVICE)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
    try:
        tp, dp, pp, model = (
            new_groups(rank, grid.groups(axes), None, use)
            for axes, use in zip(AXES, USES, strict=True)
        )
        yield Mesh(grid, rank, DEVICE, tp=tp, dp=dp, pp=pp, model=model)
    finally:
        dist.destroy_process_group()


def gpt(case: Case, micro_batches: int, mesh: Mesh) -> tuple[Trainer, list[Mapping]]:
    """A trainer of a model of two layers, and its micro-batches of one step."""
    config = case.config()
    train = replace(config.train, global_batch_size=micro_batches * MICRO_BATCH * case.dp)
    config = replace(config, model=replace(config.model, num_layers=LAYERS), train=train)
    batches = replica_batch(case, 0, mesh.dp_rank)[:micro_batches]
    return gpt_trainer(config, make_plan(config, case.world), mesh), batches


def captured(
    model: nn.Module, batch: Mapping, mesh: Mesh, ways: Mapping | None = None, **settings
) -> tuple[CapturedModel, list[Mapping]]:
    """A trainer of any model, and two micro-batches. ways: fields of ParallelConfig beside the
    degrees.
    """
    degrees = {
        "tensor_model_parallel_size": mesh.grid.tp,
        "pipeline_model_parallel_size": mesh.grid.pp,
    }
    parallel = ParallelConfig(**degrees, **(ways or {}))
    others = {"optimizer": OptimizerConfig(clip_grad=1.0)}
    made = engine_of(
        model, batch, mesh, others=others, microbatches=2, parallel=parallel, **settings
    )
    return made, [batch, batch]


def steps(trainer: Trainer | CapturedModel, batches: Sequence[Mapping]) -> None:
    """One training step and one evaluation."""
    if isinstance(trainer, Trainer):
        trainer.step(batches)
        trainer.model.mean_loss(batches)
    else:
        step(trainer, batches, 1e-3, 0.1)
        trainer.evaluate(batches[:1], ("loss", "*"))
