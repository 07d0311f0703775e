"""A model, captured or native, ready to train on this rank in one call."""

from megatron_merak.config import Config
from megatron_merak.optimizer.base import StepResult
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid, Plan
from megatron_merak.stages.blueprint import Blueprint, blueprint_from_plan, make_blueprint
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.native_model import NativeModel
from megatron_merak.stages.optimizer_state import OptimizerOf, adamw_of
from megatron_merak.stages.traced import Traced
from megatron_merak.training.trainer import Trainer
from tests.requests import request


def engine_of(
    model, example, mesh, *, plan=None, dtype="float32", others=None, **asked
) -> CapturedModel:
    """asked: see ``blueprint_of``, unless there is a ``plan``. others: keywords of
    ``CapturedModel``.
    """
    traced = Traced(model, example, dtype, ranks=mesh)
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


def native_trainer(
    config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of
) -> Trainer:
    """The trainer of a run of the native model."""
    return Trainer(config, NativeModel(config, plan, mesh, optimizer_of))
