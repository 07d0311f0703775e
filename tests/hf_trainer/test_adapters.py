"""LoRA models of peft: trained as under transformers.Trainer, saved as peft saves them, on every
layout.
"""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from megatron_merak.checkpoint.hf import from_pretrained
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import is_withheld
from tests.captured_once import Captures
from tests.choice import later
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "disable_tqdm": True,
    "report_to": "none",
}
CAPTURES = Captures()
FILES = ("README.md", "adapter_config.json", "adapter_model.safetensors")


def adapted(base=None, seed=0, **more):
    base = base or tiny_llama(0)
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=8,
            target_modules=targets,
            lora_dropout=0.0,
            **more,
        ),
    )


def train(kind, arguments, directory, model, resume=None, **more):
    trainer = kind(
        model, arguments(str(directory), **RUN | more), collate, samples(12, ragged=False)
    )
    with CAPTURES.shared():
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{directory}/saved")
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(rank, world_size, directory, degrees, more):
    model = adapted(seed=rank, **more)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trainer, losses = train(MerakTrainer, MerakArguments, directory, model, **degrees)
    assert all("lora_" in name or "modules_to_save" in name for name in trainer.engine.buffer.slots)
    resumed, again = train(
        MerakTrainer,
        MerakArguments,
        f"{directory}/resumed",
        adapted(seed=7, **more),
        f"{directory}/checkpoint-2",
        **degrees,
    )
    assert again == losses and trainer.gather_model() is model
    if rank == 0:
        for name, value in frozen.items():
            assert torch.equal(model.get_parameter(name), value)
        model.save_pretrained(f"{directory}/own")
        rows = torch.tensor([[5, 6, 7, 8]])
        return losses, model.eval()(input_ids=rows).logits.detach()
    return losses, None


def check(directory, losses, logits, wanted, theirs):
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name in FILES:
        assert (directory / "saved" / name).read_bytes() == (directory / "own" / name).read_bytes()
    config, their_config = (
        json.loads((d / "saved" / FILES[1]).read_text()) for d in (directory, theirs)
    )
    for each in (config, their_config):  # sets, in any order
        each["target_modules"] = sorted(each["target_modules"])
    assert config == their_config
    ours, expected = (load_file(d / "saved" / FILES[2]) for d in (directory, theirs))
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5)
    for saved in ("saved", "resumed/saved", "checkpoint-3"):
        loaded = PeftModel.from_pretrained(tiny_llama(0), directory / saved).eval()
        assert torch.equal(loaded(input_ids=torch.tensor([[5, 6, 7, 8]])).logits, logits), saved
    assert not (directory / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "more", [{}, later({"modules_to_save": ["lm_head"]})], ids=["lora", "with a head"]
)
def test_adapters_are_those_of_transformers_and_peft(more, tmp_path):
    _, wanted = train(Trainer, TrainingArguments, tmp_path / "theirs", adapted(**more))
    for tp, pp in ((1, 1), (1, 2)) if more else ((1, 1), (2, 1)):
        directory, ranks = tmp_path / f"{tp}{pp}", tp * pp
        arguments = (
            str(directory),
            {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
            more,
        )
        found = run_ranks(run, ranks, *arguments) if ranks > 1 else [run(0, 1, *arguments)]
        assert all(losses == found[0][0] for losses, _ in found)
        check(directory, *found[0], wanted, tmp_path / "theirs")


@pytest.mark.slow
def test_so_are_those_of_replicas_that_share_in_two_instances(tmp_path):
    more, batch = {"modules_to_save": ["lm_head"]}, {"per_device_train_batch_size": 3}
    theirs = (Trainer, TrainingArguments, tmp_path / "theirs", adapted(**more))
    _, wanted = train(*theirs, gradient_accumulation_steps=4, **batch)
    ways = {"fsdp": "hybrid_shard", "num_distributed_optimizer_instances": 2} | batch
    found = run_ranks(run, 4, str(tmp_path / "ours"), ways, more)
    assert all(losses == found[0][0] for losses, _ in found)
    check(tmp_path / "ours", *found[0], wanted, tmp_path / "theirs")


def with_embeddings(rank, world_size, directory, more):
    torch.manual_seed(rank)
    # of a base's embeddings peft writes the frozen weights, too
    targets = ["embed_tokens", "q_proj"]
    model = get_peft_model(
        tiny_llama(0), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    )
    trainer, losses = train(MerakTrainer, MerakArguments, directory, model, **more)
    assert world_size == 1 or all(map(is_withheld, model.parameters()))
    if trainer.gather_model() and rank == 0:
        model.save_pretrained(f"{directory}/own")
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"pipeline_model_parallel_size": 2}, {"fsdp": "full_shard"}], ids=["pp", "full"]
)
def test_frozen_embeddings_are_saved_as_peft_saves_them(more, tmp_path):
    wanted = with_embeddings(0, 1, str(tmp_path / "one"), {})
    for losses in run_ranks(with_embeddings, 2, str(tmp_path / "ours"), more, timeout=250):
        assert len(losses) == 3 and ("fsdp" in more or losses == pytest.approx(wanted, rel=1e-5))
    for name in FILES:
        assert (tmp_path / "ours/saved" / name).read_bytes() == (
            tmp_path / "ours/own" / name
        ).read_bytes()
    found, one = (load_file(tmp_path / place / "saved" / FILES[2]) for place in ("ours", "one"))
    assert found.keys() == one.keys()
    (frozen,) = (name for name in one if "lora" not in name)
    assert torch.equal(found[frozen], tiny_llama(0).model.embed_tokens.weight) and torch.equal(
        found[frozen], one[frozen]
    )


