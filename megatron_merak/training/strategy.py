"""What --data-parallel-strategy makes of a job: it trains alone, or beside other jobs that train
the same model.
"""

from collections.abc import Callable
from typing import Protocol

from ..config import RunConfig
from ..config.run import Run
from ..parallel.agree import together
from ..parallel.mesh import Mesh
from ..stages.optimizer_state import OptimizerOf, optimizer_of_run
from .job import Job
from .report import Report


class Strategy(Protocol):
    """What a job asks while it opens, and what runs it. `Alone` is the one of jobs that have no
    others beside them.

    Of the settings that are given, global batch size and number of replicas count over all jobs
    that train together.
    """

    def own(self, config: Run) -> Run:
        """Return the settings of this job by itself, given those of all jobs: what its plan and its
        grid are made for.

        Its data sets and its training are made of ``config``.
        """

    def mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh of this job's ranks with the division of samples over the replicas of all
        jobs.
        """

    def note(self) -> str:
        """Return what a plan of `own` settings does not say; "" where it says all."""

    def check_outputs(self) -> None:
        """Check where other ranks than those of this job will write. Raises ConfigError."""

    def optimizer_of(self, config: RunConfig) -> OptimizerOf:
        """Return what makes the optimizer of this rank's parameters, whose `reduce_and_step`
        reaches other jobs.
        """

    def run(self, job: Job, make_report: Callable[[], Report | None]) -> None:
        """Run a job. Raises a MerakError on all of its ranks alike.

        make_report: returns the report of this rank; None unless it is the one that prints.
        """


class Alone:
    """The strategy of a job that is all of its training: see `Strategy`."""

    def own(self, config: Run) -> Run:
        assert config.parallel.data_parallel_strategy == "allreduce", (
            "it would lose what its strategy asks for"
        )
        return config

    def mesh(self, mesh: Mesh) -> Mesh:
        return mesh

    def note(self) -> str:
        return ""

    def check_outputs(self) -> None:
        pass

    def optimizer_of(self, config: RunConfig) -> OptimizerOf:
        return optimizer_of_run(config.optimizer)

    def run(self, job: Job, make_report: Callable[[], Report | None]) -> None:
        with together(job.mesh.control, "cpu"):
            job.report = make_report()
        job.run()


ALONE = Alone()
