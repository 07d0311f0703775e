"""Every setting of a run: sections of typed fields, each field a command-line flag."""

from .run import Config
from .sections import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from .settings import flag_name, nearest, value_type

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "flag_name",
    "nearest",
    "value_type",
]
