"""A callback that keeps an average of the weights: right where it gathers them, an error where it reads stale ones."""

import copy

import pytest
import torch
from transformers import TrainerCallback

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import is_withheld
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    **{"use_cpu": True, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"},
    **{"disable_tqdm": True, "report_to": "none", "max_grad_norm": 0.0},
}
LAYOUTS = {
    "pp": {"pipeline_model_parallel_size": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "tp": {"tensor_model_parallel_size": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "full": {"data_parallel_sharding_strategy": "optim_grads_params", "per_device_train_batch_size": 2},
    "optim": {"data_parallel_sharding_strategy": "optim", "bf16": True, "per_device_train_batch_size": 2},
}


class Average(TrainerCallback):
    """As written for transformers.Trainer: it reads ``model.parameters()``."""

    def __init__(self, read):
        self.read, self.average = read, None

    def update(self, model):
        weights = self.read(model)
        if self.average is None:
            self.average = [weight.detach().clone() for weight in weights]
        torch._foreach_lerp_(self.average, [weight.detach() for weight in weights], 0.25)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.update(model)


class Gathers(Average):
    """The same, of what every rank gathers and the first one has."""

    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        model = self.trainer.gather_model()
        if state.is_world_process_zero:
            self.update(model)


def trained(directory, callback, seed=0, **more):
    arguments = MerakArguments(directory, **RUN, **more)
    trainer = MerakTrainer(tiny_llama(seed), arguments, collate, samples(16, ragged=False), callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(rank, world_size, directory, layouts):
    torch.set_num_threads(1)
    found = {}
    for name in layouts:
        gathers = Gathers(lambda model: list(model.parameters()))
        _, losses = trained(f"{directory}/{name}", gathers, rank, **LAYOUTS[name])
        found[name] = losses, gathers.average
    return found


def test_x(tmp_path):
    more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    ref = {}
    for bf16 in (False, True):
        plain = Average(lambda model: list(model.parameters()))
        _, losses = trained(str(tmp_path / f"one{bf16}"), plain, bf16=bf16, **more)
        ref[bf16] = losses, plain.average
    for found in run_ranks(run, 2, str(tmp_path), [*LAYOUTS]):
        for name, (losses, average) in found.items():
            want = ref[name == "optim"]
            print(
                name,
                losses == want[0],
                average and [torch.equal(a, b) for a, b in zip(average, want[1])],
                average and max((a - b).abs().max().item() for a, b in zip(average, want[1])),
            )