def test_adapters_of_a_bf16_model_train_as_under_autocast(tmp_path):
    """They are fp32, by peft; their products are not."""
    found = []
    for kind, arguments in ((Trainer, TrainingArguments), (MerakTrainer, MerakArguments)):
        model = adapted(tiny_llama(0).to(torch.bfloat16))
        directory = tmp_path / kind.__name__
        found.append(train(kind, arguments, directory, model, bf16=True))
    (_, wanted), (trainer, losses) = found
    assert losses == pytest.approx(wanted, abs=3e-3)
    theirs, ours = (
        load_file(tmp_path / kind.__name__ / "saved" / FILES[2]) for kind in (Trainer, MerakTrainer)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype == torch.float32
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0.01)
    assert trainer.engine.buffer.dtype == torch.bfloat16
    frozen = trainer.engine.parameter_shards.stored
    assert all(x.exact is x.storage for name, x in frozen.items() if "lora_" not in name)


def test_the_base_is_read_from_its_directory(tmp_path):
    tiny_llama(3).save_pretrained(tmp_path / "base")
    model = adapted(from_pretrained(tmp_path / "base"))
    _, losses = train(MerakTrainer, MerakArguments, tmp_path / "ours", model)
    _, wanted = train(Trainer, TrainingArguments, tmp_path / "theirs", adapted(tiny_llama(3)))
    assert losses == pytest.approx(wanted, rel=1e-5)
    loaded = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "ours" / "saved"
    )
    rows = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded.eval()(input_ids=rows).logits, model.eval()(input_ids=rows).logits)


class Distils(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        wanted = model.teacher(input_ids=inputs["input_ids"]).logits
        loss = outputs.loss + (outputs.logits - wanted).square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("wrapped_last", [True, False])
def test_a_part_of_the_base_is_read_from_its_own_directory(tmp_path, wrapped_last):
    """The frozen teacher comes from another directory than the base, before or after the adapters
    were made.
    """
    for seed, name in ((3, "base"), (4, "teacher")):
        tiny_llama(seed).save_pretrained(tmp_path / name)

    def distilled(load, kind, arguments):
        base = load(tmp_path / "base")
        model = base if wrapped_last else adapted(base)
        model.teacher = load(tmp_path / "teacher").requires_grad_(False)
        model = adapted(base) if wrapped_last else model
        return train(
            type("Own", (kind,), {"compute_loss": Distils.compute_loss}),
            arguments,
            tmp_path / "run",
            model,
        )

    _, losses = distilled(from_pretrained, MerakTrainer, MerakArguments)
    _, wanted = distilled(LlamaForCausalLM.from_pretrained, Trainer, TrainingArguments)
    assert losses == pytest.approx(wanted, rel=1e-5)
