"""What a model takes is judged as transformers.Trainer does: by the base of a peft model, else by
its forward.
"""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama

ROWS = [row | {"id": place, "note": "x"} for place, row in enumerate(samples(12, ragged=False))]


def lora():
    return get_peft_model(tiny_llama(0), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def mixed():
    return get_peft_model(tiny_llama(0), LoraConfig(r=4, target_modules=["q_proj"]), mixed=True)


def ia3():
    return get_peft_model(
        tiny_llama(0), IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    )


def patched():
    """Its forward is a function that calls the forward that it had before."""
    model = tiny_llama(0)
    before = model.forward

    def forward(input_ids, attention_mask=None, labels=None, **kwargs):
        outputs = before(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs
        )
        outputs["loss"] = outputs["loss"] * 2
        return outputs

    model.forward = forward
    return model


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny_llama(0)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def trained(kind, arguments, build, directory, **more):
    settings = {
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    settings |= {
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    settings |= {"disable_tqdm": True, "adam_epsilon": 1e-4}
    torch.manual_seed(0)
    trainer = kind(build(), arguments(str(directory), **settings | more), collate, ROWS)
    trainer.train()
    return [
        entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm")
        if key in entry
    ]


@pytest.mark.parametrize("build", [lora, mixed, ia3, patched])
def test_columns_are_those_of_transformers(build, tmp_path):
    expected = trained(Trainer, TrainingArguments, build, tmp_path / "theirs")
    assert trained(MerakTrainer, MerakArguments, build, tmp_path / "ours") == pytest.approx(
        expected, rel=2e-5
    )


def test_samples_without_a_column_of_the_forward_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no column of the samples \(input_ids, .* names args, kwargs, .*=False"
    ):
        trained(MerakTrainer, MerakArguments, Wrapper, tmp_path)
