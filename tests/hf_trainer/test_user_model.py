"""The model that the user holds has the trained weights, as under transformers.Trainer, or says
what to call.
"""

import copy
import inspect
import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import ConfigError
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "disable_tqdm": True,
    "report_to": "none",
}


class Sampler(TrainerCallback):
    """What a user's callback sees of the model while it trains."""

    def __init__(self):
        self.samples, self.training = [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.training.append(model.training)
        tokens = model.eval().generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)
        self.samples.append(tokens.tolist())

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        self.training.append(model.training)


def run(kind, arguments, directory, model, **more):
    seen = Sampler()
    args = arguments(str(directory), **RUN, **more)
    trainer = kind(
        model, args, collate, samples(16, ragged=False), samples(4, ragged=False), callbacks=[seen]
    )
    trainer.train()
    return trainer, seen


def weights(directory):
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_one_process_shares_its_weights(bf16, tmp_path):
    theirs, their_samples = run(
        Trainer, TrainingArguments, tmp_path / "theirs", tiny_llama(), bf16=bf16
    )
    model = tiny_llama()
    before = [id(parameter) for parameter in model.parameters()]
    ours, our_samples = run(MerakTrainer, MerakArguments, tmp_path / "ours", model, bf16=bf16)
    assert our_samples.training == their_samples.training
    assert bf16 or our_samples.samples == their_samples.samples
    assert [
        id(parameter) for parameter in model.parameters()
    ] == before and ours.gather_model() is model
    for name, value in theirs.model.state_dict().items():
        assert model.state_dict()[name].dtype == value.dtype
        assert (model.state_dict()[name] - value).abs().mean() < (1e-2 if bf16 else 1e-5)
    ours.save_model(str(tmp_path / "saved"))
    model.save_pretrained(tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == (
        tmp_path / "saved/model.safetensors"
    ).read_bytes()
    assert (tmp_path / "own" / "config.json").read_text() == (
        tmp_path / "saved" / "config.json"
    ).read_text()
    twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    ours.engine.load(tmp_path / "ours" / "checkpoint-2" / "training_state")
    for name, value in weights(tmp_path / "ours" / "checkpoint-2").items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(twin.state_dict()[name], trained[name]) and torch.equal(
            read.state_dict()[name], trained[name]
        )


def test_a_model_without_weights_gets_them(tmp_path):
    with init_empty_weights():
        model = tiny_llama()
    args = MerakArguments(str(tmp_path), **{**RUN, "eval_strategy": "no"})
    trainer = MerakTrainer(model, args, collate, samples(16, ragged=False))
    trainer.train()
    for name, value in weights(tmp_path / "checkpoint-4").items():
        assert torch.equal(model.state_dict()[name], value)
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)


def refused(model):
    found = []
    uses = (model.generate, model.save_pretrained, model.state_dict, model, copy.deepcopy(model))
    for use in (*uses, lambda: pickle.dumps(model)):
        with pytest.raises(
            ConfigError, match=r"Call trainer.gather_model\(\) on every rank"
        ) as caught:
            use()
        found.append(caught.value.what)
    return found


def divided(rank, world_size, directory, tp, pp):
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = MerakArguments(directory, **{**RUN, **degrees})
    model = tiny_llama(rank)
    signature = inspect.signature(model.forward)
    trainer = MerakTrainer(model, args, collate, samples(16), samples(4))
    trainer.train()
    assert inspect.signature(model.forward) == signature
    found = refused(model)
    with pytest.raises(ConfigError, match="gather_model"):
        MerakTrainer(model, args, collate, samples(16), samples(4)).train()
    trainer.predict(samples(3, ragged=False))  # captures anew
    trainer.save_model(f"{directory}/saved")
    assert trainer.gather_model() is model
    if rank == 0:
        saved = LlamaForCausalLM.from_pretrained(f"{directory}/saved")
        for name, value in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)
        rows = torch.tensor([[1, 2, 3]])
        assert torch.equal(model.eval()(input_ids=rows).logits, saved(input_ids=rows).logits)
        model.save_pretrained(f"{directory}/own")
    else:
        refused(model)
    trainer.engine.load(f"{directory}/checkpoint-2/training_state")
    assert refused(model) == found
    trainer.gather_model()
    again = MerakTrainer(model, args, collate, samples(16), samples(4))
    for one, other in zip(again.engine.exported(), trainer.engine.exported(), strict=True):
        assert torch.equal(one.tensor, other.tensor)
    return found


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.long
def test_a_divided_model_is_gathered_or_refused(tp, pp, tmp_path):
    for found in run_ranks(divided, 2, str(tmp_path), tp, pp):
        names = ("generate", "save_pretrained", "state_dict", "forward")
        assert found[:4] == [f"LlamaForCausalLM.{name}" for name in names]
