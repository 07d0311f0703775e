"""A pretraining job of the native model from its configuration: plan, build, run."""

import dataclasses
import datetime

from ..config import Config, of_worker
from ..data.build import build_datasets, build_tokenizer, vocabulary
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import build_mesh, control_group
from ..parallel.nodes import find_nodes, located
from ..parallel.same_software import check_same_software
from ..pipeline_parallel.search.progress import SEARCHING, Progress
from ..plan import Plan
from ..plan.fit import check_chain
from ..planner import plan as make_plan
from ..planner.make import native_units
from ..planner.predict import priced
from ..stages.devices import cluster_of
from ..stages.native import check_native_shardings, tensors
from ..stages.native_model import NativeModel
from ..stages.optimizer_state import OptimizerOf
from .console import print_fitted
from .job import Job, agree, opening
from .outputs import check_outputs
from .plan_file import plan_of
from .run_job import run_job
from .served import mesh_of_worker
from .trainer import Trainer


def pretrain(config: Config, world: World, notices: tuple[str, ...] = ()) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that can be known.

    notices: further lines for the first rank to print at the start.
    """
    role = world.role
    workers = 1 if world.role is None else world.role.workers
    of_worker(config, workers).validate(world.size)
    tokenizer = build_tokenizer(config)
    as_passed = config
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer))
    )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    control = control_group(world.size, timeout)
    check_same_software(control, world.device)
    agree(config, control)
    own = of_worker(config, workers)
    nodes = find_nodes(world, control)
    with together(control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), nodes)
        plan = plan_of(own, world.size, cluster)
        if plan is None:
            with Progress(SEARCHING, shown=world.rank == 0) as progress:
                plan = make_plan(own, world.size, cluster, tensors(config), progress)
        else:
            plan = followed(plan, config)
    mesh = build_mesh(
        plan.grid,
        world.rank,
        world.device,
        timeout=timeout,
        clock=world.clock,
        collectives=world.collectives,
        control=control,
        instances=plan.sharding_instances,
        pulse=world.pulse,
    )
    mesh = mesh if role is None else mesh_of_worker(mesh, config, role)
    if world.rank == 0 and mesh.worker == 0:
        print_fitted(opening(config, plan, world, nodes, notes=notices))
    with together(mesh.control, "cpu"):
        check_outputs(config, world.is_last)
        datasets = build_datasets(config, tokenizer, world.size if role is None else role.size)

    def make(optimizer_of: OptimizerOf) -> Job:
        return Job(Trainer(config, NativeModel(config, plan, mesh, optimizer_of)), datasets)

    run_job(make, config, world, as_passed)


def followed(plan: Plan, config: Config) -> Plan:
    """Return a stored plan with new predictions. Raises PlanError if it is not for this model."""
    units = native_units(config, plan.grid.tp, plan.cluster)
    check_chain(plan, [unit.name for unit in units])
    table = tensors(config)
    if plan.shardings:  # tools/plan.py leaves them out for the native model, which shards its tensors in one way
        check_native_shardings(plan.shardings, table)
    return priced(dataclasses.replace(plan, units=units, shardings=table))
