"""The configuration of a whole run."""

import dataclasses
from typing import Any, Self

from .checks import check_checkpoint, check_data, check_layout, check_model, check_optimizer
from .sections import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from .settings import known_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, one section per concern."""

    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model on ``world_size`` ranks."""
        parallel = self.parallel
        return world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step."""
        given = self.train.global_batch_size
        return self.train.micro_batch_size * self.data_parallel_size(world_size) if given is None else given

    def num_microbatches(self, world_size: int) -> int:
        """Forward passes per replica and step."""
        samples = self.train.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples

    def validate(self, world_size: int, *, training: bool = True) -> None:
        """Check the settings against each other and against ``world_size`` ranks, without communicating; the remedy
        names the nearest values that work. ``training=False``, for planning, asks for neither data, tokenizer nor
        learning rate. Raises ConfigError."""
        check_model(self.model)
        check_layout(self.model, self.parallel, self.train, world_size)
        check_checkpoint(self.checkpoint)
        if training:
            check_optimizer(self.optimizer, self.train)
            check_data(self.data, self.model)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections and their values as JSON has them; ``from_dict`` reads it back to an equal Config."""
        return {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
            for name, section in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, sections: Any) -> Self:
        """The inverse of ``to_dict``; what is left out has its default. Raises ConfigError for an unknown key, a
        missing required value or a value of the wrong type."""
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        known_keys("configuration", sections, types)
        return cls(**{name: section_type.from_dict(sections.get(name, {})) for name, section_type in types.items()})
