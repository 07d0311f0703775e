"""The pipeline schedules, by name. A builder lists compute ops only; ``passes.add_communication``
adds the transfers.

To add a schedule, write its builder, with its figure, and add a row to ``_TABLE`` or, if it gives
other bits, to ``_OTHERS``. Unless stated otherwise, the figures have forward = 1 and backward = 2
units of time; a dot is an idle unit.
"""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders.builder import Builder
from megatron_merak.pipeline_parallel.builders.interleaved import interleaved
from megatron_merak.pipeline_parallel.builders.plain import gpipe, naive, one_forward_one_backward
from megatron_merak.pipeline_parallel.builders.recompute import early_recompute, shifted
from megatron_merak.pipeline_parallel.builders.unflushed import pipedream, pipedream_2bw
from megatron_merak.pipeline_parallel.builders.zero_bubble import zb_h1, zb_v
from megatron_merak.pipeline_parallel.ops import Schedule

_TABLE = (
    Builder("naive", naive),
    Builder("gpipe", gpipe),
    Builder("1f1b", one_forward_one_backward),
    Builder("interleaved", interleaved, chunks=2, chunked=True, grouped=True),
    Builder(
        "shifted",
        shifted,
        recomputes=True,
        least_ranks=2,
        least_microbatches=lambda ranks: max(ranks, 4),
    ),
    Builder("early-recompute", early_recompute, recomputes=True),
    Builder("zb-h1", zb_h1, splits=True),
    Builder("zb-v", zb_v, splits=True, chunks=2),
)
BUILDERS: Mapping[str, Builder] = MappingProxyType({builder.name: builder for builder in _TABLE})

# They change what is computed, by stale weights or the order of sums, so that nothing chooses them
# but by name.
_OTHERS = (
    Builder("pipedream", pipedream, least_ranks=2, updates=True),
    Builder("pipedream-2bw", pipedream_2bw, least_ranks=2, updates=True),
)
OTHERS: Mapping[str, Builder] = MappingProxyType({builder.name: builder for builder in _OTHERS})


# forwards of all micro-batches: a schedule is a list of ops, which takes time and memory
LARGEST = 1 << 20


def build_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    every: int | None = None,
) -> Schedule:
    """Return the compute ops of a named schedule over ``ranks`` pipeline ranks.

    chunks: (virtual) stages per rank, if the schedule leaves a choice.
    group:  number of micro-batches that an interleaved rank runs on one stage before it continues
            with the next.
    every:  number of micro-batches of an update, where a schedule has several.

    Raises ScheduleError for an unknown name, and for arguments to which the schedule is not
    applicable.
    """
    builder = {**BUILDERS, **OTHERS}.get(name)
    if builder is None:
        names = ", ".join((*BUILDERS, *OTHERS))
        raise ScheduleError("schedule", name, "there is no such one", f"Use one of {names}")
    if microbatches * max(ranks, 1) * max(chunks or 1, 1) > LARGEST:
        reason = (
            f"{microbatches:,} micro-batches on {ranks:,} ranks are more than {LARGEST:,} forwards"
        )
        raise ScheduleError("schedule", name, reason, "Use fewer or larger micro-batches")
    return builder.build(ranks, microbatches, chunks, group, every=every)
