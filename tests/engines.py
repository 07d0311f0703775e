"""A captured model, ready to train on this rank, in one call."""

from megatron_merak.stages.blueprint import blueprint_from_plan, make_blueprint
from megatron_merak.stages.captured import CapturedTrainer
from megatron_merak.stages.traced import Traced


def engine_of(model, example, mesh, *, plan=None, dtype="float32", others=None, **wishes) -> CapturedTrainer:
    """wishes: of ``make_blueprint``, unless there is a ``plan``. others: keywords of ``CapturedTrainer``."""
    traced = Traced(model, example, dtype, mesh=mesh)
    blueprint = make_blueprint(traced, mesh.grid, **wishes) if plan is None else blueprint_from_plan(traced, plan)
    return CapturedTrainer(blueprint, mesh, **(others or {}))
