"""How a pretraining job is opened, whichever command asks for it.

    ranks meet > with --preflight they measure hosts and links > files are checked > the tokenizer,
    and the model without memory > what --load holds is checked > the model is captured > its plan,
    made or stored > groups of the plan's grid > data > the model on this rank, with its optimizer >
    the loop

What comes late takes the numbers of what came before: the plan's are the only ones from then on.
"""

from datetime import timedelta
from functools import partial
from typing import Protocol

from ..cluster import Cluster
from ..config import RunConfig
from ..data.build import Datasets, build_datasets, check_files, check_tokenizer
from ..data.tokenizer import Tokenizer
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import Mesh
from ..parallel.nodes import located
from ..parallel.ranks import Ranks, meet
from ..plan import Plan
from ..preflight.stage import passed
from ..stages.devices import cluster_of
from ..stages.optimizer_state import OptimizerOf
from ..stages.trained_model import TrainedModel
from .console import print_fitted
from .job import Job, agree, opening, throughput
from .outputs import check_outputs
from .report import Report
from .run_record import files_of
from .strategy import ALONE, Strategy
from .trainer import Trainer


class Planned(Protocol):
    """A model with its plan, before any rank has a part of it."""

    @property
    def config(self) -> RunConfig:
        """The settings of the job, with what the plan was searched for."""

    @property
    def plan(self) -> Plan: ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines on how the plan was found."""

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> TrainedModel:
        """Return this rank's part of the model, with its optimizer. Collective."""

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        """Return the loop around the trainer of that model."""


class Planning(Protocol):
    """Captures a model where that is needed, and makes its plan for a cluster, or reads it.
    Collective over ranks.
    """

    def __call__(self, ranks: Ranks, cluster: Cluster) -> Planned: ...


def open_session(config: RunConfig, world: World, strategy: Strategy = ALONE) -> Ranks:
    """Return the ranks of a job, which have met and agree on its settings, once what they read and
    write was looked at: nothing here needs a model, and takes as long as one does.

    Raises a MerakError on every rank alike.
    """
    ranks = meet(world, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    agree(config, ranks.control)
    if config.parallel.preflight:
        told = passed(ranks, config.checkpoint.save or "")
        if world.rank == 0:
            print(told, flush=True)
    with together(ranks.control, "cpu"):
        check_outputs(config, world.is_last)
        strategy.check_outputs()
        check_files(config)
        check_tokenizer(config)
    return ranks


def run_session(
    planning: Planning,
    config: RunConfig,
    as_passed: RunConfig,
    world: World,
    ranks: Ranks,
    tokenizer: Tokenizer,
    notices: tuple[str, ...] = (),
    strategy: Strategy = ALONE,
) -> None:
    """Open a job on this rank and run it.

    config:    with everything that data and model decide.
    as_passed: before that was filled in.
    ranks:     see `open_session`.
    notices:   further lines for the first rank to print at the start.
    strategy:  what the job is to others that train the same model.

    Raises a MerakError on every rank alike, before training where that can be known.
    """
    with together(ranks.control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), ranks.nodes)
    planned = planning(ranks, cluster)
    config = planned.config
    plan = planned.plan
    mesh = strategy.mesh(ranks.mesh(plan.grid, plan.sharding_instances, plan.expert_parallel))
    prints = world.rank == 0 and mesh.replica == 0
    if prints:
        print_fitted(
            opening(
                config,
                plan,
                world,
                ranks.nodes,
                notes=(*notices, *planned.notices),
                of_plan=strategy.note(),
            )
        )
    with together(mesh.control, "cpu"):
        datasets = build_datasets(config, tokenizer, mesh.replicas)
    model = planned.build(mesh, strategy.optimizer_of(config))
    if prints and model.notes:
        print_fitted("\n".join(model.notes) + "\n")
    job = planned.job(Trainer(config, model), datasets)
    job.settings = as_passed
    strategy.run(job, partial(_report, job, world))


def _report(job: Job, world: World) -> Report | None:
    """Return the report of a job on this rank; None unless it is the rank that prints."""
    if not world.is_last:
        return None
    flops = job.trainer.model.flops()
    of_sample = throughput(job.config, job.plan, world, flops, replicas=job.mesh.replicas)
    return Report(
        job.config.logging,
        of_sample,
        files=files_of(job.trainer, world, of_sample),
        settings=job.settings,
    )
