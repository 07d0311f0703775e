"""Run a job on this rank, alone or as one of several workers of parameter servers."""

from collections.abc import Callable

from ..config import RunConfig
from ..parallel.agree import together
from ..parallel.launch import World
from ..stages.optimizer_state import OptimizerOf, optimizer_of_run
from .job import Job, throughput
from .report import Report
from .run_record import files_of
from .served import Worker, WorkerJob


def run_job(make: Callable[[OptimizerOf], Job], config: RunConfig, world: World, as_passed: RunConfig) -> None:
    """Create and run a job.

    make:      creates it, given what makes the optimizer.
    as_passed: the settings before those decided by data and model were filled in.

    Raises a MerakError on every rank of the job, or of the worker, alike.
    """
    worker = None if world.role is None else Worker(config, world)
    job = make(optimizer_of_run(config.optimizer) if worker is None else worker.optimizer)
    job.settings = as_passed

    def report() -> Report | None:
        if not world.is_last:
            return None
        of_sample = throughput(config, job.plan, world, job.trainer.model.flops())
        return Report(config.logging, of_sample, files=files_of(job.trainer, world, of_sample))

    if worker is not None:
        WorkerJob(job, worker, report).run()
        return
    with together(job.mesh.control, "cpu"):
        job.report = report()
    job.run()
