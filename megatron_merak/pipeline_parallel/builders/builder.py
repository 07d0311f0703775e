"""A row of the table of schedules: how one is built, and where it is applicable."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.ops import Schedule


def _one(ranks: int) -> int:
    return 1


@dataclass(frozen=True)
class Builder:
    """One schedule, and where it is applicable.

    make:                            (ranks, microbatches) -> schedule; if ``chunked``, also the
                                     number of stages per rank; if ``grouped``, then the number of
                                     micro-batches of a group; if ``updates``, then that of an
                                     update.
    recomputes, splits:              whether it has R ops, or W ops.
    chunks:                          stages of each rank; if ``chunked``, the default.
    least_ranks, least_microbatches: (of the ranks) the smallest numbers to which it is applicable.
    """

    name: str
    make: Callable[..., Schedule]
    recomputes: bool = False
    splits: bool = False
    chunks: int = 1
    chunked: bool = False
    grouped: bool = False
    updates: bool = False
    least_ranks: int = 1
    least_microbatches: Callable[[int], int] = _one

    def build(
        self,
        ranks: int,
        microbatches: int,
        chunks: int | None = None,
        group: int | None = None,
        every: int | None = None,
    ) -> Schedule:
        """Return the compute ops of this schedule; raise ScheduleError if it is not applicable."""
        self._check_size(ranks, microbatches)
        self._check_options(chunks, group)
        options: list[int | None] = [chunks or self.chunks] if self.chunked else []
        options += [group] if self.grouped else []
        options += [every] if self.updates else []
        return self.make(ranks, microbatches, *options)

    def _check_size(self, ranks: int, microbatches: int) -> None:
        if min(ranks, microbatches) < 1:
            reason = f"{ranks} pipeline ranks and {microbatches} micro-batches"
            raise ScheduleError(
                "schedule", self.name, reason, "Ask for at least one rank and one micro-batch"
            )
        if ranks < self.least_ranks:
            reason = f"it needs at least {self.least_ranks} pipeline ranks, there are {ranks}"
            remedy = "Raise --pipeline-model-parallel-size, or take another schedule such as 1f1b"
            raise ScheduleError("schedule", self.name, reason, remedy)
        if microbatches < (least := self.least_microbatches(ranks)):
            reason = (
                f"on {ranks} pipeline ranks it needs at least {least} micro-batches, there "
                f"are {microbatches}"
            )
            remedy = "Raise --global-batch-size, or take another schedule such as 1f1b"
            raise ScheduleError("schedule", self.name, reason, remedy)

    def _check_options(self, chunks: int | None, group: int | None) -> None:
        flag = "--num-virtual-stages-per-pipeline-rank"
        if chunks is not None and chunks < 1:
            raise ScheduleError(
                flag, chunks, "a rank has at least one stage", "Raise it or leave it unset"
            )
        if chunks not in (None, self.chunks) and not self.chunked:
            reason = f"the schedule {self.name} has {self.chunks} on every rank"
            raise ScheduleError(
                flag, chunks, reason, "Leave it unset, or use --pipeline-schedule interleaved"
            )
        flag = "--microbatch-group-size-per-virtual-pipeline-stage"
        if group is not None and group < 1:
            raise ScheduleError(
                flag, group, "a group has at least one micro-batch", "Raise it or leave it unset"
            )
        if group is not None and not self.grouped:
            reason = f"the schedule {self.name} does not group micro-batches"
            raise ScheduleError(
                flag, group, reason, "Leave it unset, or use --pipeline-schedule interleaved"
            )
