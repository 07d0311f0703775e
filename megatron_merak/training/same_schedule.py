"""The schedule of ``--schedule-file``, read by every rank, which may have files of their own under the same name."""

import hashlib

from ..config import ParallelConfig
from ..errors import ConfigError
from ..parallel.agree import gather_json, together
from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Schedule
from ..planner.written import FLAG, written


def same_schedule(parallel: ParallelConfig, micro_batches: int, mesh: Mesh) -> Schedule | None:
    """The schedule that the settings name a file of, None where they name none.

    micro_batches: of a step and replica. Collective over all ranks. Raises ScheduleError or ConfigError on every rank,
    where one cannot read it, where it does not fit the job, and where ranks read different ones.
    """
    with together(mesh.control, "cpu"):
        schedule = written(parallel, micro_batches)
    digest = "" if schedule is None else hashlib.sha256(str(schedule).encode()).hexdigest()
    for rank, other in enumerate(gather_json(digest, mesh.control, "cpu")):
        if other != digest:
            reason = f"rank {rank} has another schedule than rank {mesh.rank}"
            raise ConfigError(FLAG, parallel.schedule_file, reason, "Give all hosts the same file")
    return schedule
