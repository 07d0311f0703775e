"""A pretraining job of the native model from its configuration."""

import dataclasses

from ..cluster import Cluster
from ..config import Config
from ..data.build import Datasets, build_tokenizer, vocabulary
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import Mesh
from ..parallel.ranks import Ranks
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..plan import Plan
from ..plan.fit import check_chain
from ..planner import plan as make_plan
from ..planner.make import native_units
from ..planner.predict import priced
from ..stages.blueprint import Blueprint
from ..stages.gpt_model import GPTModel, traced_gpt
from ..stages.native import check_native_shardings, tensors
from ..stages.native_model import NativeModel
from ..stages.optimizer_state import OptimizerOf
from .hf_model import blueprint_of
from .job import Job
from .load_check import check_load
from .plan_file import plan_of
from .searched import resolved
from .session import Planned, open_session, run_session
from .strategy import ALONE, Strategy
from .trainer import Trainer


def pretrain(
    config: Config, world: World, notices: tuple[str, ...] = (), strategy: Strategy = ALONE
) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that
    can be known.

    notices:  further lines for the first rank to print at the start.
    strategy: --data-parallel-strategy.
    """
    if config.parallel.parallel is None:
        strategy.own(config).validate(world.size)
    ranks = open_session(config, world, strategy)
    with together(ranks.control, "cpu"):
        tokenizer = build_tokenizer(config)
        shape = dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer))
    complete = dataclasses.replace(config, model=shape)
    check_load(complete, None, ranks.control)

    def planning(ranks: Ranks, cluster: Cluster) -> Planned:
        with SearchProgress(SEARCHING, shown=ranks.rank == 0) as progress:
            with together(ranks.control, "cpu"):
                found, notices = resolved(complete, world.size, cluster, progress)
            own = strategy.own(found)
            if found.is_captured:
                traced = traced_gpt(found, ranks)
                with together(ranks.control, "cpu"):
                    blueprint = blueprint_of(traced, own, world.size, cluster, progress=progress)
                return PlannedGPT(found, blueprint, notices)
            with together(ranks.control, "cpu"):
                plan = _plan(own, ranks, cluster, progress)
            return PlannedNative(found, plan, notices)

    run_session(
        planning,
        complete,
        as_passed=config,
        world=world,
        ranks=ranks,
        tokenizer=tokenizer,
        notices=notices,
        strategy=strategy,
    )


@dataclasses.dataclass(frozen=True)
class PlannedNative:
    """The native model of a configuration, with its plan; a `Planned`."""

    config: Config
    plan: Plan
    notices: tuple[str, ...] = ()

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> NativeModel:
        return NativeModel(self.config, self.plan, mesh, optimizer_of)

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        return Job(trainer, datasets)


@dataclasses.dataclass(frozen=True)
class PlannedGPT:
    """The same model, captured, with its plan; a `Planned`."""

    config: Config
    blueprint: Blueprint
    notices: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        return self.blueprint.plan

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> GPTModel:
        return GPTModel(self.blueprint, self.config, mesh, optimizer_of)

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        return Job(trainer, datasets)


def _plan(config: Config, ranks: Ranks, cluster: Cluster, progress: SearchProgress) -> Plan:
    """Return the plan that ``--plan`` names, or one made for ``cluster``. Raises PlanError."""
    size = ranks.world.size
    stored = plan_of(config, size, cluster)
    if stored is not None:
        return followed(stored, config)
    return make_plan(config, size, cluster, tensors(config), report_progress=progress)


def followed(plan: Plan, config: Config) -> Plan:
    """Return a stored plan with new predictions. Raises PlanError if it is not for this model."""
    units = native_units(config, plan.grid.tp, plan.cluster)
    check_chain(plan, [unit.name for unit in units])
    table = tensors(config)
    # tools/plan.py leaves them out for the native model, which shards its tensors in one way
    if plan.shardings:
        check_native_shardings(plan.shardings, table)
    return priced(dataclasses.replace(plan, units=units, shardings=table))
