"""MerakTrainer whose ranks divide the experts of a mixture, beside transformers' Trainer."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed

from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.planner.memory import rank_memory
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
}
EXPERTS = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}

REPLICAS = {
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "expert_model_parallel_size": 2,
    "per_device_train_batch_size": 2,
}


# each expert over two ranks, and these in two pairs
SHARDS = {**REPLICAS, "per_device_train_batch_size": 1, "expert_tensor_parallel_size": 2}


def mixture(balanced):
    set_seed(1)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        head_dim=8,
        output_router_logits=balanced,
        router_aux_loss_coef=0.1,
        **sizes,
    )
    return Qwen3MoeForCausalLM(config)


def trained(kind, args, directory):
    """Train a mixture; losses and saved weights.

    With replicas it is trained without the loss of its routers, which transformers counts once for
    each process.
    """
    balanced = args.per_device_train_batch_size == RUN["per_device_train_batch_size"]
    trainer = kind(mixture(balanced), args, collate, samples(40, ragged=False))
    trainer.train()
    trainer.save_model(str(directory / "model"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, load_file(directory / "model" / "model.safetensors")


def _rank(rank, world_size, directory, changes):
    args = MerakArguments(str(directory), **{**RUN, **EXPERTS, **changes})
    return trained(MerakTrainer, args, directory)


def test_recomputed_activations_of_experts_change_no_bit(tmp_path):
    """Alone, and with entire layers where memory asks for them."""
    selective = {"recompute_activations": True}

    def run(changes):
        args = MerakArguments(str(tmp_path), **{**RUN, **changes})
        trainer = MerakTrainer(mixture(True), args, collate, samples(40, ragged=False))
        trainer.train()
        return trainer.engine.plan, [x.detach().clone() for x in trainer.model.parameters()]

    _, wanted = run({})
    alone, weights = run(selective)
    (memory,) = rank_memory(alone)
    less = 0.9 * memory.total / 2**30
    both, others = run({**selective, "recompute_method": "capacity", "device_memory_gb": less})
    assert alone.recompute_activations and both.recompute_activations
    assert not alone.stages[0].recompute and both.stages[0].recompute
    for found in (weights, others):
        assert all(map(torch.equal, found, wanted))


def check(found, wanted):
    losses, weights = found
    assert losses == pytest.approx(wanted[0], rel=2e-5)
    assert weights.keys() == wanted[1].keys()
    for name, weight in weights.items():
        # Adam divides by small gradients, so what is rounded moves by a share of the rate
        torch.testing.assert_close(weight, wanted[1][name], rtol=0, atol=2e-4)


def test_losses_and_weights_are_those_of_transformers(tmp_path):
    wanted = trained(Trainer, TrainingArguments(str(tmp_path), **RUN), tmp_path)
    for found in run_ranks(_rank, 2, tmp_path / "two", {}):
        check(found, wanted)


def further(changes, name, mark=pytest.mark.long):
    """A layout. The slow ones meet what others meet, in other company."""
    return pytest.param(changes, id=name, marks=mark)


@pytest.mark.parametrize(
    "changes",
    [
        further(
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
            "pipeline",
            pytest.mark.slow,
        ),
        further(
            {
                "per_device_train_batch_size": 2,
                "data_parallel_sharding_strategy": "optim_grads_params",
                "gradient_checkpointing": True,
            },
            "sharded replicas",
            pytest.mark.slow,
        ),
        further({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}, "four"),
        further({"pipeline_model_parallel_size": 2, "tp_comm_overlap": "sub-pipeline"}, "halves"),
        further(
            {**REPLICAS, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
            "replicas of stages",
        ),
        further(
            {
                **REPLICAS,
                "per_device_train_batch_size": 1,
                "data_parallel_sharding_strategy": "optim_grads_params",
                "gradient_checkpointing": True,
            },
            "replicas that shard",
        ),
        further(
            {**REPLICAS, "context_parallel_size": 2, "expert_model_parallel_size": 4},
            "replicas and contexts",
        ),
        further(
            {"per_device_train_batch_size": 2, "expert_model_parallel_size": 4},
            "replicas and tensor parallel",
            pytest.mark.slow,
        ),
        further(
            {
                **REPLICAS,
                "per_device_train_batch_size": 1,
                "data_parallel_sharding_strategy": "optim",
                "optim": "adafactor",
            },
            "replicas with Adafactor",
        ),
        further(
            {**SHARDS, "data_parallel_sharding_strategy": "optim_grads_params"},
            "shards of experts of replicas that shard",
        ),
        further(
            {
                **SHARDS,
                "pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 1,
                "per_device_train_batch_size": 2,
            },
            "shards of experts of stages",
        ),
        further(
            {**SHARDS, "context_parallel_size": 2, "per_device_train_batch_size": 2},
            "shards of experts of contexts",
            pytest.mark.slow,
        ),
        further(
            {
                "per_device_train_batch_size": 2,
                "expert_tensor_parallel_size": 2,
                "data_parallel_sharding_strategy": "optim",
                "optim": "adafactor",
            },
            "shards of experts with Adafactor",
        ),
        further(
            {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
            "shards of experts inside a layer",
        ),
    ],
)
def test_other_layouts(tmp_path, changes):
    samples_of_rank = changes.get("per_device_train_batch_size", 4)
    batch = {
        "per_device_train_batch_size": samples_of_rank,
        "gradient_accumulation_steps": 8 // samples_of_rank,
        "optim": changes.get("optim", "adamw_torch"),
    }
    wanted = trained(Trainer, TrainingArguments(str(tmp_path), **{**RUN, **batch}), tmp_path)
    for found in run_ranks(_rank, 4, tmp_path / "four", changes):
        check(found, wanted)


RESUMED = {**RUN, "save_strategy": "steps", "save_steps": 2}


def resumed(rank, world_size, directory, changes):
    """The last losses of a run that goes on from the second step of another."""
    args = MerakArguments(str(directory), **{**RESUMED, **EXPERTS, **changes})
    trainer = MerakTrainer(mixture(False), args, collate, samples(40, ragged=False))
    start = directory / "checkpoint-2"
    trainer.train(resume_from_checkpoint=str(start) if start.exists() else None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.long
def test_checkpoints_of_shards_of_experts_go_on_in_any_layout(tmp_path):
    """Weights and the states of sharded optimizers, of rectangles and of slices of experts."""
    first = {**SHARDS, "data_parallel_sharding_strategy": "optim"}
    wanted, *_ = run_ranks(resumed, 4, tmp_path, first)
    assert len(wanted) == 4
    shutil.rmtree(tmp_path / "checkpoint-4")
    for changes in ({"per_device_train_batch_size": 2}, {**first, "expert_model_parallel_size": 1}):
        again = tmp_path / str(len(changes))
        shutil.copytree(tmp_path / "checkpoint-2", again / "checkpoint-2")
        for losses in run_ranks(resumed, 4, again, changes):
            assert losses == pytest.approx(wanted, rel=2e-6)


def padded(items):
    """Samples of different lengths in one batch."""
    length = max(len(item["input_ids"]) for item in items)
    batch = {
        "input_ids": torch.zeros(len(items), length, dtype=torch.long),
        "labels": torch.full((len(items), length), -100),
        "attention_mask": torch.zeros(len(items), length, dtype=torch.long),
    }
    for row, item in enumerate(items):
        own = slice(len(item["input_ids"]))
        batch["input_ids"][row, own] = torch.as_tensor(item["input_ids"])
        batch["labels"][row, own] = torch.as_tensor(item["labels"])
        batch["attention_mask"][row, own] = 1
    return batch


def evaluated(kind, args):
    """Losses of a training whose batches have different lengths, the loss of an evaluation, and
    predictions: of a number of samples that ranks cannot share evenly.
    """
    data = samples(40, ragged=True), samples(13, ragged=True)
    trainer = kind(mixture(False), args, padded, *data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    predictions = trainer.predict(samples(5, ragged=True)).predictions
    return losses, torch.as_tensor(predictions)


def _evaluated(rank, world_size, directory):
    args = MerakArguments(str(directory), **{**RUN, **REPLICAS, "per_device_eval_batch_size": 2})
    return evaluated(MerakTrainer, args)


@pytest.mark.long
def test_replicas_with_batches_of_other_lengths_and_numbers(tmp_path):
    batch = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "per_device_eval_batch_size": 2,
    }
    wanted = evaluated(Trainer, TrainingArguments(str(tmp_path), **{**RUN, **batch}))
    for losses, predictions in run_ranks(_evaluated, 2, tmp_path / "two", timeout=200):
        assert losses == pytest.approx(wanted[0], rel=2e-6)
        torch.testing.assert_close(predictions, wanted[1], rtol=0, atol=2e-4)


def adapted(kind, args, directory):
    """Train LoRA of a mixture's experts; losses, and the adapter that is saved."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = mixture(False)
    set_seed(2)
    trainer = kind(peft.get_peft_model(model, config), args, collate, samples(40, ragged=False))
    trainer.train()
    trainer.save_model(str(directory / "model"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, load_file(directory / "model" / "adapter_model.safetensors")


ADAPTED = {**RUN, "learning_rate": 1e-2}


def _adapted(rank, world_size, directory):
    found = []
    for name, changes in (("replicas", REPLICAS), ("ranks of a layer", {})):
        args = MerakArguments(str(directory), **{**ADAPTED, **EXPERTS, **changes})
        found.append(adapted(MerakTrainer, args, directory / name))
    return found


def test_adapters_of_experts_are_divided_as_these_are(tmp_path):
    theirs = TrainingArguments(str(tmp_path), **ADAPTED)
    _, weights = wanted = adapted(Trainer, theirs, tmp_path / "theirs")
    # B begins with zeros
    assert all(each.abs().max() > 1e-2 for name, each in weights.items() if "lora_B" in name)
    assert {tuple(each.shape) for name, each in weights.items() if "experts" in name} == {
        (12, 32),
        (64, 12),
        (32, 12),
    }
    for found in run_ranks(_adapted, 2, tmp_path):
        for each in found:
            check(each, wanted)


REFUSED = [
    (
        {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        ConfigError,
        "--expert-model-parallel-size 4: experts are divided over some of the 2 ranks that have",
    ),
    (
        {**EXPERTS, "expert_tensor_parallel_size": 2},
        ConfigError,
        "--expert-model-parallel-size 2: experts, over 2 ranks each, are divided over the 2 tensor-"
        "parallel ranks of their layer. Use 1.",
    ),
    (
        {"expert_tensor_parallel_size": 3},
        ConfigError,
        "--expert-tensor-parallel-size 3: each expert is divided over some of the 2 ranks that have "
        "the same layer. Use 2.",
    ),
    (
        {"expert_tensor_parallel_size": 2},
        PlanError,
        "--expert-tensor-parallel-size 2: on ranks 0, 1, the model has no grouped product of experts",
    ),
    ({**EXPERTS, "sequence_parallel": False}, ConfigError, "--sequence-parallel False: is needed"),
    (
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        ConfigError,
        "--expert-tensor-parallel-size 1: without expert parallelism",
    ),
    (EXPERTS, PlanError, "no grouped product of experts"),
]


def _refused(rank, world_size, directory):
    told = []
    for changes, kind, _ in REFUSED:
        with pytest.raises(kind) as caught:
            args = MerakArguments(str(directory), **RUN, **changes)
            MerakTrainer(tiny_llama(), args, collate, samples(40, ragged=False)).train()
        told.append(str(caught.value))
    return told


def test_what_cannot_be_is_one_line(tmp_path):
    for told in run_ranks(_refused, 2, tmp_path):
        for line, (_, _, words) in zip(told, REFUSED, strict=True):
            assert words in line
