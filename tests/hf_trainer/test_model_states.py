"""MerakTrainer with weights, gradients and optimizer state in host memory: nothing but memory shows it."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "disable_tqdm": True,
    "report_to": "none",
}
ZERO = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "gradient_clipping": "auto",
}
WAYS = {
    "argument": {"offload_model_states": True},
    "fsdp": {"fsdp": "full_shard offload"},
    "deepspeed": {"deepspeed": ZERO},
}


def adapted():
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, lora_dropout=0.0)
    torch.manual_seed(1)
    return get_peft_model(tiny_llama(3), config)


def trained(directory, model, arguments, resume=None):
    data = samples(16, ragged=False)
    settings = MerakArguments(str(directory), **RUN | arguments)
    trainer = MerakTrainer(model, settings, collate, data, data[:4])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{directory}/last")
    logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return logs, evaluated, trainer


def run(rank, world_size, directory, lora, way, more):
    torch.set_num_threads(1)
    made = adapted if lora else lambda: tiny_llama(3)
    plain = trained(f"{directory}/plain", made(), more)
    model = made()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    host = trained(f"{directory}/host", model, more | WAYS[way])
    assert bool(frozen) == lora
    assert (
        host[2].engine.plan.offload_model_states and not plain[2].engine.plan.offload_model_states
    )
    gathered = host[2].gather_model()
    if rank == 0:
        for name, value in frozen.items():
            assert torch.equal(gathered.get_parameter(name), value)
    there = trained(
        f"{directory}/there", made(), more | WAYS[way], f"{directory}/plain/checkpoint-2"
    )
    back = trained(f"{directory}/back", made(), more, f"{directory}/host/checkpoint-2")
    return [each[:2] for each in (plain, host, there, back)]


CASES = [
    (1, True, "argument", {"bf16": True}),
    pytest.param(1, False, "fsdp", {}, marks=pytest.mark.long),
    pytest.param(
        2, False, "deepspeed", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.long
    ),
    pytest.param(
        1,
        True,
        "fsdp",
        {"gradient_checkpointing": True, "optim": "adafactor"},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("ranks", "lora", "way", "more"), CASES)
def test_losses_files_and_checkpoints_are_those_of_a_run_on_the_device(
    tmp_path, ranks, lora, way, more
):
    for plain, *others in run_ranks(run, ranks, str(tmp_path), lora, way, more, timeout=250):
        assert len(plain[0]) == 4
        assert all(other == plain for other in others)
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    for place in ("last", "checkpoint-4"):
        wanted = load_file(tmp_path / "plain" / place / name)
        for other in ("host", "there", "back"):
            found = load_file(Path(tmp_path) / other / place / name)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], value) for key, value in wanted.items()), other


def test_a_search_does_not_try_it(tmp_path):
    with pytest.raises(ConfigError, match="offload_model_states True: no search tries it"):
        MerakArguments(str(tmp_path), **RUN, parallel="auto", offload_model_states=True)
