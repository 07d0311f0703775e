"""Reads the schedule of ``--schedule-file`` and checks that it fits the job."""

from typing import NoReturn

from megatron_merak.config import ParallelConfig
from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.ops import Kind, Schedule, ops_of
from megatron_merak.pipeline_parallel.schedule_files import executable, read_schedule

FLAG = "--schedule-file"


def written(parallel: ParallelConfig, microbatches: int) -> Schedule | None:
    """Return the schedule in ``--schedule-file``, None without that flag.

    microbatches: per step and replica.

    Raises ScheduleError for a file without an executable schedule, ConfigError for one that
    contradicts other settings of the job.
    """
    path = parallel.schedule_file
    if path is None:
        return None
    schedule = executable(read_schedule(path, FLAG), FLAG, path)
    ranks = parallel.pipeline_model_parallel_size
    if len(schedule.ranks) != ranks:
        reason = (
            f"it is a schedule of {len(schedule.ranks)} ranks, and "
            f"--pipeline-model-parallel-size is {ranks}"
        )
        _refuse(
            path,
            reason,
            f"Use --pipeline-model-parallel-size {len(schedule.ranks)}, or another file",
        )
    if schedule.microbatches != microbatches:
        reason = (
            f"it is a schedule of {schedule.microbatches} micro-batches, and a step has "
            f"{microbatches} per replica"
        )
        _refuse(
            path,
            reason,
            "Change the global batch size (or gradient_accumulation_steps), or the file",
        )
    recomputation = next(
        (op for entry in schedule.entries() for op in ops_of(entry) if op.kind is Kind.R), None
    )
    if recomputation is not None and parallel.recompute_granularity != "full":
        reason = f"its {recomputation} would recompute nothing: --recompute-granularity is unset"
        _refuse(
            path,
            reason,
            "Add --recompute-granularity full (activation_checkpointing), or remove the R ops",
        )
    if schedule.updates is not None:
        reason = "it updates weights on its way, which a file cannot ask for"
        _refuse(path, reason, "Use --pipeline-schedule pipedream or pipedream-2bw")
    paired = is_paired(schedule)
    if parallel.exchanges_in_layers:
        overlap = parallel.tp_comm_overlap
        if overlap == "pair" and not paired:
            reason = f"it joins forwards and backwards to pairs, and {FLAG} {path} holds none"
            remedy = "Write pairs like 0F4|0B3 into the file, or use another --tp-comm-overlap"
            raise ConfigError("--tp-comm-overlap", overlap, reason, remedy)
        if overlap == "sub-pipeline" and paired:
            reason = (
                f"halves of a micro-batch run together, and {FLAG} {path} runs pairs of "
                "micro-batches together"
            )
            raise ConfigError(
                "--tp-comm-overlap",
                overlap,
                reason,
                "Use pair, or take the pairs of the file apart",
            )
    return schedule


def is_paired(schedule: Schedule) -> bool:
    """Whether any entry of a schedule runs several ops together."""
    return any(len(ops_of(entry)) > 1 for entry in schedule.entries())


def _refuse(path: str, reason: str, remedy: str) -> NoReturn:
    raise ConfigError(FLAG, path, reason, remedy)
