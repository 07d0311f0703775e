"""``deepspeed`` of transformers: a DeepSpeed configuration, read as what this library does, or
refused by name.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.deepspeed import scaler_of
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.engine import wishes
from megatron_merak.hf_trainer.run.rates import schedule
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.ranks import run_ranks

AUTO = "auto"
RATES = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
ADAM = {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}
# The configuration of transformers' documentation, of stage 3, with nothing offloaded.
DOCUMENTED = {
    "fp16": {
        **{"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        **{"hysteresis": 2, "min_loss_scale": 1},
    },
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": ADAM},
    "scheduler": {"type": "WarmupLR", "params": RATES},
    "zero_optimization": {
        **{
            "stage": 3,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "overlap_comm": True,
        },
        **{
            "offload_param": {"device": "none"},
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
        },
        **{
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_max_live_parameters": 1e9,
        },
        **{"stage3_param_persistence_threshold": AUTO, "stage3_max_reuse_distance": 1e9},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **{"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "steps_per_print": 2000},
    **{
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "wall_clock_breakdown": False,
    },
}


def arguments(config, **named) -> MerakArguments:
    return MerakArguments("unused", use_cpu=True, report_to="none", deepspeed=config, **named)


def of_stage(stage=2, **more):
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": AUTO, **more}


def zero(**more):
    return of_stage(zero_optimization={"stage": 3, **more})


@pytest.mark.parametrize("stage", range(4))
def test_the_stage_is_a_sharding_strategy(stage, tmp_path):
    wanted = ("no_shard", "optim", "optim_grads", "optim_grads_params")[stage]
    config = of_stage(stage)
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    for given in (config, json.dumps(config), str(path)):
        args = arguments(given)
        assert args.sharding == wanted and wishes(args)["request"].parallel.sharding == wanted
        assert args.deepspeed == given, "a script may ask for it"
        assert dataclasses.replace(args, deepspeed=None).sharding is None
        json.dumps(args.to_dict())


def test_the_documented_configuration_and_everything_without_effect_is_taken():
    args = arguments(
        DOCUMENTED, lr_scheduler_type="constant_with_warmup", data_parallel_sharding_strategy=None
    )
    assert args.sharding == "optim_grads_params" and not args.recomputes
    named = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_grad_norm": 0.5,
    }
    same = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
    }
    config = of_stage(
        1,
        **same,
        gradient_clipping=0.5,
        bf16={"enabled": True, "check_grad_overflow": True},
        optimizer={
            "type": "Adam",
            "params": {"lr": 2e-4, "betas": [0.9, 0.99], "eps": 1e-8, "adam_w_mode": True},
        },
        activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False},
        flops_profiler={"enabled": False, "profile_step": 1},
        compression_training={
            "weight_quantization": {"shared_parameters": {"enabled": False, "bits": 8}}
        },
        data_types={"grad_accum_dtype": "fp32"},
        tensor_parallel={"autotp_size": 1},
        aio={"block_size": 1048576},
        checkpoint={"tag_validation": "Warn"},
    )
    assert (
        arguments(config, bf16=True, learning_rate=2e-4, adam_beta2=0.99, **named).sharding
        == "optim"
    )


@pytest.mark.parametrize(
    ("config", "named", "told"),
    [
        (
            of_stage(train_micro_batch_size_per_gpu=4),
            {},
            "train_micro_batch_size_per_gpu 4: per_device_train.* is 8",
        ),
        (
            of_stage(gradient_accumulation_steps=2),
            {},
            "gradient_accumulation_steps 2: gradient_acc.* is 1",
        ),
        (
            of_stage(train_batch_size=9),
            {},
            "train_batch_size 9: .*size 8 x gradient.*steps 1 x 1 replicas is 8",
        ),
        (of_stage(gradient_clipping=0.3), {}, "gradient_clipping 0.3: max_grad_norm is 1.0"),
        (
            {"zero_optimization": {"stage": 1}},
            {},
            "without it DeepSpeed does not clip, and max_grad_norm is 1.0",
        ),
        (of_stage(bf16={"enabled": True}), {}, "bf16.enabled True: bf16 is False"),
        (of_stage(fp16={"enabled": False}), {"fp16": True}, "fp16.enabled False: fp16 is True"),
        (
            of_stage(fp16={"hysteresis": 0}),
            {"fp16": True},
            "fp16.hysteresis 0: it is not a valid number. Give 1 or more",
        ),
        (of_stage(fp16={"consecutive_hysteresis": True}), {}, "fp16.consecutive_hysteresis True"),
        (
            of_stage(optimizer={"type": "AdamW", "params": {**ADAM, "lr": 0.1}}),
            {},
            "params.lr 0.1: .* is 5e-05",
        ),
        (
            of_stage(optimizer={"type": "AdamW"}),
            {},
            "params.lr 0.001: .*5e-05, and DeepSpeed takes the former",
        ),
        (
            of_stage(optimizer={"type": "Adam", "params": {**ADAM, "betas": [0.8, 0.9]}}),
            {},
            r"betas \[0.8, 0.9\]",
        ),
        (
            of_stage(optimizer={"type": "Lion", "params": ADAM}),
            {},
            'optimizer.type Lion: .*set optim="lion_32bit"',
        ),
        (
            of_stage(optimizer={"type": "AdamW", "params": ADAM}),
            {"optim": "sgd"},
            "type AdamW: optim is sgd",
        ),
        (
            of_stage(optimizer={"type": "AdamW", "params": {**ADAM, "max_grad_norm": 1}}),
            {},
            "Set gradient_clipping",
        ),
        (
            of_stage(optimizer={"type": "Adam", "params": {**ADAM, "amsgrad": True}}),
            {},
            "params.amsgrad True",
        ),
        (
            of_stage(optimizer={"type": "Adam", "params": {**ADAM, "adam_w_mode": False}}),
            {"weight_decay": 0.1},
            "adam_w_mode False: only AdamW has weight decay",
        ),
        (
            of_stage(scheduler={"type": "OneCycle"}),
            {},
            "scheduler.type OneCycle: .*WarmupDecayLR.*lr_scheduler_type",
        ),
        (
            of_stage(scheduler={"type": "WarmupLR"}),
            {"lr_scheduler_type": "cosine"},
            "lr_scheduler_type is cosine",
        ),
        (
            of_stage(scheduler={"type": "WarmupLR", "params": {**RATES, "warmup_max_lr": 1.0}}),
            {},
            "warmup_max_lr 1.0: learning_rate is 5e-05",
        ),
        (
            of_stage(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}),
            {"max_steps": 9},
            "warmup_num_steps 5: the number of warmup_steps is 1",
        ),
        (
            of_stage(
                scheduler={"type": "WarmupDecayLR", "params": {**RATES, "total_num_steps": 5}}
            ),
            {"max_steps": 9},
            "total_num_steps 5: the number of steps of the run is 9",
        ),
        (of_stage(4), {}, "zero_optimization.stage 4: there is no such stage"),
        ({"gradient_clipping": AUTO}, {}, "zero_optimization None: it is missing"),
        (
            zero(offload_optimizer={"device": "cpu"}),
            {},
            "offload_optimizer cpu: .* are in host memory together. "
            "Set stage 3, offload_optimizer and offload_param, or neither",
        ),
        (zero(offload_param={"device": "nvme", "nvme_path": "x"}), {}, "offload_param nvme"),
        (
            zero(offload_optimizer={"device": "cpu"}, offload_param={"device": "nvme"}),
            {},
            "offload_param nvme: what is offloaded is in memory of the host. Use cpu",
        ),
        (
            zero(offload_optimizer={"device": "cpu", "ratio": 0.5}, offload_param="cpu"),
            {},
            "offload_optimizer.ratio 0.5: everything is offloaded",
        ),
        (zero(cpu_offload=True), {}, "zero_optimization.cpu_offload True"),
        (
            zero(zero_quantized_gradients=True),
            {},
            "zero_quantized_gradients True: .*grad_reduce_in_bf16",
        ),
        (zero(mics_shard_size=2), {}, "mics_shard_size 2: .*num_distributed_optimizer_instances"),
        (zero(stage3_colour=1), {}, "zero_optimization.stage3_colour 1: there is no such key here"),
        (
            of_stage(activation_checkpointing={"cpu_checkpointing": True}),
            {},
            "Leave it out, and set activation_ch",
        ),
        (
            of_stage(compression_training={"a": {"shared_parameters": {"enabled": True}}}),
            {},
            "it changes the model",
        ),
        (
            of_stage(curriculum_learning={"enabled": True}),
            {},
            "curriculum_learning .*: samples are those",
        ),
        (of_stage(tensorboard={"enabled": True}), {}, "tensorboard .*set report_to"),
        (of_stage(pipeline={"stages": 2}), {}, "set pipeline_model_parallel_size"),
        (
            of_stage(tensor_parallel={"autotp_size": 2}),
            {"tensor_model_parallel_size": 4},
            "autotp_size 2: tensor_mod",
        ),
        (of_stage(colours=3), {}, "deepspeed: colours 3: there is no such key here"),
        (
            of_stage(communication_data_type="bf16"),
            {},
            "communication_data_type 'bf16': .*grad_reduce_in_bf16",
        ),
        ("nowhere.json", {}, "deepspeed nowhere.json: it cannot be read"),
        (
            of_stage(3),
            {"data_parallel_sharding_strategy": "optim"},
            "zero_optimization means optim_grads_params",
        ),
        (
            of_stage(0),
            {"use_distributed_optimizer": True},
            "no_shard replicates the optimizer's state",
        ),
        (of_stage(3), {"fsdp": "full_shard"}, "fsdp full_shard: deepspeed is set, too"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config, named, told):
    with pytest.raises(ConfigError, match=told):
        arguments(config, **named)


def test_the_loss_scale_of_fp16_is_deepspeeds():
    """Each overflow in DeepSpeed's DynamicLossScaler beyond ``hysteresis`` halves; torch halves at
    the first.
    """
    fp16 = {
        "enabled": AUTO,
        "initial_scale_power": 4,
        "loss_scale_window": 2,
        "hysteresis": 2,
        "min_loss_scale": 4,
    }
    scaler, seen = scaler_of(arguments(of_stage(fp16=fp16), fp16=True)), []
    for overflowed in (True, True, True, True, False, False, True):
        scaler.update(overflowed)
        seen.append(scaler.scale)
    assert seen == [16, 8, 4, 4, 4, 8, 8]
    assert (
        scaler_of(arguments(of_stage(), fp16=True)).scale,
        scaler_of(arguments(None, fp16=True)).window,
    ) == (
        65536,
        2000,
    )
    fixed = scaler_of(arguments(of_stage(fp16={"enabled": True, "loss_scale": 128}), fp16=True))
    assert (fixed.scale, fixed.dynamic) == (128, False)


@pytest.mark.parametrize(
    ("kind", "params", "named", "rates"),
    [  # what DeepSpeed 0.19.8 gives
        (
            "WarmupLR",
            {"warmup_min_lr": 0.02, "warmup_num_steps": 4},
            {"warmup_steps": 4},
            [0.02, 0.02, 0.06, 0.0833985, 0.1, 0.1],
        ),
        ("WarmupLR", RATES, {}, [0, 0, 0.1, 0.1, 0.1, 0.1]),
        (
            "WarmupDecayLR",
            {**RATES, "total_num_steps": AUTO, "warmup_type": "linear"},
            {"warmup_steps": 3},
            [0, 0, 0.03333333, 0.06666667, 0.1, 0.08, 0.06, 0.04],
        ),
        (
            "WarmupDecayLR",
            {**RATES, "total_num_steps": 8},
            {"warmup_steps": 3},
            [0, 0, 0.06309298, 0.1, 0.1, 0.08, 0.06, 0.04],
        ),
        (
            "WarmupCosineLR",
            {
                "total_num_steps": AUTO,
                "warmup_num_steps": 3,
                "warmup_min_ratio": 0.1,
                "cos_min_ratio": 0.2,
            }
            | {"warmup_type": "linear"},
            {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
            [0, 0.01, 0.04, 0.07, 0.09236068, 0.07236068, 0.04763932, 0.02763932],
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": AUTO, "warmup_num_steps": AUTO},
            {"warmup_steps": 3},
            [0, 0, 0.06309298, 0.1, 0.0904518, 0.0654543, 0.0345557, 0.0095582],
        ),
    ],
)
def test_a_schedule_has_deepspeeds_numbers(kind, params, named, rates):
    args = arguments(
        of_stage(scheduler={"type": kind, "params": params}), learning_rate=0.1, **named
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    found, made = [], schedule(args, 8, optimizer)
    for _ in rates:
        found.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    assert found == pytest.approx(rates, abs=1e-8)


class WithOptimizer(EagerTrainer):
    def create_optimizer(self, model=None):
        return super().create_optimizer(model)


def test_a_script_has_no_optimizer_beside_deepspeeds():
    args = arguments(DOCUMENTED)
    with pytest.raises(ConfigError, match="create_optimizer .*: deepspeed has a section optimizer"):
        WithOptimizer(tiny_llama(), args, collate)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="optimizer given to EagerTrainer"):
        EagerTrainer(model, args, collate, optimizers=(optimizer, None))
    assert WithOptimizer(model, arguments(of_stage()), collate).create_optimizer()


RUN = {
    **{
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "weight_decay": 0.1,
        "seed": 5,
    },
}


def test_a_run_follows_the_schedule_and_goes_on_with_it(tmp_path):
    params = {**RATES, "total_num_steps": AUTO, "warmup_type": "linear"}
    config = of_stage(1, scheduler={"type": "WarmupDecayLR", "params": params})
    changes = {
        **RUN,
        "max_steps": 6,
        "warmup_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 0.1,
    }
    for resume in (None, f"{tmp_path}/checkpoint-3"):
        args = MerakArguments(str(tmp_path), deepspeed=config, **changes)
        trainer = EagerTrainer(tiny_llama(), args, collate, samples(16, ragged=False))
        trainer.train(resume_from_checkpoint=resume)
        found = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
        assert found == pytest.approx([0, 0, 0.1 / 3, 0.2 / 3, 0.1, 0.2 / 3])


class DecaysAll(MerakTrainer):
    """As DeepSpeed's own optimizer does: norms and biases too."""

    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters()]


