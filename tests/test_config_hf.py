"""The configuration of a HuggingFace model."""

import json

import pytest

from megatron_merak.config import (
    HFCheckpointConfig,
    HFConfig,
    HFDataConfig,
    HFModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_merak.errors import ConfigError
from tests.config import PP, TP

HF_MODEL = {"model": "directory", "seq_length": 32}


def make_hf(
    *, model=None, parallel=None, train=None, optimizer=None, data=None, checkpoint=None
) -> HFConfig:
    return HFConfig(
        model=HFModelConfig(**{**HF_MODEL, **(model or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**{"micro_batch_size": 2, "train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        data=HFDataConfig(**{"mock_data": True, **(data or {})}),
        checkpoint=HFCheckpointConfig(**(checkpoint or {})),
    )


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"mock_data": False, "data_path": ["a"]},
        {"mock_data": False, "data_path": ["a"], "tokenizer_type": "NullTokenizer"},
        {"mock_data": False, "data_path": ["a"], "tokenizer_type": "HuggingFaceTokenizer"},
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"},
    ],
)
def test_the_directory_of_a_huggingface_model_knows_its_vocabulary_and_tokenizer(data):
    make_hf(data=data, parallel={TP: 2, PP: 40}, checkpoint={"save_hf": "out"}).validate(80)


@pytest.mark.parametrize(
    "sections, world_size, message",
    [
        (
            {"parallel": {TP: 2}},
            3,
            "the number of ranks 3: is not a multiple of --tensor-model-parallel-size 2",
        ),
        ({"data": {"mock_data": False}}, 1, "--data-path (missing): there is no data to train on"),
        (
            {"data": {"tokenizer_model": "t"}},
            1,
            "--tokenizer-model t: is read only with --tokenizer-type HuggingFaceTokenizer",
        ),
        ({"train": {"global_batch_size": 3}}, 1, "--global-batch-size 3: is not a multiple"),
        ({"optimizer": {"lr": None}}, 1, "--lr (missing)"),
        (
            {"checkpoint": {"save_interval": 2}},
            1,
            "--save-interval 2: has no effect without --save",
        ),
        (
            {"model": {"seq_length": 15}, "parallel": {TP: 2, "sequence_parallel": True}},
            2,
            "--seq-length 15: is not a multiple of --tensor-model-parallel-size 2, and --sequence-parallel divides it",
        ),
    ],
)
def test_a_run_of_a_huggingface_model_is_checked_like_any_other(sections, world_size, message):
    with pytest.raises(ConfigError) as caught:
        make_hf(**sections).validate(world_size)
    assert str(caught.value).startswith(message)


def test_a_huggingface_run_survives_json():
    config = make_hf(
        data={"data_path": ["1", "a"], "mock_data": False}, checkpoint={"save_hf": "x"}
    )
    assert HFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
