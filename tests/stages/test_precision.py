"""Which dtype a model computes in and is saved in: as transformers.Trainer, or a refusal that names
the weight.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments

from megatron_merak.errors import ConfigError, MerakError, TraceError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.stages.precision import compute_dtype
from tests.engines import engine_of, step
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks
from tests.stages.test_captured import part

HALF = torch.bfloat16
RUN = {
    "use_cpu": True,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
}


def llama(dtype=torch.float32, head=None, frozen=False):
    model = tiny_llama().to(dtype)
    model.lm_head.to(head or dtype)
    model.model.embed_tokens.weight.requires_grad_(not frozen)
    return model


def trained(kind, arguments, model, directory, **more):
    """Losses, the saved tensors, and the dtype that the saved config names."""
    args = arguments(str(directory), **RUN, **more)
    trainer = kind(model, args, train_dataset=samples(12, ragged=False), data_collator=collate)
    trainer.train()
    trainer.save_model(str(directory / "saved"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    config = json.loads((directory / "saved" / "config.json").read_text())
    return losses, load_file(directory / "saved" / "model.safetensors"), config["dtype"]


CASES = {
    "an fp32 model under bf16": ({}, True),
    "with frozen weights": ({"frozen": True}, True),
    "a bf16 model": ({"dtype": HALF}, False),
    "a bf16 model with an fp32 head under bf16": ({"dtype": HALF, "head": torch.float32}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_saved_in_the_dtypes_that_transformers_saves(name, tmp_path):
    options, bf16 = CASES[name]
    losses, tensors, dtype = trained(
        MerakTrainer, MerakArguments, llama(**options), tmp_path / "ours", bf16=bf16
    )
    wanted, theirs, their_dtype = trained(
        Trainer, TrainingArguments, llama(**options), tmp_path / "theirs", bf16=bf16
    )
    assert dtype == their_dtype
    assert {k: v.dtype for k, v in tensors.items()} == {k: v.dtype for k, v in theirs.items()}
    assert losses == pytest.approx(wanted, abs=3e-3)
    for key, value in tensors.items():
        torch.testing.assert_close(value.float(), theirs[key].float(), rtol=0, atol=0.05)
    if options.get("frozen"):
        assert torch.equal(tensors["model.embed_tokens.weight"], llama().model.embed_tokens.weight)
    elif not options:  # the masters, which know more than bf16 can hold
        assert not torch.equal(
            tensors["lm_head.weight"], tensors["lm_head.weight"].to(HALF).float()
        )


class Routed(nn.Module):
    """A bf16 model whose router is fp32, as its own forward expects."""

    def __init__(self, dtype=torch.float32, router=torch.float32, casts=True):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.router, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8), requires_grad=False)
        self.to(dtype)
        self.router.to(router)
        self.scale.data = self.scale.data.float()
        self.casts = casts

    def forward(self, x, labels):
        x = x.to(self.up.weight.dtype)
        gate = self.router(x.float() if self.casts else x).softmax(-1)
        logits = self.down(self.up(x).relu()).float() * gate * self.scale
        return nn.functional.cross_entropy(logits, labels)


def batch():
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(4, 8, generator=generator),
        "labels": torch.randint(8, (4,), generator=generator),
    }


def routed(rank, world_size, grid, root):
    """Gradients of the fp32 and the bf16 parts, then weights before and after a step and a resume
    elsewhere.
    """
    made = []
    for _ in range(2):
        mesh = build_mesh(grid, rank, torch.device("cpu"))
        made.append(engine_of(Routed(HALF), batch(), mesh, dtype="bfloat16"))
    trainer, resumed = made
    trainer.gradients([batch()])
    shards = list(trainer.shards(trainer.buffer.main_grad))
    grads = {s.name: (s, s.tensor.clone()) for s in shards}
    step(trainer, [batch()], 1e-2, 0.0)
    trainer.save(root)
    resumed.load(root)
    for one, other in zip(trainer.exported(), resumed.exported(), strict=True):
        assert torch.equal(one.tensor, other.tensor) and one.tensor.dtype == other.tensor.dtype
    assert step(trainer, [batch()], 1e-2, 0.0) == step(resumed, [batch()], 1e-2, 0.0)
    trainer.save_hf(f"{root}/saved")
    return grads


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2)], ids=str)
def test_an_fp32_part_of_a_bf16_model_stays_fp32(grid, tmp_path):
    model = Routed(HALF)
    model(**batch()).backward()
    found = (
        run_ranks(routed, grid.size, grid, str(tmp_path))
        if grid.size > 1
        else [routed(0, 1, grid, str(tmp_path))]
    )
    for grads in found:
        for name, (shard, grad) in grads.items():
            exact = name.startswith("router") and grid.size == 1
            expected = part(model.get_parameter(name).grad, shard).float()
            torch.testing.assert_close(
                grad, expected, rtol=1e-5 if exact else 0.02, atol=1e-7 if exact else 1e-3
            )
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: value.dtype for name, value in saved.items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    assert torch.equal(saved["scale"], model.scale)
    assert not torch.equal(saved["router.weight"], saved["router.weight"].to(HALF).float())


def test_what_does_not_train_is_named(tmp_path):
    args = MerakArguments(str(tmp_path), **RUN)
    data = samples(4, ragged=False)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(
            ConfigError, match=r"model.embed_tokens.weight: its dtype is float(16|64)"
        ):
            MerakTrainer(llama(dtype), args, collate, data).train()
    with pytest.raises(TraceError, match=r"self.lm_head.* its operands are bfloat16 and float32"):
        MerakTrainer(llama(HALF, torch.float32), args, collate, data).train()
    quantized = llama()
    quantized.is_quantized = True
    quantized.quantization_method = "bitsandbytes"
    refused = r"model LlamaForCausalLM: its weights are quantized by bitsandbytes.*torch.bfloat16"
    for model in (quantized, torch.nn.ModuleDict({"base": quantized})):
        with pytest.raises(ConfigError, match=refused):
            compute_dtype(model, bf16=True)
    mesh = build_mesh(Grid(), 0, torch.device("cpu"))
    for model, dtype in (
        (Routed(HALF, casts=False), "bfloat16"),
        (Routed(router=torch.float32), "bfloat16"),
    ):
        with pytest.raises(MerakError, match=r"self.router.* its operands are"):
            engine_of(model, batch(), mesh, dtype=dtype)
