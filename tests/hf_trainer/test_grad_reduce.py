"""MerakTrainer whose replicas send gradients in bf16, and what it refuses by name."""

import pytest
import torch

from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "replica_check_interval": 1,
    },
}


def trained(directory, **changes):
    trainer = MerakTrainer(
        tiny_llama(3),
        MerakArguments(directory, **RUN, **changes),
        collate,
        samples(8, ragged=False),
    )
    trainer.train()
    grads = trainer.engine.buffer.main_grad
    logs = [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return logs, torch.equal(grads, grads.bfloat16().float())


def refused(directory, error, **changes):
    with pytest.raises(error) as told:
        trained(directory, **changes)
    return str(told.value)


def run(rank, world_size, directory):
    torch.set_num_threads(1)
    half, told = {"grad_reduce_in_bf16": True}, []
    for changes in ({}, {"fp16": True}):
        told.append(refused(directory, PlanError, **half, **changes))
    return [trained(directory, bf16=True), trained(directory, bf16=True, **half)], told


def test_gradients_are_sent_in_bf16(tmp_path):
    for ((plain, rounds), (half, rounded)), told in run_ranks(run, 2, str(tmp_path)):
        assert (rounds, rounded) == (False, True)
        assert half[0][0] == plain[0][0] and half != plain, "the first loss is of the same weights"
        for ours, theirs in zip(half, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)
        for text, dtype in zip(told, ("float32", "float16"), strict=True):
            assert text.startswith(
                "--grad-reduce-in-bf16 True: on ranks 0, 1, gradients of a model in " + dtype
            )


def test_a_captured_models_code_decides_about_its_residuals():
    with pytest.raises(
        ConfigError,
        match="fp32_residual_connection True: the model's own code decides in which dtype",
    ):
        MerakArguments("unused", fp32_residual_connection=True)
