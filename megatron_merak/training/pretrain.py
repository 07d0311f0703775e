"""A pretraining job of the native model from its configuration: plan, build, run."""

import dataclasses
import datetime

from ..config import Config
from ..data.build import build_datasets, build_tokenizer, vocabulary
from ..parallel.agree import together
from ..parallel.launch import World
from ..parallel.mesh import build_mesh
from ..planner.cost import model_flops
from ..planner.make import grid_of
from ..planner.make import plan as make_plan
from .build import tensors
from .devices import cluster_of
from .job import Job, agree, opening, throughput
from .outputs import check_outputs
from .report import Report
from .same_schedule import same_schedule
from .trainer import Trainer


def pretrain(config: Config, world: World) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that can be known."""
    config.validate(world.size)
    tokenizer = build_tokenizer(config)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocabulary(config, tokenizer))
    )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    mesh = build_mesh(grid_of(config, world.size), world.rank, world.device, timeout, world.clock, world.collectives)
    agree(config, mesh)
    schedule = same_schedule(config.parallel, config.num_microbatches(world.size), mesh)
    plan = make_plan(config, world.size, cluster_of(world), tensors(config), schedule)
    if world.rank == 0:
        print(opening(config, plan, world), flush=True)
    with together(mesh.control, "cpu"):
        check_outputs(config, world.is_last)
        datasets = build_datasets(config, tokenizer, world.size)
    report = None
    with together(mesh.control, "cpu"):
        if world.is_last:
            work = throughput(config, plan, world, model_flops(config.model, plan.global_batch_size))
            report = Report(config.logging, work, config.train.train_iters or 0)
    Job(Trainer(config, plan, mesh), datasets, report).run()
