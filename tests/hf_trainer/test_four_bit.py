"""QLoRA: models of transformers whose frozen layers are in 4 bits, trained as under its own Trainer
with peft and bitsandbytes, saved as peft saves them.
"""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.graph.capture.four_bit import four_bit_layers
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import is_withheld
from tests.choice import later
from tests.four_bit import ALL, adapted, four_bit, needs_bitsandbytes, save_llama, twin_of
from tests.hf_trainer.stand_in import collate, samples
from tests.ranks import run_ranks

from .test_adapters import RUN

pytestmark = needs_bitsandbytes
WEIGHTS = "adapter_model.safetensors"


def train(kind, arguments, directory, model, resume=None, **more):
    data = samples(12, ragged=False)
    trainer = kind(model, arguments(str(directory), **RUN | more), collate, data)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{directory}/saved")
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def packed(model):
    return {n: p.data.clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}


def run(rank, world_size, base, directory, more):
    model = adapted(four_bit(base, double=True), ALL)
    given = packed(model)
    trainer, losses = train(MerakTrainer, MerakArguments, directory, model, **more)
    if world_size > 1:
        assert all(map(is_withheld, model.parameters()))
    assert all("lora_" in name for name in trainer.engine.buffer.slots)
    _, again = train(
        MerakTrainer,
        MerakArguments,
        f"{directory}/resumed",
        adapted(four_bit(base, double=True), ALL, seed=7),
        f"{directory}/checkpoint-2",
        **more,
    )
    assert again == losses
    assert trainer.gather_model() is model
    if rank:
        return losses
    for name, value in given.items():
        assert torch.equal(model.get_parameter(name).data, value), name
    model.save_pretrained(f"{directory}/own")
    loaded = PeftModel.from_pretrained(four_bit(base, double=True), f"{directory}/saved")
    rows = torch.tensor([[5, 6, 7, 8]])
    # an evaluation on a CPU would pack weights anew
    ours, theirs = (each.train()(input_ids=rows).logits for each in (model, loaded))
    assert torch.equal(ours, theirs)
    return losses


class Evaluates(TrainerCallback):
    """Runs the model itself, in evaluation and on a CPU, after each step."""

    def on_step_end(self, args, state, control, model, **kwargs):
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6, 7, 8]]))
        model.train()


def test_evaluations_of_the_model_itself_leave_its_weights_as_they_are(tmp_path):
    base = save_llama(tmp_path / "base", vocab_size=128, num_hidden_layers=1)
    found = []
    for callbacks in ([], [Evaluates()]):
        model = adapted(four_bit(base, double=True))
        for layer in four_bit_layers(model).values():
            layer.support_avx512bf16_for_cpu = callbacks != []  # whatever this CPU is
        given = packed(model)
        data = samples(12, ragged=False)
        args = MerakArguments(str(tmp_path / str(len(found))), **RUN)
        trainer = MerakTrainer(model, args, collate, data, callbacks=callbacks)
        trainer.train()
        trainer.train()
        for name, value in given.items():
            assert torch.equal(model.get_parameter(name).data, value), name
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == found[1]
    assert len(found[0]) == 3


@pytest.mark.parametrize(
    "more", [{}, later({"pipeline_model_parallel_size": 2})], ids=["one process", "pp"]
)
def test_losses_and_adapters_are_those_of_peft_with_bitsandbytes(more, tmp_path):
    base = save_llama(tmp_path / "base", vocab_size=128)
    theirs = adapted(four_bit(base, double=True), ALL)
    _, wanted = train(Trainer, TrainingArguments, tmp_path / "theirs", theirs)
    ours = tmp_path / "ours"
    arguments = (base, str(ours), more)
    found = run_ranks(run, 2, *arguments, timeout=280) if more else [run(0, 1, *arguments)]
    for losses in found:
        assert losses == found[0] == pytest.approx(wanted, rel=1e-5)
    saved, own, expected = (
        load_file(place / WEIGHTS)
        for place in (ours / "saved", ours / "own", tmp_path / "theirs/saved")
    )
    assert saved.keys() == own.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], own[name])
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=2e-5)
    assert not (ours / "saved/model.safetensors").exists()


def both(rank, world_size, base, directory, more):
    found = []
    for make in (lambda model: model, twin_of):
        model = adapted(make(four_bit(base, double=True)), ALL)
        place = f"{directory}/{len(found)}"
        found.append(train(MerakTrainer, MerakArguments, place, model, **more)[1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"fsdp": "full_shard"}, {"tensor_model_parallel_size": 2, "bf16": True}],
    ids=["full", "tp in bf16"],
)
def test_in_other_layouts_losses_are_those_of_the_same_values_as_matrices(more, tmp_path):
    base = save_llama(tmp_path / "base", vocab_size=128)
    for packed, matrices in run_ranks(both, 2, base, str(tmp_path / "ours"), more, timeout=280):
        assert packed == matrices
        assert len(packed) == 3
