"""Settings by name, and those that plans are about, read off their declarations."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .hf import HFModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .sections import CheckpointConfig, ModelConfig, TrainConfig
from .settings import InPlan, Section

# Of a setting that both kinds of models have, plans say the same; its default may be another.
ROWS: Mapping[str, dataclasses.Field] = MappingProxyType(
    {
        field.name: field
        for section in (
            ParallelConfig,
            TrainConfig,
            ModelConfig,
            HFModelConfig,
            OptimizerConfig,
            CheckpointConfig,
        )
        for field in dataclasses.fields(section)
    }
)
# Settings that a plan decides.
DECIDES: Mapping[str, InPlan] = MappingProxyType(
    {name: row.metadata["plan"] for name, row in ROWS.items() if "plan" in row.metadata}
)
# Settings from which plans are made; they have no effect beside a stored plan.
MAKES = tuple(name for name, row in ROWS.items() if row.metadata.get("makes_plan"))


def taken(section: Section) -> dict[str, Any]:
    """Return the fields of a plan that it takes over from ``section``, with their values."""
    values = {}
    for row in dataclasses.fields(section):
        where = row.metadata.get("plan")
        if where is not None and where.taken:
            values[where.path] = where.taken_over(getattr(section, row.name))
    return values
