"""A pretraining job of the GPT that flags describe."""

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
from ..stages.blueprint import Blueprint
from ..stages.gpt_model import GPTModel, traced_gpt
from ..stages.optimizer_state import OptimizerOf
from .gpt_blueprint import gpt_blueprint
from .job import Job
from .load_check import check_load
from .session import open_session, run_session
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

    def planning(config: Config, ranks: Ranks, cluster: Cluster, again: bool = False) -> PlannedGPT:
        own = strategy.own(config)
        traced = traced_gpt(config, ranks)
        with (
            SearchProgress(SEARCHING, shown=ranks.rank == 0) as progress,
            together(ranks.control, "cpu"),
        ):
            blueprint = gpt_blueprint(
                traced, own, world.size, cluster, progress=progress, rank=ranks.rank
            )
        return PlannedGPT(config, blueprint)

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
class PlannedGPT:
    """The GPT of a configuration, captured, with its plan; a `Planned`."""

    config: Config
    blueprint: Blueprint

    @property
    def plan(self) -> Plan:
        return self.blueprint.plan

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> GPTModel:
        return GPTModel(self.blueprint, self.config, mesh, optimizer_of)

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        return Job(trainer, datasets)
