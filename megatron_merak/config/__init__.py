"""Every setting of a run: sections of typed fields, each field a command-line flag."""

from .batches import RAMP, STEPS, Batches, check_sizes
from .hf import HFModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .run import Config, HFConfig, RunConfig, of_worker, planned_part
from .sections import (
    CheckpointConfig,
    DataConfig,
    HFCheckpointConfig,
    HFDataConfig,
    LoggingConfig,
    ModelConfig,
    TrainConfig,
)
from .servers import SNAPSHOT_INTERVAL, worker_note
from .settings import flag_name, nearest, value_type
from .streams import StreamConfig

__all__ = [
    "RAMP",
    "SNAPSHOT_INTERVAL",
    "STEPS",
    "Batches",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "HFCheckpointConfig",
    "HFConfig",
    "HFDataConfig",
    "HFModelConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "StreamConfig",
    "TrainConfig",
    "check_sizes",
    "flag_name",
    "nearest",
    "of_worker",
    "planned_part",
    "worker_note",
    "value_type",
]
