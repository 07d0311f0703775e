"""A pretraining job of the native model from its configuration: plan, build, run."""

import dataclasses
import datetime

from ..config import Config
from ..data.build import build_datasets, build_tokenizer, vocabulary
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import build_mesh, control_group
from ..parallel.nodes import find_nodes, located
from ..plan import Plan
from ..plan.fit import check_chain
from ..planner import plan as make_plan
from ..planner.cost import model_flops
from ..planner.make import native_units
from ..planner.predict import priced
from ..stages.devices import cluster_of
from ..stages.native import check_native_shardings, tensors
from .job import Job, agree, opening, throughput
from .outputs import check_outputs
from .plan_file import plan_of
from .report import Report
from .trainer import Trainer


def pretrain(config: Config, world: World, notices: tuple[str, ...] = ()) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that can be known.

    notices: further lines for the first rank to print at the start.
    """
    config.validate(world.size)
    tokenizer = build_tokenizer(config)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer))
    )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    control = control_group(world.size, timeout)
    agree(config, control)
    nodes = find_nodes(world, control)
    with together(control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), nodes)
        plan = plan_of(config, world.size, cluster)
        if plan is None:
            plan = make_plan(config, world.size, cluster, tensors(config))
        else:
            plan = followed(plan, config)
    mesh = build_mesh(plan.grid, world.rank, world.device, timeout, world.clock, world.collectives, control)
    if world.rank == 0:
        print(opening(config, plan, world, nodes, notices), flush=True)
    with together(mesh.control, "cpu"):
        check_outputs(config, world.is_last)
        datasets = build_datasets(config, tokenizer, world.size)
    report = None
    with together(mesh.control, "cpu"):
        if world.is_last:
            work = throughput(config, plan, world, model_flops(config.model, plan.global_batch_size))
            report = Report(config.logging, work)
    Job(Trainer(config, plan, mesh), datasets, report).run()


def followed(plan: Plan, config: Config) -> Plan:
    """A stored plan with what it predicts computed anew. Raises PlanError when it is not one of this model."""
    units = native_units(config, plan.grid.tp, plan.cluster)
    check_chain(plan, [unit.name for unit in units])
    table = tensors(config)
    if plan.shardings:  # tools/plan.py leaves them out for the native model, which divides its tensors in one way
        check_native_shardings(plan.shardings, table)
    return priced(dataclasses.replace(plan, units=units, shardings=table))