OPTIMIZER = {"type": "AdamW", "params": ADAM}
WAYS = {  # stage -> of whom, by which arguments; and what it should be
    1: ((MerakTrainer, {"deepspeed": of_stage(1, train_batch_size=4)}), (MerakTrainer, "optim")),
    3: (
        (MerakTrainer, {"deepspeed": of_stage(3, optimizer=OPTIMIZER)}),
        (DecaysAll, "optim_grads_params"),
    ),
}


def trained(rank, world_size, directory, stage):
    torch.set_num_threads(1)
    found = {}
    (kind, named), (other, strategy) = WAYS[stage]
    for way, trainer, changes in (
        ("ours", kind, named),
        ("wanted", other, {"data_parallel_sharding_strategy": strategy}),
    ):
        place, data = f"{directory}/{way}", samples(16, ragged=False)
        trainer = trainer(tiny_llama(1), MerakArguments(place, **changes, **RUN), collate, data)
        trainer.train()
        trainer.save_model(place)
        logs = [
            (entry["loss"], entry["grad_norm"])
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        found[way] = logs, trainer.engine.plan.sharding
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.long
def test_two_replicas_train_by_a_stage_as_by_its_strategy(tmp_path, stage):
    strategy = WAYS[stage][1][1]
    for found in run_ranks(trained, 2, str(tmp_path), stage, timeout=200):
        assert (
            found["ours"] == found["wanted"]
            and found["ours"][1] == strategy
            and len(found["ours"][0]) == 3
        )
    ours, wanted = (
        load_file(Path(tmp_path) / way / "model.safetensors") for way in ("ours", "wanted")
    )
    assert ours.keys() == wanted.keys() and all(
        torch.equal(ours[name], value) for name, value in wanted.items()
    )
    norms = [value for name, value in ours.items() if name.endswith("norm.weight")]
    assert len(norms) > 2 and not any(torch.equal(value, torch.ones_like(value)) for value in norms)
