"""The GPTs of Merak's paper, and their plans on a modelled cluster."""

from dataclasses import dataclass
from functools import cache

from megatron_merak.cluster import find_cluster
from megatron_merak.config import ModelConfig, ParallelConfig
from megatron_merak.errors import MerakError
from megatron_merak.plan import DTYPE_BYTES, Grid, Plan
from megatron_merak.planner.cost import gpt_units
from megatron_merak.planner.make import plan_chain
from megatron_merak.planner.request import Request

CLUSTER = "rtx3090"
DTYPE = "bfloat16"
MEMORY_GB = 22.0  # of 24 GiB; the rest is the driver's and the allocator's
SEQUENCE = 1024
GLOBAL_BATCH = 256


@dataclass(frozen=True)
class Size:
    """A GPT of the paper: its shape, and the largest speed-up that the paper reports for it."""

    layers: int
    hidden: int
    heads: int
    published: float

    def model(self) -> ModelConfig:
        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=SEQUENCE,
            vocab_size=50257,
        )


# GPT-2's 1.5B has 25 heads, which no tensor-parallel degree of a node divides: 20 heads of 80 do
# the same work.
SIZES = {
    "1.5B": Size(48, 1600, 20, 1.42),
    "2.5B": Size(54, 1920, 20, 1.39),
    "8.3B": Size(72, 3072, 24, 1.43),
    "20B": Size(44, 6144, 64, 1.61),
}

# --recompute-method
FULL = None
AWARE = "stage-aware"
CAPACITY = "capacity"
# Megatron-LM's way, then what each technique of the paper puts in its place.
BASE = {"pipeline_schedule": "1f1b", "recompute_method": FULL, "tp_comm_overlap": "none"}


@dataclass(frozen=True)
class Layout:
    """Degrees and samples in a micro-batch."""

    grid: Grid
    micro_batch: int

    def __str__(self) -> str:
        return f"tp{self.grid.tp} pp{self.grid.pp} dp{self.grid.dp} mb{self.micro_batch}"


@cache
def _planned(size: Size, layout: Layout, choice: tuple) -> Plan | None:
    grid = layout.grid
    parallel = ParallelConfig(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        recompute_granularity="full",
        **{"device_memory_gb": MEMORY_GB, **dict(choice)},
    )
    request = Request(
        parallel=parallel,
        replicas=grid.dp,
        microbatches=GLOBAL_BATCH // (grid.dp * layout.micro_batch),
        micro_batch_size=layout.micro_batch,
        sequence_length=SEQUENCE,
        dtype=DTYPE,
    )
    units = gpt_units(size.model(), layout.micro_batch, DTYPE_BYTES[DTYPE], grid.tp)
    try:
        return plan_chain(units, request, find_cluster(CLUSTER))
    except MerakError:
        return None


def planned(size: Size, layout: Layout, choice: dict) -> Plan | None:
    """The plan, or None where it does not fit or is not defined.

    choice: fields of `ParallelConfig`.
    """
    return _planned(size, layout, tuple(sorted(choice.items())))


def seconds(plan: Plan | None) -> float:
    return plan.predicted_time if plan is not None else float("inf")
