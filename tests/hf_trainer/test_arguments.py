"""MerakArguments: every field of TrainingArguments is honoured or refused by name."""

import ast
import dataclasses
import inspect
import json
import sys
import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from megatron_merak.config import (
    CheckpointConfig,
    HFModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron_merak.errors import ConfigError, LaunchError
from megatron_merak.hf_trainer.arguments.fields import HONOURED, NEWER, REFUSED
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.arguments.shared import SHARED, SharedArguments
from megatron_merak.hf_trainer.engine import wishes

LACKING = NEWER - {field.name for field in dataclasses.fields(TrainingArguments)}


def test_every_field_is_honoured_or_refused():
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names | LACKING == HONOURED | REFUSED.keys()
    assert not HONOURED & REFUSED.keys()


def test_defaults_are_those_of_transformers():
    ours = {field.name: field.default for field in dataclasses.fields(MerakArguments)}
    for field in dataclasses.fields(TrainingArguments):
        assert ours[field.name] == field.default


OTHER = {"debug": "underflow_overflow", "average_tokens_across_devices": False}


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - LACKING))
def test_refused_fields_are_told_with_a_remedy(name):
    (field,) = (field for field in dataclasses.fields(TrainingArguments) if field.name == name)
    value = OTHER.get(name, not field.default if isinstance(field.default, bool) else "something")
    with pytest.raises(ConfigError) as told:
        MerakArguments("unused", **{name: value})
    assert told.value.what == name and told.value.remedy == REFUSED[name][1]


def test_either_name_of_recomputation_counts():
    """Older releases of transformers have one of them."""
    assert not MerakArguments("unused", use_cpu=True).recomputes
    for name in {"activation_checkpointing", "gradient_checkpointing"} - LACKING:
        assert MerakArguments("unused", use_cpu=True, **{name: True}).recomputes
    assert MerakArguments.recomputes.fget(SimpleNamespace(gradient_checkpointing=True))


def test_harmless_values_of_refused_fields_pass():
    """A script for Trainer may name them all."""
    plain = {
        "fp16": False,
        "deepspeed": None,
        "fsdp": "",
        "optim": "adamw_torch",
        "push_to_hub": False,
        "debug": "",
    }
    args = MerakArguments(
        "unused", use_cpu=True, label_smoothing_factor=0, ddp_find_unused_parameters=False, **plain
    )
    assert args.per_device_train_batch_size == 8


WITHOUT_EFFECT = [
    {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 50, "ddp_static_graph": True},
    {
        "ddp_broadcast_buffers": True,
        "torch_empty_cache_steps": 5,
        "dataloader_persistent_workers": True,
    },
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": true}'},
    {
        "accelerator_config": {
            "dispatch_batches": False,
            "gradient_accumulation_kwargs": {"sync_each_batch": True},
        }
    },
    {"accelerator_config": AcceleratorConfig(non_blocking=True)},
]


@pytest.mark.parametrize("named", WITHOUT_EFFECT)
def test_what_changes_no_number_is_taken(named):
    args, plain = (MerakArguments("unused", use_cpu=True, **given) for given in (named, {}))
    assert all(
        getattr(args, name) == value or isinstance(value, str) for name, value in named.items()
    )
    asked, usual = wishes(args), wishes(plain)
    recomputing = replace(
        usual["request"].parallel, recompute_granularity=args.recompute_granularity
    )
    assert asked == usual | {"request": replace(usual["request"], parallel=recomputing)}
    assert dataclasses.replace(args, seed=3).seed == 3
    json.dumps(args.to_dict())


@pytest.mark.parametrize("name", ["torch_compile", "torch_compile_backend", "torch_compile_mode"])
def test_a_compilation_that_is_not_done_is_told_once(name):
    value = {"torch_compile": True}.get(name, "inductor")
    with pytest.warns(UserWarning, match=f"{name}: torch.compile is not called") as told:
        args = MerakArguments("unused", use_cpu=True, **{name: value})
    assert len(told) == 1 and getattr(args, name) == value


