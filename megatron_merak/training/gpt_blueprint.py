"""The plan of the GPT that flags describe, and its graph cut and sharded by it.

What its units cost follows from the flags by formulas, which need no capture; `merak-plan` prints
the same plan without PyTorch. Ranks that divide sequences, and weights that a stored plan shards
otherwise, are priced from the graph.
"""

import dataclasses

from ..cluster import Cluster
from ..config import Config
from ..plan import LAYERS, Plan
from ..plan.fit import check_chain
from ..planner import plan as make_plan
from ..planner.make import ProgressCallback, gpt_chain
from ..planner.predict import priced
from ..stages.blueprint import Blueprint, blueprint_from_plan, followed
from ..stages.gpt_model import tables_of
from ..stages.traced import Traced
from .hf_model import blueprint_of
from .plan_file import plan_of


def gpt_blueprint(
    traced: Traced,
    config: Config,
    world_size: int,
    cluster: Cluster,
    progress: ProgressCallback = lambda share: None,
    rank: int | None = None,
) -> Blueprint:
    """Return the plan that ``--plan`` names, or one made for ``cluster``, with the graph. Raises
    PlanError.

    rank:     see ``plan_of``.
    progress: see ``report_progress`` of ``plan``.
    """
    if config.is_priced_by_graph:
        return blueprint_of(traced, config, world_size, cluster, progress=progress, rank=rank)
    stored = plan_of(config, world_size, cluster, rank)
    if stored is None:
        plan = make_plan(config, world_size, cluster, report_progress=progress)
        return by_formulas(traced, config, plan)
    units = gpt_chain(config, stored.grid.tp, stored.cluster)
    check_chain(stored, [unit.name for unit in units])
    plan = dataclasses.replace(stored, units=units, graph_sharding=LAYERS)
    own = by_formulas(traced, config, priced(dataclasses.replace(plan, shardings=())))
    if not stored.shardings or {*stored.shardings} == {*own.plan.shardings}:
        return own
    multiple = config.model.make_vocab_size_divisible_by
    return blueprint_from_plan(traced, plan, vocabulary_multiple=multiple)


def by_formulas(traced: Traced, config: Config, plan: Plan) -> Blueprint:
    """Apply a plan that formulas priced, and that says nothing of weights, to the graph."""
    multiple = config.model.make_vocab_size_divisible_by
    pins = tables_of(traced, plan.grid.tp, multiple)
    return followed(traced, plan, pins, vocabulary_multiple=multiple)
