"""A small configuration, and the words in which it is refused."""

import pytest

from megatron_merak.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_merak.errors import ConfigError

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "vocab_size": 1000,
}


def make(
    *,
    model=None,
    parallel=None,
    train=None,
    optimizer=None,
    data=None,
    checkpoint=None,
    logging=None,
) -> Config:
    return Config(
        model=ModelConfig(**{**MODEL, **(model or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**{"micro_batch_size": 2, "train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        data=DataConfig(**{"mock_data": True, **(data or {})}),
        checkpoint=CheckpointConfig(**(checkpoint or {})),
        logging=LoggingConfig(**(logging or {})),
    )


def refusal(sections: dict, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**sections).validate(world_size)
    return str(caught.value)


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
