"""The frozen plan of a training step and its parts."""

from megatron_merak.pipeline_parallel.pictures.table import bytes_text
from megatron_merak.plan.frozen import LAYERS, Plan
from megatron_merak.plan.parts import (
    AXES,
    DTYPE_BYTES,
    Grid,
    StagePlan,
    Unit,
    held_parameters,
    optimizer_state,
    spread_parameters,
    trained_parameters,
    trained_tied,
)
from megatron_merak.plan.placement import placed_groups, placement
from megatron_merak.plan.replicas import UNSHARDED, Shards, refused_together
from megatron_merak.plan.sharding import TensorSharding
from megatron_merak.plan.table import (
    batch,
    host_text,
    interval,
    layout,
    plan_table,
    prediction,
    sharding_text,
    stage_rows,
    time_text,
)

__all__ = [
    "AXES",
    "DTYPE_BYTES",
    "LAYERS",
    "UNSHARDED",
    "Grid",
    "Plan",
    "Shards",
    "StagePlan",
    "TensorSharding",
    "Unit",
    "batch",
    "bytes_text",
    "held_parameters",
    "host_text",
    "interval",
    "layout",
    "optimizer_state",
    "placed_groups",
    "placement",
    "plan_table",
    "prediction",
    "refused_together",
    "sharding_text",
    "spread_parameters",
    "stage_rows",
    "time_text",
    "trained_parameters",
    "trained_tied",
]
