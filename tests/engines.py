"""A model, ready to train on this rank in one call."""

import functools
from collections.abc import Sequence

from megatron_merak.config import Config, ModelConfig, TrainConfig
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.outputs import LossFunction
from megatron_merak.optimizer.base import StepResult
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid, Plan
from megatron_merak.stages.blueprint import Blueprint, blueprint_from_plan, make_blueprint
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.stages.optimizer_state import OptimizerOf, adamw_of
from megatron_merak.stages.traced import Batch, Traced, shapes_of
from megatron_merak.training.gpt_blueprint import by_formulas
from megatron_merak.training.trainer import Trainer
from tests.requests import request


def engine_of(
    model, example, mesh, *, plan=None, dtype="float32", autocast=False, others=None, **asked
) -> CapturedModel:
    """asked: see ``blueprint_of``, unless there is a ``plan``. others: keywords of
    ``CapturedModel``.
    """
    traced = Traced(model, example, dtype, autocast, ranks=mesh)
    blueprint = (
        blueprint_of(traced, mesh.grid, **asked)
        if plan is None
        else blueprint_from_plan(traced, plan)
    )
    return CapturedModel(blueprint, mesh, **(others or {}))


def blueprint_of(traced: Traced, grid: Grid, **asked) -> Blueprint:
    """asked: of a ``request``."""
    return make_blueprint(traced, request(grid, **{"graph_sharding": "cut"} | asked))


def step(model: CapturedModel, batches, rate: float, decay: float) -> StepResult:
    """One training step; parameters other than matrices do not decay."""
    return model.update([(rate, decay), (rate, 0.0)], model.backward(batches))


def gpt_model(
    config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of
) -> GPTModel:
    """The GPT that flags describe, by a plan of ``planner.plan``. What a process has captured of
    one shape it uses again.
    """
    train = config.train
    traced = _traced(config.model, train.micro_batch_size, train.dtype)
    return GPTModel(by_formulas(traced, config, plan), config, mesh, optimizer_of)


@functools.cache
def _traced(model: ModelConfig, micro_batch_size: int, dtype: str) -> Traced:
    train = TrainConfig(
        micro_batch_size=micro_batch_size, bf16=dtype == "bfloat16", fp16=dtype == "float16"
    )
    traced = traced_gpt(Config(model=model, train=train))
    capture = traced.capture
    found: dict[tuple, Captured] = {}

    def once(
        batch: Batch,
        training: bool,
        outputs: Sequence[str],
        compute: LossFunction | None = None,
    ) -> Captured:
        key = (shapes_of(batch), training, tuple(outputs), compute)
        if key not in found:
            found[key] = capture(batch, training, outputs, compute)
        return found[key]

    traced.capture = once
    return traced


def gpt_trainer(
    config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of
) -> Trainer:
    """The trainer of a run of that model."""
    return Trainer(config, gpt_model(config, plan, mesh, optimizer_of))


def gradient_step(trainer: Trainer, samples: Sequence[Batch]) -> float | None:
    """Compute the gradient of micro-batches of a GPT data set, and return their loss."""
    return trainer.model.gradients(trainer.model.from_samples(samples))
