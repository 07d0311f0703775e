"""``parallelism_config`` of transformers, and models that transformers has divided itself."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import LlamaForCausalLM

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.instances import instances_of
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.hf_trainer.test_instances import Asked
from tests.ranks import RankFailure, run_ranks


def asked(world, named=None, **sizes):
    found = Asked(world, 0, **(named or {}))
    found.parallelism_config = ParallelismConfig(**sizes)
    return found


@pytest.mark.parametrize(
    ("arguments", "sharding", "instances"),
    [
        (asked(1), None, 1),
        (asked(4, dp_replicate_size=4), None, 1),
        (asked(4, dp_shard_size=4), "optim_grads_params", 1),
        (asked(8, dp_replicate_size=2, dp_shard_size=4), "optim_grads_params", 2),
        (
            asked(8, {"fsdp": "shard_grad_op"}, dp_replicate_size=2, dp_shard_size=4),
            "optim_grads",
            2,
        ),
        (
            asked(8, {"fsdp": "hybrid_shard"}, dp_replicate_size=4, dp_shard_size=2),
            "optim_grads_params",
            4,
        ),
        (asked(4, {"use_distributed_optimizer": True}, dp_shard_size=4), "optim", 1),
        (
            asked(
                8,
                {"tensor_model_parallel_size": 2},
                dp_replicate_size=2,
                dp_shard_size=2,
                tp_size=2,
            ),
            "optim_grads_params",
            2,
        ),
    ],
)
def test_sizes_are_a_strategy_and_instances(arguments, sharding, instances):
    assert (arguments.sharding, instances_of(arguments)) == (sharding, instances)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            asked(4, {"fsdp": "full_shard"}, dp_replicate_size=4),
            "dp_shard_size 1: .*request optim_grads_params",
        ),
        (asked(4, {"fsdp": "no_shard"}, dp_shard_size=4), "dp_shard_size 4: .*disable sharding"),
        (
            asked(
                8, {"num_distributed_optimizer_instances": 4}, dp_replicate_size=2, dp_shard_size=4
            ),
            "instances 4: parallelism_config has dp_replicate_size 2",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments, told):
    with pytest.raises(ConfigError, match=told):
        instances_of(arguments) and arguments.sharding


def test_sizes_that_are_not_the_jobs_are_refused():
    with pytest.raises(
        ConfigError, match="parallelism_config 4: dp_shard_size 4 is not the 1 ranks of the job"
    ):
        MerakArguments(
            "unused", use_cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=4)
        )
    with pytest.raises(ConfigError, match="tp_size 2: tensor_model_parallel_size is 4"):
        config = ParallelismConfig(tp_size=2)
        MerakArguments(
            "unused", use_cpu=True, parallelism_config=config, tensor_model_parallel_size=4
        )
    with pytest.raises(ConfigError, match="it is not a ParallelismConfig"):
        MerakArguments("unused", use_cpu=True, parallelism_config={"tp_size": 2})


RUN = {
    **{
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "seed": 5},
}
WAYS = {
    "shard": ({"dp_shard_size": 2}, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tp": ({"tp_size": 2}, {"tensor_model_parallel_size": 2}),
}


def trained(rank, world_size, directory, way):
    torch.set_num_threads(1)
    sizes, named = WAYS[way]
    found = []
    for place, changes in (
        ("ours", {"parallelism_config": ParallelismConfig(**sizes)}),
        ("wanted", named),
    ):
        arguments = MerakArguments(f"{directory}/{place}", **changes, **RUN)
        trainer = MerakTrainer(tiny_llama(1), arguments, collate, samples(16, ragged=False))
        trainer.train()
        trainer.save_model(f"{directory}/{place}")
        logs = [
            (entry["loss"], entry["grad_norm"])
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        found.append((logs, trainer.engine.plan.sharding, trainer.mesh.grid.tp))
    return found


@pytest.mark.parametrize("way", [pytest.param("tp", marks=pytest.mark.slow), "shard"])
def test_two_ranks_train_by_sizes_as_by_the_arguments_of_this_library(tmp_path, way):
    for ours, wanted in run_ranks(trained, 2, str(tmp_path), way, timeout=200):
        assert ours == wanted and len(ours[0]) == 3
        assert ours[1:] == (("optim_grads_params", 1) if way == "shard" else ("no_shard", 2))
    ours, wanted = (
        load_file(Path(tmp_path) / place / "model.safetensors") for place in ("ours", "wanted")
    )
    assert ours.keys() == wanted.keys() and all(
        torch.equal(ours[name], value) for name, value in wanted.items()
    )


def given_divided(rank, world_size, directory, how):
    if how == "from_pretrained":
        from transformers.distributed import DistributedConfig

        model = LlamaForCausalLM.from_pretrained(
            directory, distributed_config=DistributedConfig(tp_size=2)
        )
    else:
        model = tiny_llama(1)
        mesh = init_device_mesh("cpu", (2,))
        model.lm_head.weight = torch.nn.Parameter(
            distribute_tensor(model.lm_head.weight.data, mesh)
        )
    assert dist.get_world_size() == 2
    arguments = MerakArguments(f"{directory}/out", tensor_model_parallel_size=2, **RUN)
    MerakTrainer(model, arguments, collate, samples(16, ragged=False))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "from_pretrained",
            r"model LlamaForCausalLM: .*\(tp_size 2\). Load it without distributed_config, tp_plan and tp_size; "
            "set tensor_model_parallel_size=2 instead",
        ),
        ("by hand", "parameter lm_head.weight: it is a DTensor"),
    ],
)
def test_a_model_that_is_divided_already_is_refused(tmp_path, how, told):
    tiny_llama(1).save_pretrained(tmp_path)
    with pytest.raises(RankFailure) as failure:
        run_ranks(given_divided, 2, str(tmp_path), how, timeout=100)
    assert isinstance(failure.value.__cause__, ConfigError)
    with pytest.raises(ConfigError, match=told):
        raise failure.value.__cause__
