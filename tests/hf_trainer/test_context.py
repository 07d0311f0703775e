"""MerakTrainer whose ranks divide sequences: losses, predictions, weights and checkpoints of one
process, beside the other dimensions.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.captured_once import Captures
from tests.hf_trainer.reference import untimed
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "save_steps": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 5,
}
CAPTURES = Captures()


def tied_gpt2(heads=2):
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=64,
        n_embd=8 * heads,
        n_layer=2,
        n_head=heads,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def adapted():
    torch.manual_seed(4)
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0
    )
    return get_peft_model(tiny_llama(1), config)


def train(directory, model=None, resume=None, **changes):
    """A run with evaluation, prediction and saved weights: what is known of it."""
    torch.set_num_threads(1)
    arguments = MerakArguments(str(directory), **{**RUN, **changes})
    with CAPTURES.shared():
        trainer = MerakTrainer(
            model or tiny_llama(1), arguments, collate, samples(16), samples(5, seed=9)
        )
        trainer.train(resume_from_checkpoint=resume)
        predicted = trainer.predict(samples(5, seed=11))
        trainer.save_model(f"{directory}/last")
        return {
            "logs": [untimed(entry) for entry in trainer.state.log_history if "loss" in entry],
            "evaluated": trainer.evaluate()["eval_loss"],
            "predictions": predicted.predictions,
            "labels": predicted.label_ids,
        }


def weights(directory):
    (path,) = Path(directory).glob("last/*model.safetensors")
    return load_file(path)


def same(ours, theirs, relative=1e-5):
    """Whether two runs are one but for the order of sums."""
    assert len(theirs["logs"]) > 0
    for one, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert one == pytest.approx(other, rel=relative)
    assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=relative)
    assert np.array_equal(ours["labels"], theirs["labels"])
    np.testing.assert_allclose(
        ours["predictions"], theirs["predictions"], rtol=100 * relative, atol=100 * relative
    )


def same_weights(ours, theirs):
    one = weights(ours)
    other = weights(theirs)
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)


def divided(rank, world_size, directory):
    """Two ranks that divide sequences, and resume themselves and one process."""
    found = train(f"{directory}/two", context_parallel_size=2)
    again = train(
        f"{directory}/again", resume=f"{directory}/two/checkpoint-2", context_parallel_size=2
    )
    other = train(
        f"{directory}/other", resume=f"{directory}/one/checkpoint-2", context_parallel_size=2
    )
    return found, again, other


@pytest.mark.long
def test_two_ranks_train_as_one_process_does(tmp_path):
    """Samples of many lengths, of which those that are padded are many; accumulated."""
    alone = train(tmp_path / "one")
    for found, again, other in run_ranks(divided, 2, str(tmp_path), timeout=200):
        same(found, alone)
        assert again["logs"][-2:] == found["logs"][-2:]
        assert again["evaluated"] == found["evaluated"]
        same(other, alone)
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "two/checkpoint-2"))
    same(resumed, alone)
    for way in ("two", "other", "resumed"):
        same_weights(tmp_path / way, tmp_path / "one")
    ours = weights(tmp_path / "again")
    assert all(torch.equal(ours[name], value) for name, value in weights(tmp_path / "two").items())


def with_each_kind(rank, world_size, directory):
    """Two ranks that gather, others that pass keys and values on, and these from there."""
    divided = {"context_parallel_size": 2}
    found = {
        kind: train(f"{directory}/{kind}", tied_gpt2(3), cp_comm_type=kind, **divided)
        for kind in ("all_gather", "p2p")
    }
    found["again"] = train(
        f"{directory}/again",
        tied_gpt2(3),
        resume=f"{directory}/all_gather/checkpoint-2",
        cp_comm_type="p2p",
        **divided,
    )
    return found


@pytest.mark.long
def test_two_ranks_of_each_kind_train_as_one_process_does(tmp_path):
    """Three heads, and samples of many lengths, of which not all can be cut from both ends."""
    alone = train(tmp_path / "one", tied_gpt2(3))
    for ways in run_ranks(with_each_kind, 2, str(tmp_path), timeout=300):
        for found in ways.values():
            same(found, alone)
    for kind in ("all_gather", "p2p", "again"):
        same_weights(tmp_path / kind, tmp_path / "one")


def with_levels(rank, world_size, directory):
    levels = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    return train(directory, context_parallel_size=4, **levels)


@pytest.mark.slow
def test_four_ranks_of_two_levels_train_as_one_process_does(tmp_path):
    """Of neighbours that exchange heads there are two groups, which pass keys and values on."""
    alone = train(tmp_path / "one")
    for found in run_ranks(with_levels, 4, str(tmp_path / "four"), timeout=300):
        same(found, alone)
    same_weights(tmp_path / "four", tmp_path / "one")


def odd(rank, world_size, directory):
    """Lengths as they are; the first batch, of the longest ones, has to be shared."""
    return train(directory, context_parallel_size=2, length_buckets=None)


@pytest.mark.long
def test_lengths_that_ranks_do_not_share_are_computed_by_each(tmp_path):
    alone = train(tmp_path / "one", length_buckets=None)
    for found in run_ranks(odd, 2, str(tmp_path / "two"), timeout=200):
        same(found, alone)


def beside(rank, world_size, directory, ways):
    """Two ranks that divide sequences, times two of another dimension."""
    found = {}
    for way in ways:
        model, changes = BESIDE[way]
        place = f"{directory}/{way}"
        found[way] = train(place, model and model(), context_parallel_size=2, **changes)
    return found


REPLICAS = {"gradient_accumulation_steps": 1}
BESIDE = {
    "stages": (tied_gpt2, {"pipeline_model_parallel_size": 2}),
    "optimizer": (None, REPLICAS | {"use_distributed_optimizer": True}),
    "weights": (None, REPLICAS | {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "adapters": (adapted, REPLICAS),
    "bf16": (None, REPLICAS | {"bf16": True}),
    "checkpointing": (
        None,
        {"pipeline_model_parallel_size": 2, "activation_checkpointing": True},
    ),
    "ring": (
        tied_gpt2,
        {
            "pipeline_model_parallel_size": 2,
            "activation_checkpointing": True,
            "cp_comm_type": "p2p",
        },
    ),
    "ring in bf16": (None, REPLICAS | {"bf16": True, "cp_comm_type": "p2p"}),
}


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("stages", "weights", "bf16"), marks=pytest.mark.long),
        pytest.param(("optimizer", "adapters", "checkpointing"), marks=pytest.mark.slow),
        pytest.param(("ring", "ring in bf16"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_other_dimensions_beside_it_train_alike(tmp_path, ways):
    ranks = run_ranks(beside, 4, str(tmp_path), ways, timeout=500)
    for way in ways:
        model, changes = BESIDE[way]
        one = tmp_path / f"{way}-alone"
        rounded = changes.get("bf16", False)
        alone = train(one, model and model(), bf16=rounded)
        for found in ranks:
            same(found[way], alone, 2e-2 if rounded else 1e-5)
        if not rounded:
            same_weights(tmp_path / way, one)


def told(directory, model=None, **changes):
    """What a run is refused with."""
    with pytest.raises((ConfigError, PlanError)) as caught:
        train(directory, model, **changes)
    return str(caught.value)


def attempts(rank, world_size, directory):
    """What two ranks are refused, and what a plan says of them."""
    arguments = MerakArguments(directory, **RUN, context_parallel_size=2)
    trainer = MerakTrainer(tiny_llama(1), arguments, collate, samples(16))
    trainer.train()
    plan = trainer.engine.plan
    paths = {}
    for name, edited in {
        "same": plan,
        "tp": replace(plan, grid=replace(plan.grid, tp=2)),
        "sharded": replace(
            plan,
            shardings=tuple(
                replace(tensor, dim=0, blocks=(64,)) if tensor.name == "lm_head.weight" else tensor
                for tensor in plan.shardings
            ),
        ),
    }.items():
        paths[name] = f"{directory}/{name}.json"  # the same on both ranks
        Path(paths[name]).write_text(edited.to_json())
    sizes = {"parallelism_config": ParallelismConfig(cp_size=2)}
    followed = [
        train(f"{directory}/followed", plan=paths["same"]),
        train(f"{directory}/sizes", **sizes),
        train(f"{directory}/named", context_parallel_size=2),
    ]
    refusals = {
        "tp": told(directory, plan=paths["tp"]),
        "sharded": told(directory, plan=paths["sharded"]),
    }
    return followed, refusals


REFUSED = {
    "tp": "world size 2: a replica of the model takes 2 x 2 x 1 ranks (tensor x context x pipeline "
    "parallel). Start a multiple of that, or lower the degrees.",
    "sharded": "sharding of lm_head.weight: on ranks 0, 1, the plan has it sharded along dimension 0 in "
    "blocks of 64, and there is one tensor-parallel rank, which holds all of it. Let dim be null, "
    "or set the tensor-parallel size.",
}


@pytest.mark.long
def test_plans_and_sizes_of_accelerate_say_the_same(tmp_path):
    """And what cannot be so is refused by name on every rank."""
    for (followed, sizes, named), refusals in run_ranks(attempts, 2, str(tmp_path), timeout=200):
        assert followed["logs"] == named["logs"] == sizes["logs"]
        assert refusals == REFUSED


def in_every_dimension(rank, world_size, directory):
    return train(
        directory,
        tied_gpt2(),
        context_parallel_size=2,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
    )


@pytest.mark.long
def test_tensor_context_and_pipeline_parallelism_together(tmp_path):
    alone = train(tmp_path / "one", tied_gpt2())
    for found in run_ranks(in_every_dimension, 8, str(tmp_path / "eight"), timeout=300):
        same(found, alone)
    same_weights(tmp_path / "eight", tmp_path / "one")


def test_sizes_that_are_not_the_jobs_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        MerakArguments(str(tmp_path), use_cpu=True, context_parallel_size=2)
    assert str(caught.value) == (
        "world size 1: a replica of the model takes 1 x 2 x 1 ranks (tensor x context x pipeline "
        "parallel). Start a multiple of that, or lower the degrees."
    )
    config = ParallelismConfig(cp_size=2)
    with pytest.raises(ConfigError, match="cp_size 2: context_parallel_size is 4"):
        MerakArguments(
            str(tmp_path), use_cpu=True, parallelism_config=config, context_parallel_size=4
        )
