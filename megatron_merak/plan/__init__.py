"""The frozen plan of a training step and its parts."""

from megatron_merak.pipeline_parallel.pictures.table import bytes_text
from megatron_merak.plan.frozen import LAYERS, Plan
from megatron_merak.plan.hardware import Hardware, exceeding, hardware_of, limits_of
from megatron_merak.plan.parts import (
    AXES,
    DTYPE_BYTES,
    Grid,
    StagePlan,
    Unit,
    held_parameters,
    kind_of_unit,
    optimizer_state,
    packed_weights,
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
    nodes_text,
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
    "Hardware",
    "Plan",
    "Shards",
    "StagePlan",
    "TensorSharding",
    "Unit",
    "batch",
    "bytes_text",
    "exceeding",
    "hardware_of",
    "held_parameters",
    "host_text",
    "interval",
    "kind_of_unit",
    "layout",
    "limits_of",
    "optimizer_state",
    "nodes_text",
    "packed_weights",
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
