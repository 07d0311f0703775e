"""How a pretraining job is opened, whichever command asks for it.

    ranks meet > with --preflight they measure hosts and links > files are checked > the tokenizer,
    and the model without memory > what --load holds is checked > with --parallel auto a search >
    the model is captured > its plan, made or stored > groups of the plan's grid > data > the model
    on this rank, with its optimizer > the loop

What comes late takes the numbers of what came before: the plan's are the only ones from then on.
With --parallel-verify all after the search is done for each plan that is tried, some steps instead
of the loop, and then once more for the one that is fastest.
"""

import dataclasses
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from ..cluster import Cluster
from ..config import RunConfig, flag_name
from ..config.run import Run
from ..data.build import Datasets, build_datasets, check_files, check_tokenizer
from ..data.tokenizer import Tokenizer
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import Mesh
from ..parallel.nodes import located
from ..parallel.ranks import Ranks
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..plan import Plan
from ..planner.search import Choice
from ..stages.devices import cluster_of
from ..stages.optimizer_state import OptimizerOf
from ..stages.trained_model import TrainedModel
from .console import print_fitted
from .job import Job, opening, throughput
from .meeting import meeting
from .outputs import check_outputs
from .report import Report
from .run_record import files_of
from .searched import applied, notes_of, searched
from .strategy import ALONE, Strategy
from .trainer import Trainer
from .verified import Expected, fastest

Settings = TypeVar("Settings", bound=RunConfig, contravariant=True)


class Planned(Protocol):
    """A model with its plan, before any rank has a part of it."""

    @property
    def plan(self) -> Plan: ...

    def build(self, mesh: Mesh, optimizer_of: OptimizerOf) -> TrainedModel:
        """Return this rank's part of the model, with its optimizer. Collective."""

    def job(self, trainer: Trainer, datasets: Datasets) -> Job:
        """Return the loop around the trainer of that model."""


class Planning(Protocol[Settings]):
    """Captures a model where that is needed, and makes its plan for a cluster, or reads it.
    Collective over ranks.
    """

    def __call__(
        self, config: Settings, ranks: Ranks, cluster: Cluster, again: bool = False
    ) -> Planned:
        """config: all settings that the plan is made of.
        again:  whether there will be another call, which must find nothing changed.
        """


# Settings that may name a file, of which hosts may have copies of their own.
_FILES = (
    "--plan",
    "--schedule-file",
    "--emulate",
    "--tensor-parallel-rules",
    "--device-profile",
    "--data-args-path",
    "--per-split-data-args-path",
)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings of all sections by their flags."""
    return {
        flag_name(name): value
        for section in config.to_dict().values()
        for name, value in section.items()
    }


def open_session(config: RunConfig, world: World, strategy: Strategy = ALONE) -> Ranks:
    """Return the ranks of a job, which have met and agree on its settings, once what they read and
    write was looked at: nothing here needs a model, and takes as long as one does.

    Raises a MerakError on every rank alike.
    """
    settings = settings_of(config)
    ranks = meeting(
        world,
        timedelta(minutes=config.parallel.distributed_timeout_minutes),
        settings,
        {name: path for name in _FILES if (path := settings.get(name))},
        remedy="Start all ranks with the same arguments and --config file",
        say=partial(print, flush=True),
        preflight=(config.checkpoint.save or "") if config.parallel.preflight else None,
    )
    with together(ranks.control, "cpu"):
        check_outputs(config, world.is_last)
        strategy.check_outputs()
        check_files(config)
        check_tokenizer(config)
    return ranks


def run_session(
    planning: Planning[Run],
    config: Run,
    as_passed: RunConfig,
    world: World,
    ranks: Ranks,
    tokenizer: Tokenizer,
    notices: tuple[str, ...] = (),
    strategy: Strategy = ALONE,
) -> None:
    """Open a job on this rank and run it.

    config:    with everything that data and model decide, except for what is to be searched.
    as_passed: before that was filled in.
    ranks:     see `open_session`.
    notices:   further lines for the first rank to print at the start.
    strategy:  what the job is to others that train the same model.

    Raises a MerakError on every rank alike, before training where that can be known.
    """
    with together(ranks.control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), ranks.nodes)
    notes: tuple[str, ...] = ()
    if config.parallel.parallel is not None:
        config, notes = _searched(planning, config, ranks, cluster, tokenizer)
    planned = planning(config, ranks, cluster)
    plan = planned.plan
    mesh = strategy.mesh(_mesh_of(plan, ranks))
    prints = world.rank == 0 and mesh.replica == 0
    if prints:
        print_fitted(
            opening(
                config,
                plan,
                world,
                ranks.nodes,
                notes=(*notices, *notes),
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


def _mesh_of(plan: Plan, ranks: Ranks) -> Mesh:
    return ranks.mesh(
        plan.grid,
        plan.sharding_instances,
        plan.expert_group,
        plan.expert_shards,
        cp_inner=plan.cp_inner,
    )


def _searched(
    planning: Planning[Run], config: Run, ranks: Ranks, cluster: Cluster, tokenizer: Tokenizer
) -> tuple[Run, tuple[str, ...]]:
    """Return the settings with those that --parallel auto finds, and notes on them.

    With --parallel-verify they are those of the plan that is fastest here. Raises a MerakError on
    every rank where no plan fits, or none runs.
    """
    size = ranks.world.size
    wanted = config.parallel.parallel_verify
    with (
        SearchProgress(SEARCHING, shown=ranks.rank == 0) as progress,
        together(ranks.control, "cpu"),
    ):
        result = searched(config, size, cluster, progress, wanted=wanted or 1)
        best = result.best
        assert best is not None, "else it is an error"
        found = applied(config, best.choice)
        found.validate(size)
    if wanted is None:
        return found, notes_of(config, best.choice, result)

    def trial(choice: Choice, inside: Ranks, count: int) -> list[float]:
        tried = _unreported(applied(config, choice))
        tried.validate(size)
        planned = planning(tried, inside, cluster, again=True)
        mesh = _mesh_of(planned.plan, inside)
        with together(mesh.control, "cpu"):
            datasets = build_datasets(tried, tokenizer, mesh.replicas)
        model = planned.build(mesh, ALONE.optimizer_of(tried))
        return planned.job(Trainer(tried, model), datasets).timed_steps(count)

    candidates = [Expected(each.choice, each.seconds) for each in result.first(wanted)]
    say = partial(print, flush=True) if ranks.rank == 0 else lambda line: None
    graph_warm_up = config.parallel.graph_warm_up
    choice = fastest(candidates, wanted, ranks, trial, say, graph_warm_up=graph_warm_up).choice
    return applied(config, choice), notes_of(config, choice, result)


def _unreported(config: Run) -> Run:
    """Return the settings without what a run writes, and resumes from."""
    checkpoint = type(config.checkpoint)()
    logging = type(config.logging)()
    return dataclasses.replace(config, checkpoint=checkpoint, logging=logging)


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
