"""The configuration: derived values, what is refused and in which words, and the JSON round trip."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_merak.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    HFCheckpointConfig,
    HFConfig,
    HFModelConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_merak.config.checks import closest, divisors, multiples
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import ConfigError

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32, "vocab_size": 1000}


def make(*, model=None, parallel=None, train=None, optimizer=None, data=None, checkpoint=None) -> Config:
    return Config(
        model=ModelConfig(**{**MODEL, **(model or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**{"micro_batch_size": 2, "train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        data=DataConfig(**{"mock_data": True, **(data or {})}),
        checkpoint=CheckpointConfig(**(checkpoint or {})),
    )


def refusal(sections: dict, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**sections).validate(world_size)
    return str(caught.value)


def test_derived_model_values():
    model = ModelConfig(**MODEL)
    assert (model.ffn_size, model.head_dim, model.query_groups, model.max_positions) == (256, 8, 8, 32)
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
    assert (llama.ffn_size, llama.head_dim, llama.query_groups, llama.max_positions) == (1344, 128, 2, 99)
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
    with pytest.raises(ConfigError, match=r"--vocab-size \(unset\): is needed to size the embedding"):
        ModelConfig(**{**MODEL, "vocab_size": None}).padded_vocab_size(1)


def test_batch_arithmetic():
    config = make(
        parallel={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, train={"global_batch_size": 24}
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
    ({"model": {"kv_channels": 16, "hidden_size": 63}, "parallel": {"tensor_model_parallel_size": 4}}, 4),
    (
        {
            "model": {"group_query_attention": True, "num_query_groups": 2},
            "parallel": {"tensor_model_parallel_size": 2},
        },
        8,
    ),
    ({"parallel": {"pipeline_model_parallel_size": 6}}, 6),
    ({"model": {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0}}, 1),
    ({"train": {"skip_train": True, "train_iters": None}, "optimizer": {"lr": None}}, 1),
    ({"optimizer": {"lr_warmup_iters": 9}}, 1),
    ({"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 10}}, 1),
    ({"optimizer": {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1}}, 1),
    ({"data": {"mock_data": False, "data_path": ["1", "a", "2", "b"], "tokenizer_type": "NullTokenizer"}}, 1),
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
    ({"checkpoint": {"save": "c", "save_interval": 5, "save_retain_interval": 10, "load": "c", "finetune": True}}, 1),
]


@pytest.mark.parametrize("sections, world_size", VALID)
def test_valid_combinations_pass(sections, world_size):
    make(**sections).validate(world_size)


def test_sequence_parallelism_of_one_rank_is_ignored_and_told():
    alone = make(parallel={"sequence_parallel": True})
    alone.validate(1)
    assert alone.ignored() == ("--sequence-parallel has no effect: --tensor-model-parallel-size is 1.",)
    assert make(parallel={"sequence_parallel": True, TP: 2}).ignored() == make().ignored() == ()


def test_overlap_within_one_rank_is_ignored_and_told():
    told = ("--tp-comm-overlap pair has no effect: --tensor-model-parallel-size is 1.",)
    assert make(parallel={"tp_comm_overlap": "pair"}).ignored() == told
    assert make(parallel={"tp_comm_overlap": "pair", TP: 2}).ignored() == ()
    assert make(parallel={"tp_comm_overlap": "auto"}).ignored() == ()


def test_replicas_are_divided_into_instances_that_shard():
    zero, count = {"use_distributed_optimizer": True}, "num_distributed_optimizer_instances"

    def told(instances, ranks=16, tp=2, **parallel):
        return refusal({"parallel": {count: instances, TP: tp, **(parallel or zero)}}, ranks)

    assert make(parallel={count: 4, TP: 2, **zero}, train={"global_batch_size": 16}).validate(16) is None
    flag = "--num-distributed-optimizer-instances"
    assert told(3) == f"{flag} 3: does not divide the 8 data-parallel ranks. Use 2 or 4."
    assert told(16) == f"{flag} 16: does not divide the 8 data-parallel ranks. Use 4."
    assert told(8).startswith(f"{flag} 8: an instance would be one of the 8 data-parallel ranks, which shards nothing.")
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


FULL = {"recompute_granularity": "full"}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
REFUSED = [
    (
        {"parallel": {"recompute_method": "block"}},
        1,
        "--recompute-method block: has no effect without --recompute-granularity full. "
        "Add --recompute-granularity full, or leave it out.",
    ),
    (
        {"parallel": FULL | {"recompute_method": "block"}},
        1,
        "--recompute-num-layers (missing): is needed with --recompute-method block. Give a number of layers.",
    ),
    (
        {"parallel": FULL | {"recompute_num_layers": 2}},
        1,
        "--recompute-num-layers 2: has an effect only with --recompute-method uniform or block. Choose one of them, "
        "or leave it out.",
    ),
    (
        {"model": {"hidden_size": 65}},
        1,
        "--hidden-size 65: is not a multiple of --num-attention-heads 8. Use 64 or 72, or give --kv-channels.",
    ),
    (
        {"model": {"hidden_size": 5}},
        1,
        "--hidden-size 5: is not a multiple of --num-attention-heads 8. Use 8, or give --kv-channels.",
    ),
    (
        {"model": {"hidden_size": 16, "swiglu": True}},
        1,
        "--hidden-size 16: gives --swiglu an MLP of width 0. Give --ffn-hidden-size.",
    ),
    (
        {"model": {"num_query_groups": 2}},
        1,
        "--num-query-groups 2: has no effect without --group-query-attention. "
        "Add --group-query-attention, or leave --num-query-groups out.",
    ),
    (
        {"model": {"num_query_groups": 3, "group_query_attention": True}},
        1,
        "--num-query-groups 3: does not divide --num-attention-heads 8. Use 2 or 4.",
    ),
    (
        {"model": {"num_query_groups": 16, "group_query_attention": True}},
        1,
        "--num-query-groups 16: does not divide --num-attention-heads 8. Use 8.",
    ),
    (
        {"model": {"max_position_embeddings": 16}},
        1,
        "--seq-length 32: exceeds --max-position-embeddings 16. Use at most 16, or raise --max-position-embeddings.",
    ),
    (
        {"model": {"rotary_base": 500000}},
        1,
        "--rotary-base 500000: has no effect without rotary embedding. "
        "Add --position-embedding-type rope, or leave it out.",
    ),
    (
        {"model": {"use_rope_scaling": True}},
        1,
        "--use-rope-scaling True: has no effect without rotary embedding. "
        "Add --position-embedding-type rope, or leave it out.",
    ),
    (
        {"model": {"position_embedding_type": "rope", "rope_scaling_factor": 4.0}},
        1,
        "--rope-scaling-factor 4.0: has no effect without scaling. Add --use-rope-scaling, or leave it out.",
    ),
    (
        {"model": {"position_embedding_type": "rope", "rotary_percent": 0.4}},
        1,
        "--rotary-percent 0.4: rotates 3 of a head's 8 channels, an odd number or none. "
        "Change it, --kv-channels or --num-attention-heads.",
    ),
    ({"parallel": {TP: 3}}, 3, "--tensor-model-parallel-size 3: does not divide --num-attention-heads 8. Use 2 or 4."),
    ({"parallel": {TP: 16}}, 16, "--tensor-model-parallel-size 16: does not divide --num-attention-heads 8. Use 8."),
    (
        {"model": {"ffn_hidden_size": 30}, "parallel": {TP: 4}},
        4,
        "--tensor-model-parallel-size 4: does not divide the MLP width 30. Use 2.",
    ),
    (
        {
            "model": {
                "num_attention_heads": 12,
                "kv_channels": 8,
                "num_query_groups": 6,
                "group_query_attention": True,
            },
            "parallel": {TP: 4},
        },
        4,
        "--tensor-model-parallel-size 4: does not divide --num-query-groups 6. Use 2.",
    ),
    (
        {"parallel": {PP: 7}},
        7,
        "--pipeline-model-parallel-size 7: is more stages than the 6 units "
        "(embedding, 4 layers, output head). Use at most 6.",
    ),
    (
        {"parallel": {TP: 2, PP: 2}},
        6,
        "the number of ranks 6: is not a multiple of --tensor-model-parallel-size 2 "
        "x --pipeline-model-parallel-size 2 = 4. Start 4 or 8 ranks, or change the degrees.",
    ),
    (
        {"parallel": {TP: 2}},
        1,
        "the number of ranks 1: is not a multiple of --tensor-model-parallel-size 2 "
        "x --pipeline-model-parallel-size 1 = 2. Start 2 ranks, or change the degrees.",
    ),
    (
        {"train": {"global_batch_size": 10}},
        2,
        "--global-batch-size 10: is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4. Use 8 or 12.",
    ),
    (
        {"train": {"global_batch_size": 2}},
        2,
        "--global-batch-size 2: is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4. Use 4.",
    ),
    (
        {"train": {"train_iters": None}},
        1,
        "--train-iters (missing): is needed to train. Give it, --train-samples or --skip-train.",
    ),
    (
        {"optimizer": {"lr": None}},
        1,
        "--lr (missing): is needed to train. Give the peak learning rate, or --skip-train.",
    ),
    ({"optimizer": {"min_lr": 0.01}}, 1, "--min-lr 0.01: exceeds --lr 0.001. Use at most 0.001."),
    ({"optimizer": {"lr_warmup_init": 0.01}}, 1, "--lr-warmup-init 0.01: exceeds --lr 0.001. Use at most 0.001."),
    (
        {"optimizer": {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}},
        1,
        "--lr-warmup-fraction 0.1: contradicts --lr-warmup-iters. Give only one of them.",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 10}},
        1,
        "--lr-warmup-iters 10: leaves nothing of the 10 decay iterations. Use at most 9, or raise --lr-decay-iters.",
    ),
    (
        {"optimizer": {"lr_wsd_decay_iters": 5}},
        1,
        "--lr-wsd-decay-iters 5: has no effect without "
        "--lr-decay-style WSD. Add --lr-decay-style WSD, or leave it out.",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD"}},
        1,
        "--lr-wsd-decay-iters (missing): is needed with --lr-decay-style WSD. Give the length of the final decay.",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}},
        1,
        "--lr-wsd-decay-iters 11: exceeds the 10 decay iterations. Use at most 10.",
    ),
    (
        {"optimizer": {"end_weight_decay": 0.2}},
        1,
        "--end-weight-decay 0.2: has no effect while "
        "--weight-decay-incr-style is constant. Use --weight-decay-incr-style linear or cosine, or leave it out.",
    ),
    (
        {"optimizer": {"weight_decay_incr_style": "linear"}},
        1,
        "--start-weight-decay (missing): is needed with --weight-decay-incr-style linear. Give it.",
    ),
    (
        {"optimizer": {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1}},
        1,
        "--end-weight-decay 0.1: is below --start-weight-decay 0.2. Use at least 0.2.",
    ),
    (
        {"data": {"mock_data": False}},
        1,
        "--data-path (missing): there is no data to train on. Give --data-path, --train-data-path or --mock-data.",
    ),
    ({"data": {"data_path": ("a",)}}, 1, "--data-path (given): contradicts --mock-data. Give only one source of data."),
    (
        {"data": {"mock_data": False, "data_path": ("a",), "test_data_path": ("b",)}},
        1,
        "--data-path (given): contradicts --test-data-path. Give only one source of data.",
    ),
    (
        {"data": {"mock_data": False, "train_data_path": ("a",), "split": "1"}},
        1,
        "--split '1': has no effect on data given part by part. Leave it out, or use --data-path.",
    ),
    (
        {"data": {"split": "1, x"}},
        1,
        "--split '1, x': is not a list of one to three weights separated by commas. Write it like '969, 30, 1'.",
    ),
    ({"data": {"split": "0,0"}}, 1, "--split '0,0': gives every part weight 0. Write it like '969, 30, 1'."),
    (
        {"data": {"tokenizer_type": "HuggingFaceTokenizer"}},
        1,
        "--tokenizer-model (missing): is needed with "
        "--tokenizer-type HuggingFaceTokenizer. Give the tokenizer's directory or tokenizer.json.",
    ),
    (
        {"data": {"tokenizer_model": "t"}},
        1,
        "--tokenizer-model t: is read only by a HuggingFaceTokenizer. "
        "Add --tokenizer-type HuggingFaceTokenizer, or leave it out.",
    ),
    (
        {"model": {"vocab_size": None}, "data": {"tokenizer_type": "NullTokenizer"}},
        1,
        "--vocab-size (missing): is needed with --tokenizer-type NullTokenizer. "
        "Give the number of token ids in the data.",
    ),
    (
        {"data": {"mock_data": False, "data_path": ("a",)}},
        1,
        "--tokenizer-type (missing): is needed to know the "
        "vocabulary. Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer with --vocab-size.",
    ),
    (
        {"model": {"seq_length": 30}, "parallel": {TP: 4, "sequence_parallel": True}},
        4,
        "--seq-length 30: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Use 28 or 32, or leave --sequence-parallel out.",
    ),
    (
        {
            "model": {"seq_length": 30, "max_position_embeddings": 31},
            "parallel": {TP: 4, "sequence_parallel": True},
        },
        4,
        "--seq-length 30: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Use 28, or leave --sequence-parallel out.",
    ),
    (
        {
            "model": {"seq_length": 3, "max_position_embeddings": 3},
            "parallel": {TP: 4, "sequence_parallel": True},
        },
        4,
        "--seq-length 3: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Leave --sequence-parallel out.",
    ),
    (
        {"parallel": {"distributed_backend": "mpi"}, "train": {"bf16": True}},
        1,
        "--bf16 True: torch's MPI backend has no 16-bit numbers. Leave it out, or use --distributed-backend gloo.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-xp"}},
        1,
        "--rank-order tp-dp-xp: there is no axis xp. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp "
        "or tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp"}},
        1,
        "--rank-order tp-dp: pp is missing. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp or "
        "tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-pp-dp"}},
        1,
        "--rank-order tp-dp-pp-dp: dp is named twice. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp "
        "or tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-pp", "use_tp_pp_dp_mapping": True}},
        1,
        "--rank-order tp-dp-pp: contradicts --use-tp-pp-dp-mapping, which is tp-cp-pp-dp. Give only one of them.",
    ),
    (
        {"checkpoint": {"save_interval": 5}},
        1,
        "--save-interval 5: has no effect without --save. Give --save DIRECTORY, or leave it out.",
    ),
    (
        {"checkpoint": {"ckpt_step": 0}},
        1,
        "--ckpt-step 0: has no effect without --load. Give --load DIRECTORY, or leave it out.",
    ),
    (
        {"checkpoint": {"save": "c", "save_interval": 5, "save_retain_interval": 12}},
        1,
        "--save-retain-interval 12: is not a multiple of --save-interval 5. Use 10 or 15.",
    ),
    (
        {"checkpoint": {"save": "c", "save_retain_interval": 12}},
        1,
        "--save-retain-interval 12: is not a multiple of --save-interval None. Give --save-interval.",
    ),
]


@pytest.mark.parametrize("sections, world_size, message", REFUSED, ids=[row[2].split(".")[0] for row in REFUSED])
def test_refused_combinations(sections, world_size, message):
    assert refusal(sections, world_size) == message


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"model": {"num_layers": 0}}, "--num-layers 0: is out of range. Use a value at least 1 and at most 65536."),
        ({"checkpoint": {"save": ""}}, "--save '': is empty. Give a value, or leave the flag out."),
        ({"data": {"data_path": ["", "x"]}}, "--data-path ('', 'x'): is empty. Give a value, or leave the flag out."),
        ({"model": {"num_layers": 2.0}}, "--num-layers 2.0: is not a whole number. Give a whole number."),
        ({"model": {"num_layers": True}}, "--num-layers True: is not a whole number. Give a whole number."),
        ({"model": {"num_layers": None}}, "--num-layers None: is not a whole number. Give a whole number."),
        (
            {"model": {"hidden_dropout": 1}},
            "--hidden-dropout 1.0: is out of range. Use a value at least 0 and below 1.",
        ),
        ({"model": {"swiglu": 1}}, "--swiglu 1: is not true or false. Give true or false."),
        (
            {"model": {"normalization": "BatchNorm"}},
            "--normalization BatchNorm: is not one of the choices. Use LayerNorm or RMSNorm.",
        ),
        (
            {"model": {"position_embedding_type": "yarn"}},
            "--position-embedding-type yarn: is a choice of Megatron-LM that "
            "megatron_merak does not have yet. Use learned_absolute or rope or none.",
        ),
        (
            {"parallel": {"recompute_granularity": "partial"}},
            "--recompute-granularity partial: is not one of the choices. Use full or selective, or leave the flag out.",
        ),
        ({"optimizer": {"lr": math.nan}}, "--lr nan: is not a finite number. Give a finite number."),
        ({"optimizer": {"lr": 0}}, "--lr 0.0: is out of range. Use a value above 0."),
        ({"optimizer": {"lr": "1e-3"}}, "--lr '1e-3': is not a number. Give a number."),
        ({"optimizer": {"lr": 10**400}}, f"--lr {10**400}: is not a number. Give a number."),
        (
            {"train": {"seed": 2**32}},
            "--seed 4294967296: is out of range. Use a value at least 0 and at most 4294967295.",
        ),
        ({"data": {"data_path": "a"}}, "--data-path 'a': is not a list of texts. Give a list of texts."),
        ({"data": {"data_path": [1, "a"]}}, "--data-path (1, 'a'): is not a list of texts. Give a list of texts."),
    ],
)
def test_refused_values(sections, message):
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    assert str(caught.value) == message


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
        ({"train": {"micro_batch_size": "1"}}, "--micro-batch-size '1': is not a whole number. Give a whole number."),
    ],
)
def test_damaged_dictionaries(change, message):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({**make().to_dict(), **change})
    assert str(caught.value).startswith(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
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


HF_MODEL = {"model": "directory", "seq_length": 32}


def make_hf(*, model=None, parallel=None, train=None, optimizer=None, data=None, checkpoint=None) -> HFConfig:
    return HFConfig(
        model=HFModelConfig(**{**HF_MODEL, **(model or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        train=TrainConfig(**{"micro_batch_size": 2, "train_iters": 10, **(train or {})}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, **(optimizer or {})}),
        data=DataConfig(**{"mock_data": True, **(data or {})}),
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
    ],
)
def test_the_directory_of_a_captured_model_knows_its_vocabulary_and_tokenizer(data):
    make_hf(data=data, parallel={TP: 2, PP: 40}, checkpoint={"save_hf": "out"}).validate(80)


@pytest.mark.parametrize(
    "sections, world_size, message",
    [
        ({"parallel": {TP: 2}}, 3, "the number of ranks 3: is not a multiple of --tensor-model-parallel-size 2"),
        ({"data": {"mock_data": False}}, 1, "--data-path (missing): there is no data to train on"),
        ({"data": {"tokenizer_model": "t"}}, 1, "--tokenizer-model t: is read only by a HuggingFaceTokenizer"),
        ({"train": {"global_batch_size": 3}}, 1, "--global-batch-size 3: is not a multiple"),
        ({"optimizer": {"lr": None}}, 1, "--lr (missing)"),
        ({"checkpoint": {"save_interval": 2}}, 1, "--save-interval 2: has no effect without --save"),
        (
            {"parallel": {TP: 2, "sequence_parallel": True}},
            2,
            "--sequence-parallel True: is only supported for native models",
        ),
    ],
)
def test_a_run_of_a_captured_model_is_checked_like_any_other(sections, world_size, message):
    with pytest.raises(ConfigError) as caught:
        make_hf(**sections).validate(world_size)
    assert str(caught.value).startswith(message)


def test_a_captured_run_survives_json():
    config = make_hf(data={"data_path": ["1", "a"], "mock_data": False}, checkpoint={"save_hf": "x"})
    assert HFConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
