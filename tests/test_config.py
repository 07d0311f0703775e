"""The configuration: derived values, what is refused and in which words, and the JSON
round trip.
"""

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_merak.config import (
    Config,
    HFCheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_merak.config.checks import closest, divisors, multiples
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.config.settings import checked
from megatron_merak.errors import ConfigError
from tests.config import MODEL, TP, make, refusal


def test_derived_model_values():
    model = ModelConfig(**MODEL)
    assert (model.ffn_size, model.head_dim, model.query_groups, model.max_positions) == (
        256,
        8,
        8,
        32,
    )
    llama = ModelConfig(
        **{**MODEL, "hidden_size": 512},
        swiglu=True,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=128,
        max_position_embeddings=99,
        position_embedding_type="rope",
        rotary_percent=0.25,
    )
    assert (llama.ffn_size, llama.head_dim, llama.query_groups, llama.max_positions) == (
        1344,
        128,
        2,
        99,
    )
    assert (model.rotary_dim, llama.rotary_dim) == (0, 32)
    assert ModelConfig(**MODEL, ffn_hidden_size=100).ffn_size == 100


@pytest.mark.parametrize(
    "vocab, tp, padded",
    [
        (1000, 1, 1024),
        (1000, 2, 1024),
        (1000, 8, 1024),
        (1025, 2, 1280),
        (50257, 1, 50304),
        (50257, 8, 51200),
        (128, 1, 128),
        (1, 4, 512),
    ],
)
def test_padded_vocabulary(vocab, tp, padded):
    assert ModelConfig(**{**MODEL, "vocab_size": vocab}).padded_vocab_size(tp) == padded


def test_unknown_vocabulary_cannot_be_padded():
    with pytest.raises(
        ConfigError, match=r"--vocab-size \(unset\): is needed to size the embedding"
    ):
        ModelConfig(**{**MODEL, "vocab_size": None}).padded_vocab_size(1)


def test_batch_arithmetic():
    config = make(
        parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        train={"global_batch_size": 24},
    )
    assert [config.data_parallel_size(world) for world in (4, 8, 12)] == [1, 2, 3]
    assert [config.num_microbatches(world) for world in (4, 8, 12)] == [12, 6, 4]
    assert make().global_batch_size(8) == 16 and make().num_microbatches(8) == 1


def test_final_learning_rate_is_a_tenth_of_the_peak_unless_given():
    assert OptimizerConfig(lr=1.0).final_lr == 0.1
    assert OptimizerConfig(lr=1.0, min_lr=0.0).final_lr == 0.0


def test_dtype_names():
    assert TrainConfig(micro_batch_size=1).dtype == "float32"
    assert TrainConfig(micro_batch_size=1, bf16=True).dtype == "bfloat16"


VALID = [
    ({}, 1),
    ({}, 7),
    (
        {
            "model": {"kv_channels": 16, "hidden_size": 63},
            "parallel": {"tensor_model_parallel_size": 4},
        },
        4,
    ),
    (
        {
            "model": {"group_query_attention": True, "num_query_groups": 2},
            "parallel": {"tensor_model_parallel_size": 2},
        },
        8,
    ),
    ({"parallel": {"pipeline_model_parallel_size": 6}}, 6),
    (
        {
            "model": {
                "position_embedding_type": "rope",
                "use_rope_scaling": True,
                "rope_scaling_factor": 32.0,
            }
        },
        1,
    ),
    ({"train": {"skip_train": True, "train_iters": None}, "optimizer": {"lr": None}}, 1),
    ({"optimizer": {"lr_warmup_iters": 9}}, 1),
    ({"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 10}}, 1),
    (
        {
            "optimizer": {
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.0,
                "end_weight_decay": 0.1,
            }
        },
        1,
    ),
    (
        {
            "data": {
                "mock_data": False,
                "data_path": ["1", "a", "2", "b"],
                "tokenizer_type": "NullTokenizer",
            }
        },
        1,
    ),
    (
        {
            "data": {
                "mock_data": False,
                "train_data_path": ["a"],
                "valid_data_path": ["b"],
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": "t",
            }
        },
        1,
    ),
    (
        {
            "checkpoint": {
                "save": "c",
                "save_interval": 5,
                "save_retain_interval": 10,
                "load": "c",
                "finetune": True,
            }
        },
        1,
    ),
]


@pytest.mark.parametrize("sections, world_size", VALID)
def test_valid_combinations_pass(sections, world_size):
    make(**sections).validate(world_size)


def test_sequence_parallelism_of_one_rank_is_ignored_and_told():
    alone = make(parallel={"sequence_parallel": True})
    alone.validate(1)
    assert alone.ignored() == (
        "--sequence-parallel has no effect: --tensor-model-parallel-size is 1.",
    )
    assert make(parallel={"sequence_parallel": True, TP: 2}).ignored() == make().ignored() == ()


def test_what_one_context_rank_exchanges_is_ignored_and_told():
    alone = make(parallel={"cp_comm_type": "all_gather"})
    alone.validate(1)
    assert alone.ignored() == (
        "--cp-comm-type all_gather has no effect: --context-parallel-size is 1.",
    )
    divided = {"cp_comm_type": "all_gather", "context_parallel_size": 2}
    assert make(parallel=divided).ignored() == ()


def hierarchy(sizes, ranks=8, kind="a2a+p2p"):
    parallel = {"cp_comm_type": kind, "context_parallel_size": ranks}
    return make(parallel=parallel | {"hierarchical_context_parallel_sizes": tuple(sizes.split())})


def test_levels_of_context_parallel_ranks():
    assert hierarchy("2 4").parallel.cp_inner == 2 and hierarchy("4 2").parallel.cp_inner == 4
    hierarchy("2 4").validate(8)
    assert hierarchy("2 4", 1).parallel.cp_inner == make().parallel.cp_inner == 1
    assert hierarchy("", kind="p2p").parallel.cp_inner == 1


LEVELS = "--hierarchical-context-parallel-sizes"


@pytest.mark.parametrize(
    ("sizes", "ranks", "kind", "message"),
    [
        (
            "",
            8,
            "a2a+p2p",
            "--cp-comm-type a2a+p2p: nothing says how many of the 8 context-parallel ranks exchange "
            f"heads. Add {LEVELS} 2 4 or 4 2.",
        ),
        (
            "",
            3,
            "a2a+p2p",
            "--cp-comm-type a2a+p2p: nothing says how many of the 3 context-parallel ranks exchange "
            "heads. Use --cp-comm-type p2p or a2a.",
        ),
        (
            "2 2",
            8,
            "a2a+p2p",
            f"{LEVELS} 2 2: their product is 4, and --context-parallel-size is 8. Use 2 4 or 4 2.",
        ),
        (
            "2 2 2",
            8,
            "a2a+p2p",
            f"{LEVELS} 2 2 2: these are not two numbers, of neighbours that exchange heads and of "
            "groups of these. Use 2 4 or 4 2.",
        ),
        (
            "two 4",
            8,
            "a2a+p2p",
            f"{LEVELS} two 4: these are not two numbers, of neighbours that exchange heads and of "
            "groups of these. Use 2 4 or 4 2.",
        ),
        (
            "1 8",
            8,
            "a2a+p2p",
            f"{LEVELS} 1 8: with one of them 1 ranks do what --cp-comm-type p2p does. Use "
            "--cp-comm-type p2p, without sizes.",
        ),
        (
            "8 1",
            8,
            "a2a+p2p",
            f"{LEVELS} 8 1: with one of them 1 ranks do what --cp-comm-type a2a does. Use "
            "--cp-comm-type a2a, without sizes.",
        ),
        (
            "2 4",
            8,
            "p2p",
            f"{LEVELS} ('2', '4'): has no effect without --cp-comm-type a2a+p2p. Add --cp-comm-type "
            "a2a+p2p, or leave it out.",
        ),
    ],
)
def test_refused_levels(sizes, ranks, kind, message):
    with pytest.raises(ConfigError) as caught:
        hierarchy(sizes, ranks, kind).validate(ranks)
    assert str(caught.value) == message


def test_overlap_within_one_rank_is_ignored_and_told():
    told = ("--tp-comm-overlap pair has no effect: --tensor-model-parallel-size is 1.",)
    assert make(parallel={"tp_comm_overlap": "pair"}).ignored() == told
    assert make(parallel={"tp_comm_overlap": "pair", TP: 2}).ignored() == ()
    assert make(parallel={"tp_comm_overlap": "auto"}).ignored() == ()
    rows = {"tp_comm_overlap": "none", "expert_model_parallel_size": 2}
    assert make(parallel=rows).ignored() == ()


def test_replicas_are_divided_into_instances_that_shard():
    zero, count = {"use_distributed_optimizer": True}, "num_distributed_optimizer_instances"

    def told(instances, ranks=16, tp=2, **parallel):
        return refusal({"parallel": {count: instances, TP: tp, **(parallel or zero)}}, ranks)

    assert (
        make(parallel={count: 4, TP: 2, **zero}, train={"global_batch_size": 16}).validate(16)
        is None
    )
    flag = "--num-distributed-optimizer-instances"
    assert told(3) == f"{flag} 3: does not divide the 8 data-parallel ranks. Use 2 or 4."
    assert told(16) == f"{flag} 16: does not divide the 8 data-parallel ranks. Use 4."
    assert told(8).startswith(
        f"{flag} 8: an instance would be one of the 8 data-parallel ranks, which shards nothing."
    )
    assert told(8).endswith("Use 4, or the strategy no_shard.")
    assert told(2, ranks=2) == f"{flag} 2: there is one data-parallel rank. Leave it 1."
    assert told(2, ranks=6) == f"{flag} 2: does not divide the 3 data-parallel ranks. Use 1."
    nothing = f"{flag} 2: no_shard shards nothing that instances could divide. Choose a sharding strategy, or leave it"
    assert told(2, data_parallel_sharding_strategy="no_shard") == f"{nothing} 1."
    assert told(0) == f"{flag} 0: is out of range. Use a value at least 1."


def test_strategies_of_sharding_and_their_older_flag():
    strategy = "data_parallel_sharding_strategy"
    zero = {"use_distributed_optimizer": True}
    assert ParallelConfig().sharding == "no_shard" and ParallelConfig(**zero).sharding == "optim"
    assert ParallelConfig(**zero, **{strategy: "optim_grads"}).sharding == "optim_grads"
    told = "--data-parallel-sharding-strategy no_shard: contradicts --use-distributed-optimizer, which shards the "
    assert refusal({"parallel": {**zero, strategy: "no_shard"}}).startswith(told)
    told = "--ddp-bucket-size 9 has no effect: sharded gradients are reduced one unit of the model at a time."
    for name in SHARDINGS:
        ignored = make(parallel={strategy: name, "ddp_bucket_size": 9}).ignored()
        assert ignored == ((told,) if "grads" in name else ())


def test_planning_needs_neither_data_nor_learning_rate():
    config = Config(model=ModelConfig(**MODEL), train=TrainConfig(micro_batch_size=1))
    config.validate(1, training=False)
    with pytest.raises(ConfigError, match="--train-iters"):
        config.validate(1)


def test_config_is_frozen_and_hashable():
    config = make(data={"mock_data": False, "data_path": ["1", "a"]})
    assert config.data.data_path == ("1", "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3
    assert hash(config) == hash(Config.from_dict(config.to_dict()))


@pytest.mark.parametrize("sections", [row[0] for row in VALID])
def test_round_trip_through_json(sections):
    config = make(**sections)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


@pytest.mark.parametrize(
    "change, message",
    [
        ({"modle": {}}, "configuration modle: is not a known key. The nearest is model."),
        ({"zzz": {}}, "configuration zzz: is not a known key. Remove it."),
        (
            {"train": {"micro_batchsize": 1}},
            "TrainConfig micro_batchsize: is not a known key. The nearest is micro_batch_size.",
        ),
        ({"train": {}}, "--micro-batch-size (missing): has no default. Give a value."),
        ({"train": [1]}, "TrainConfig [1]: is not a mapping. Give a mapping with the keys"),
        (
            {"train": {"micro_batch_size": "1"}},
            "--micro-batch-size '1': is not a whole number. Give a whole number.",
        ),
    ],
)
def test_damaged_dictionaries(change, message):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({**make().to_dict(), **change})
    assert str(caught.value).startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


FIELDS = [
    (section, field.name)
    for section, values in make().to_dict().items()
    for field in dataclasses.fields(getattr(make(), section))
    if field.name in values
]


@given(st.sampled_from(FIELDS), JSON, st.integers(-1, 9))
def test_any_json_value_is_a_configuration_or_a_typed_error(place, value, world_size):
    section, field = place
    sections = make().to_dict()
    sections[section][field] = value
    try:
        config = Config.from_dict(sections)
        config.validate(world_size)
    except ConfigError:
        return
    assert Config.from_dict(config.to_dict()) == config
    assert config.num_microbatches(world_size) >= 1


@given(st.integers(1, 64), st.integers(1, 64))
def test_remedies_name_working_values(value, step):
    for text in multiples(value, step).split(" or "):
        assert not text or int(text) % step == 0 and int(text) > 0
    assert closest(value, divisors(step)) or value == step == 1


EXPERT, SHARDS = "expert_model_parallel_size", "expert_tensor_parallel_size"


def mixture(degrees: dict, tp: int, experts: int) -> Config:
    shape = {"num_experts": experts, "moe_ffn_hidden_size": 66}
    return make(
        model={**shape, "swiglu": True, "disable_bias_linear": True},
        parallel={"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1, **degrees},
        train={"global_batch_size": 48},
    )


def followed(degrees: dict, remedy: str) -> list[dict]:
    """The degrees of experts after each way to do what a remedy says."""
    flag, wanted = remedy.split(" ", 1)
    setting = flag.strip("-").replace("-", "_")
    if sizes := re.fullmatch(r"Use (\d+)(?: or (\d+))?", wanted):
        return [{**degrees, setting: int(size)} for size in sizes.groups() if size]
    assert wanted.startswith(("Leave it out", "Leave --expert-tensor-parallel-size out"))
    gone = setting if wanted.startswith("Leave it out") else SHARDS
    return [{name: size for name, size in degrees.items() if name != gone}]


@pytest.mark.parametrize("world", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("tp", [1, 2])
def test_remedies_for_degrees_of_experts_lead_to_a_layout_and_in_no_circle(world, tp):
    """Numbers of ranks, of experts and of features each rule out other degrees."""
    asked = itertools.product((2, 3, 4, 6), (None, 1, 2, 3, 4), (4, 6))
    starts = [({EXPERT: ep, SHARDS: etp}, experts) for ep, etp, experts in asked]
    starts += [({SHARDS: etp}, experts) for etp in (2, 3, 4) for experts in (4, 6)]
    refused = 0
    for degrees, experts in starts:
        ways = [{name: size for name, size in degrees.items() if size is not None}]
        for _ in range(4):
            errors = [(way, refused_by(mixture(way, tp, experts), world)) for way in ways]
            errors = [(way, error) for way, error in errors if error is not None]
            refused += len(errors)
            ways = [after for way, error in errors for after in followed(way, error)]
        assert not ways, (degrees, experts, errors)
    assert refused > 10


def refused_by(config: Config, world: int) -> str | None:
    try:
        config.validate(world)
    except ConfigError as error:
        assert error.what in ("--expert-model-parallel-size", "--expert-tensor-parallel-size")
        return f"{error.what} {error.remedy}"
    return None


SECTIONS = (ParallelConfig, TrainConfig, OptimizerConfig, ModelConfig, HFCheckpointConfig)
NEEDING = [
    (section, row, needs)
    for section in SECTIONS
    for row in dataclasses.fields(section)
    if (given := row.metadata.get("needs"))
    for needs in (given if isinstance(given, tuple) else (given,))
]


@pytest.mark.parametrize(
    ("section", "row", "needs"),
    NEEDING,
    ids=[f"{row.name}-{needs.name}" for _, row, needs in NEEDING],
)
def test_a_setting_needs_another_of_its_section_with_a_value_that_it_can_have(section, row, needs):
    (other,) = (field for field in dataclasses.fields(section) if field.name == needs.name)
    assert set(needs.values) <= set(other.metadata.get("choices", ()))
    assert row.default is not dataclasses.MISSING
    enough = needs.values[0] if needs.values else True
    assert needs.missing(enough) is None
    if other.default not in needs.values:
        reason, remedy = needs.missing(other.default)
        assert reason.startswith("has ") and "{" not in reason and remedy


REFUSED_CHOICES = [
    (section, row, value)
    for section in SECTIONS
    for row in dataclasses.fields(section)
    for value in row.metadata.get("not_yet", ())
]


@pytest.mark.parametrize(
    ("section", "row", "value"),
    REFUSED_CHOICES,
    ids=[f"{row.name}-{value}" for _, row, value in REFUSED_CHOICES],
)
def test_a_choice_that_is_not_there_yet_is_refused(section, row, value):
    with pytest.raises(ConfigError, match="does not have yet|Use"):
        checked(section, row, value)
