"""What streams cannot stand beside is refused by name."""

import pytest

from megatron_merak.config import (
    Config,
    DataConfig,
    HFConfig,
    HFDataConfig,
    HFModelConfig,
    ParallelConfig,
    StreamConfig,
    TrainConfig,
)
from megatron_merak.config.streams import check_streams
from megatron_merak.errors import ConfigError

ONE = {"stream_path": ["text"]}
REFUSED = [
    (ONE, {"data_path": ["a"]}, {}, "--stream-path (given): contradicts --data-path"),
    (ONE, {"train_data_path": ["a"]}, {}, "contradicts --train-data-path"),
    (ONE, {"mock_data": True}, {}, "contradicts --mock-data"),
    (
        ONE | {"valid_stream_path": ["v"]},
        {"valid_data_path": ["v"]},
        {},
        "contradicts --valid-data-path",
    ),
    (ONE, {"split": "9,1"}, {}, "--split '9,1': streams are not divided into parts"),
    (ONE, {"data_cache_path": "c"}, {}, "--data-cache-path c: is about indexed datasets"),
    (ONE, {"sft": True}, {}, "conversations are packed whole"),
    (
        ONE,
        {},
        {"data_parallel_strategy": "ps-async"},
        "--data-parallel-strategy ps-async: its workers share no position",
    ),
    ({"stream_lanes": 4}, {}, {}, "--stream-lanes 4: has no effect without --stream-path"),
    ({"stream_skip_bad": True}, {}, {}, "--stream-skip-bad True: has no effect without"),
]


@pytest.mark.parametrize("streams, data, parallel, told", REFUSED)
def test_contradictions_are_refused(streams, data, parallel, told):
    with pytest.raises(ConfigError) as caught:
        check_streams(StreamConfig(**streams), HFDataConfig(**data), ParallelConfig(**parallel))
    assert told in str(caught.value)


def test_streams_are_a_source_of_data():
    data = {"valid_data_path": ["v"], "data_cache_path": "c"}
    check_streams(StreamConfig(**ONE), DataConfig(**data), ParallelConfig())
    config = HFConfig(
        model=HFModelConfig(model="m", seq_length=8),
        train=TrainConfig(micro_batch_size=1, train_iters=1),
        streams=StreamConfig(**ONE),
        data=HFDataConfig(**data),
    )
    config.check_data()
    assert Config.__dataclass_fields__["streams"].type is StreamConfig
