"""Every setting of a run: sections of typed fields, each field a command-line flag."""

from .hf import HFModelConfig
from .run import Config, HFConfig, RunConfig
from .sections import (
    CheckpointConfig,
    DataConfig,
    HFCheckpointConfig,
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
    "HFCheckpointConfig",
    "HFConfig",
    "HFModelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "flag_name",
    "nearest",
    "value_type",
]
