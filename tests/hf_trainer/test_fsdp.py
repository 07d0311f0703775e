"""``fsdp`` and ``fsdp_config`` of transformers: read as a sharding strategy, or refused by name."""

import dataclasses
import json

import pytest
from transformers.trainer_utils import FSDPOption

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.engine import wishes

PARAMS, GRADS = "optim_grads_params", "optim_grads"


def arguments(**named) -> MerakArguments:
    return MerakArguments("unused", use_cpu=True, report_to="none", **named)


@pytest.mark.parametrize(
    ("fsdp", "config", "sharding"),
    [
        (None, None, None),
        ("", {"min_num_params": 0, "xla": False, "xla_fsdp_grad_ckpt": False}, None),
        (True, None, PARAMS),
        (True, {"reshard_after_forward": False}, GRADS),
        (True, {"fsdp_reshard_after_forward": "shard_grad_op", "version": 1}, GRADS),
        ("full_shard", {"reshard_after_forward": "true"}, PARAMS),
        (
            "full_shard auto_wrap",
            {"transformer_layer_cls_to_wrap": ["GPT2Block"], "fsdp_version": 2},
            PARAMS,
        ),
        (
            [FSDPOption.SHARD_GRAD_OP, "auto_wrap"],
            {"fsdp_forward_prefetch": True, "use_orig_params": False},
            GRADS,
        ),
        (
            "no_shard",
            {"state_dict_type": "FULL_STATE_DICT", "cpu_offload": False, "backward_prefetch": "x"},
            "no_shard",
        ),
        ("hybrid_shard", {"reshard_after_forward": True}, PARAMS),
        ([FSDPOption.HYBRID_SHARD_ZERO2, "auto_wrap"], {"reshard_after_forward": "false"}, GRADS),
        (True, {"reshard_after_forward": "hybrid_shard"}, PARAMS),
        ("shard_grad_op", '{"limit_all_gathers": "true", "cpu_offload": "False"}', GRADS),
    ],
)
def test_what_fsdp_means(fsdp, config, sharding):
    args = arguments(fsdp=fsdp, fsdp_config=config)
    assert args.sharding == sharding and not args.recomputes
    assert wishes(args)["request"].parallel.sharding == (sharding or "no_shard")
    assert args.fsdp == fsdp, "a script may ask for it"
    assert dataclasses.replace(args, fsdp="shard_grad_op", fsdp_config=None).sharding == GRADS


def test_strategies_and_their_older_name_are_arguments_too(tmp_path):
    assert arguments(use_distributed_optimizer=True).sharding == "optim"
    both = arguments(
        use_distributed_optimizer=True, fsdp="full_shard", data_parallel_sharding_strategy=PARAMS
    )
    assert both.sharding == PARAMS
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"activation_checkpointing": True, "reshard_after_forward": False}))
    filed = arguments(fsdp=True, fsdp_config=str(path))
    assert filed.sharding == GRADS and filed.recompute_granularity == "full"
    filed.fsdp_config = {"xla": True}
    with pytest.raises(ConfigError, match="xla"):
        wishes(filed)


@pytest.mark.parametrize(
    ("fsdp", "config"),
    [
        ("full_shard offload", None),
        ([FSDPOption.FULL_SHARD, FSDPOption.OFFLOAD, "auto_wrap"], None),
        (True, {"cpu_offload": True}),
        ("full_shard", {"fsdp_offload_params": "true"}),
    ],
)
def test_offload_is_of_all_model_states(fsdp, config):
    args = arguments(fsdp=fsdp, fsdp_config=config)
    parallel = wishes(args)["request"].parallel
    assert parallel.offload_model_states and args.sharding == parallel.sharding == PARAMS
    other = dataclasses.replace(args, fsdp="full_shard", fsdp_config=None)
    assert not wishes(other)["request"].parallel.offload_model_states
    by_name = arguments(offload_model_states=True)
    assert by_name.offloads_model_states and by_name.sharding == PARAMS


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (
            {"fsdp": "hybrid_shard full_shard"},
            "fsdp 'hybrid_shard full_shard': it names 2 strategies",
        ),
        (
            {"fsdp": "hybrid_shard offload"},
            "fsdp: offload .*: with hybrid_shard devices keep weights, .* Use full_shard",
        ),
        (
            {"fsdp": "hybrid_shard", "fsdp_config": {"reshard_after_forward": False}},
            "reshard_after_forward False: fsdp is hybrid_shard",
        ),
        (
            {"fsdp": "offload"},
            "fsdp 'offload': it names no strategy",
        ),
        (
            {"offload_model_states": True, "fsdp": "shard_grad_op"},
            "offload_model_states True: it is for optim_grads_params, and other arguments request",
        ),
        (
            {"offload_model_states": True, "use_distributed_optimizer": True},
            "use_distributed_optimizer True: ",
        ),
        ({"fsdp_config": {"cpu_offload": True}}, "cpu_offload True: fsdp is not set"),
        ({"fsdp": "auto_wrap"}, "fsdp 'auto_wrap': it names no strategy. Use one of full_shard"),
        ({"fsdp": "full_shard no_shard"}, "fsdp 'full_shard no_shard': it names 2 strategies"),
        ({"fsdp": "sharded"}, "fsdp 'sharded': there is no option sharded"),
        (
            {"fsdp_config": {"reshard_after_forward": True}},
            "reshard_after_forward True: fsdp is not set",
        ),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"cpu_offload": True}},
            "fsdp_config: cpu_offload .*: with shard_grad_op",
        ),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_mixed_precision_policy": "bf16"}},
            "fsdp_mixed_precision_policy 'bf16'",
        ),
        (
            {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
            "Use FULL_STATE_DICT",
        ),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "fsdp_config: xla True: XLA is not used"),
        (
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": "maybe"}},
            "'maybe': it is neither true nor false",
        ),
        (
            {"fsdp": True, "fsdp_config": {"colour": 1}},
            "fsdp_config: colour 1: there is no such key here",
        ),
        (
            {"fsdp": True, "fsdp_config": "nowhere.json"},
            "fsdp_config nowhere.json: it cannot be read",
        ),
        ({"fsdp": True, "fsdp_config": ["x"]}, "it is not a mapping"),
        (
            {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}},
            "fsdp_config: reshard_after_forward True: fsdp is shard_grad_op",
        ),
        (
            {"fsdp": "full_shard", "data_parallel_sharding_strategy": GRADS},
            "data_parallel_sharding_strategy optim_grads: fsdp full_shard means optim_grads_params",
        ),
        (
            {"fsdp": "no_shard", "use_distributed_optimizer": True},
            "use_distributed_optimizer True: no_shard replicates",
        ),
        (
            {"data_parallel_sharding_strategy": "zero3"},
            "data_parallel_sharding_strategy 'zero3': it is not one of the choices",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(named, told):
    with pytest.raises(ConfigError, match=told):
        arguments(**named)
