"""Run a job on this rank, alone or as one of several workers of parameter servers."""

from collections.abc import Callable

from ..config import RunConfig
from ..parallel.agree import together
from ..parallel.launch import World
from ..stages.optimizer_state import OptimizerOf, optimizer_of_run
from .job import Job
from .report import Report, Throughput
from .run_record import files_of
from .served import Worker, WorkerJob
from .trainer import Trainer


def run_job(
    make: Callable[[OptimizerOf], Job],
    config: RunConfig,
    world: World,
    work: Callable[[Trainer], Throughput],
    as_passed: RunConfig,
) -> None:
    """Create and run a job.

    make:      creates it, given what makes the optimizer.
    work:      returns the work of a sample, for the report.
    as_passed: the settings before those decided by data and model were filled in.

    Raises a MerakError on every rank of the job, or of the worker, alike.
    """
    worker = None if world.role is None else Worker(config, world)
    job = make(optimizer_of_run(config.optimizer) if worker is None else worker.optimizer)
    job.settings = as_passed

    def report() -> Report | None:
        if not world.is_last:
            return None
        of_sample = work(job.trainer)
        return Report(config.logging, of_sample, files=files_of(job.trainer, world, of_sample))

    if worker is not None:
        WorkerJob(job, worker, report).run()
        return
    with together(job.mesh.control, "cpu"):
        job.report = report()
    job.run()
