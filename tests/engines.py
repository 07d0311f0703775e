"""A captured model, ready to train on this rank, in one call."""

from megatron_merak.stages.blueprint import draw, follow
from megatron_merak.stages.captured import CapturedTrainer
from megatron_merak.stages.traced import Traced


def engine_of(model, example, mesh, *, plan=None, dtype="float32", others=None, **wishes) -> CapturedTrainer:
    """wishes: of ``draw``, unless there is a ``plan``. others: keywords of ``CapturedTrainer``."""
    traced = Traced(model, example, dtype, mesh=mesh)
    blueprint = draw(traced, mesh.grid, **wishes) if plan is None else follow(traced, plan)
    return CapturedTrainer(blueprint, mesh, **(others or {}))