def test_a_misspelt_field_is_told():
    with pytest.raises(ConfigError, match="Did you mean learning_rate"):
        MerakArguments("unused", learning_rte=1e-3)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size 0"),
        ({"learning_rate": -1.0}, "learning_rate -1.0"),
        ({"learning_rate": "fast"}, "learning_rate 'fast'"),
        ({"eval_strategy": "sometimes"}, "sometimes"),
        ({"logging_steps": 0}, "logging"),
        ({"tensor_model_parallel_size": 2}, "world size 1"),
        ({"pipeline_schedule": "zigzag"}, "pipeline_schedule"),
        ({"graph_sharding": "magic"}, "graph_sharding"),
        ({"length_buckets": "a,b"}, "length_buckets"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"warmup_ratio": 1.5}, "warmup_ratio"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"ddp_backend": "ucc"}, "ddp_backend"),
        ({"rank_order": "tp-pp"}, "rank_order tp-pp: dp is missing. Join tp, dp and pp"),
        ({"rank_order": ("tp", "pp", "dp")}, "rank_order .*: it is not text"),
        ({"ddp_backend": "gloo_cuda"}, "ddp_backend gloo_cuda: use_cpu is set"),
        (
            {
                "load_best_model_at_end": True,
                "save_only_model": True,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
            },
            "save_only_model",
        ),
        ({"load_best_model_at_end": True}, "strategy"),
        ({"optim": "adam_cubed"}, "adam_cubed"),
        (
            {"optim": "adamw_8bit"},
            "optim adamw_8bit: its state is quantised.*use_distributed_optimizer",
        ),
        ({"optim": "adamw_torch_4bit"}, "optim adamw_torch_4bit: its state is quantised"),
        ({"optim": "paged_lion_8bit"}, "optim paged_lion_8bit: its state is quantised"),
        ({"optim": "paged_adamw_32bit"}, "optim paged_adamw_32bit: its state is paged"),
        ({"optim": "rmsprop_bnb_32bit"}, "optim rmsprop_bnb_32bit: .* Take adamw_torch, rmsprop"),
        ({"optim": "galore_adamw"}, "optim galore_adamw: it projects gradients to a low rank"),
        ({"optim": "apollo_adamw_layerwise"}, "optim apollo_adamw_layerwise: it projects"),
        ({"optim": "lomo"}, "optim lomo: it updates weights inside of the backward"),
        (
            {"optim": "schedule_free_adamw"},
            "optim schedule_free_adamw: its weights in an evaluation",
        ),
        ({"optim": "stable_adamw"}, "optim stable_adamw: .*torch-optimi"),
        ({"optim": "grokadamw"}, "optim grokadamw: .*grokadamw"),
        ({"optim": "adamw_anyprecision"}, "optim adamw_anyprecision: .*torchdistx"),
        (
            {"optim": "adamw_torch", "optim_args": "amsgrad=true"},
            "optim_args amsgrad=true: adamw_torch takes none",
        ),
        (
            {"optim": "sgd", "optim_args": "weight_decay=0.1"},
            "optim_args weight_decay=0.1: .* Set weight_decay",
        ),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args momentum: it is not key=value"),
        ({"optim": "muon", "optim_args": "ns_steps=few"}, "optim_args ns_steps=few"),
        (
            {"ddp_broadcast_buffers": False},
            "ddp_broadcast_buffers False: the first replica's buffers",
        ),
        (
            {"gradient_checkpointing_kwargs": {"context_fn": print}},
            "gradient_checkpointing_kwargs: context_fn",
        ),
        (
            {"gradient_checkpointing_kwargs": {"offload": True}},
            "gradient_checkpointing_kwargs: offload True",
        ),
        (
            {"accelerator_config": {"split_batches": True}},
            "accelerator_config: split_batches True: .*Divide per_dev",
        ),
        ({"accelerator_config": {"even_batches": False}}, "accelerator_config: even_batches False"),
        (
            {"accelerator_config": {"batches": 2}},
            "accelerator_config: batches 2: there is no such key",
        ),
        (
            {"accelerator_config": "nowhere.json"},
            "accelerator_config nowhere.json: it cannot be read",
        ),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "gradient_accumulation_kwargs: num_steps 4: gradient_accumulation_steps says it",
        ),
    ],
)
def test_mistakes_are_told(named, told):
    with pytest.raises(ConfigError, match=told):
        MerakArguments("unused", use_cpu=True, **named)


def test_mpi_is_refused_where_mpi4py_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match="backend mpi: mpi4py is not installed"):
        MerakArguments("unused", use_cpu=True, ddp_backend="mpi")


def test_warmup_ratio_is_warmup_steps_below_one():
    args = MerakArguments("unused", use_cpu=True, warmup_ratio=0.25)
    assert args.get_warmup_steps(100) == 25
    assert dataclasses.replace(args, seed=1).get_warmup_steps(100) == 25


def test_as_text_and_as_flags():
    args = MerakArguments("out", use_cpu=True, lr_scheduler_type="cosine", length_buckets="32,8")
    told = args.to_dict()
    assert json.loads(json.dumps(told))["lr_scheduler_type"] == "cosine"
    assert told["tensor_model_parallel_size"] == 1
    assert "tensor_model_parallel_size=1" in str(args)
    assert args.buckets == (8, 32)
    flags = [
        "--output_dir",
        "out",
        "--pipeline_schedule",
        "gpipe",
        "--bf16",
        "--use_cpu",
        "--pad_to_multiple_of",
        "64",
    ]
    (parsed,) = HfArgumentParser(MerakArguments).parse_args_into_dataclasses(flags)
    assert (parsed.pipeline_schedule, parsed.bf16, parsed.pad_to_multiple_of) == ("gpipe", True, 64)


def test_the_place_in_the_job_is_known_before_any_trainer():
    args = MerakArguments("out", use_cpu=True)
    assert (args.world_size, args.process_index, args.device.type, args.should_save) == (
        1,
        0,
        "cpu",
        True,
    )
    assert args.train_batch_size == 8
    with args.main_process_first():
        pass


def test_fields_that_repeat_settings_have_their_defaults():
    ours = {field.name: field for field in dataclasses.fields(MerakArguments)}
    sections = (ParallelConfig, HFModelConfig, OptimizerConfig, TrainConfig, CheckpointConfig)
    for name, row in SHARED.items():
        (section,) = (section for section in sections if name in section.__dataclass_fields__)
        assert ours[name].default == row.default
        assert typing.get_type_hints(MerakArguments)[name] == typing.get_type_hints(section)[name]
        assert ours[name].metadata.keys() == {"help"} and "--" not in ours[name].metadata["help"]


def test_each_shared_argument_names_its_own_setting():
    (declared,) = ast.parse(inspect.getsource(SharedArguments)).body
    rows = [row for row in declared.body if isinstance(row, ast.AnnAssign)]
    assert (
        [row.target.id for row in rows] == [row.value.args[1].value for row in rows] == list(SHARED)
    )
