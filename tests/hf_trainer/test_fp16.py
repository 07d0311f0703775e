"""``MerakArguments(fp16=True)``: what transformers does with autocast and torch's GradScaler on
GPUs. On CPUs it has no fp16, so that a loop by hand stands for it.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler

from megatron_merak.errors import ConfigError, NumericsError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama

STEPS, RATE = 6, 1e-2
RUN = {
    "use_cpu": True,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": RATE,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
    "fp16": True,
}


class Noting(TrainerCallback):
    """Notes batches, scales and weights; before some steps it sets the scale."""

    def __init__(self, scales=()):
        self.set_to, self.scales, self.weights = dict(scales), [], []

    def on_step_begin(self, args, state, control, **more):
        self.trainer.engine.scaler.scale = self.set_to.get(
            state.global_step, self.trainer.engine.scaler.scale
        )

    def on_step_end(self, args, state, control, **more):
        self.scales.append(self.trainer.engine.scaler.scale)
        self.weights.append(self.trainer.engine.optimizer.master.clone())


def made(directory, noting=None, model=None, loss=None, resume=None, **more):
    """(trainer, the entries of its log, what was noted) of a run."""
    noting = noting or Noting()
    args = MerakArguments(str(directory), **RUN | more)
    trainer = MerakTrainer(
        model or tiny_llama(),
        args,
        train_dataset=samples(4 * STEPS, ragged=False),
        data_collator=collate,
        callbacks=[noting],
        compute_loss_func=loss,
    )
    noting.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry], noting


def by_hand(directory):
    """Loss, norm and learning rate of every step, on the batches that transformers makes, and the
    model at the end.
    """
    args = TrainingArguments(str(directory), **RUN | {"fp16": False})
    batches = Trainer(
        tiny_llama(), args, collate, samples(4 * STEPS, ragged=False)
    ).get_train_dataloader()
    model, steps = tiny_llama(), []
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    scheduler, scaler = get_scheduler("linear", optimizer, 0, STEPS), torch.amp.GradScaler("cpu")
    for batch in batches:
        steps.append({"learning_rate": scheduler.get_last_lr()[0]})
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        steps[-1] |= {
            "loss": loss.item(),
            "grad_norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(),
        }
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        optimizer.zero_grad()
    return steps, model


def test_it_trains_as_autocast_and_grad_scaler_do(tmp_path):
    trainer, log, noting = made(tmp_path)
    steps, model = by_hand(tmp_path / "by hand")
    assert trainer.engine.plan.dtype == "float16" and noting.scales == [65536.0] * STEPS
    for ours, theirs in zip(log, steps, strict=True):
        assert ours["learning_rate"] == pytest.approx(theirs["learning_rate"])
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=3e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    trainer.save_model(str(tmp_path / "saved"))
    for name, value in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0.01)
    predicted = trainer.predict(samples(4, ragged=False))
    assert (
        predicted.metrics["test_loss"] < log[0]["loss"]
        and predicted.predictions.dtype == np.float32
    )


def test_a_skipped_step_changes_neither_weights_nor_rate(tmp_path):
    _, log, noting = made(tmp_path, Noting({1: 2.0**60, 2: 65536.0}))
    assert noting.scales == [2.0**16, 2.0**59, *[2.0**16] * 4]
    rates = [entry["learning_rate"] for entry in log]
    assert rates[1] == rates[2] and rates == pytest.approx(
        [RATE * (1 - done / STEPS) for done in (0, 1, 1, 2, 3, 4)]
    )
    assert torch.equal(noting.weights[0], noting.weights[1]) and not torch.equal(
        noting.weights[1], noting.weights[2]
    )


def test_a_resumed_run_goes_on_with_the_scale(tmp_path):
    more = {"save_strategy": "steps", "save_steps": 3}
    _, log, noting = made(tmp_path / "unbroken", Noting({1: 2.0**60, 2: 2.0**12}), **more)
    resumed = made(tmp_path / "resumed", resume=str(tmp_path / "unbroken" / "checkpoint-3"), **more)
    assert resumed[2].scales == noting.scales[3:] == [2.0**12] * 3
    ours, theirs = (
        [entry[key] for entry in log[-3:] for key in ("loss", "learning_rate")]
        for log in (resumed[1], log)
    )
    assert ours == theirs and all(map(torch.equal, resumed[2].weights, noting.weights[3:]))


def test_a_loss_of_the_script_gets_fp32(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        assert outputs.logits.dtype == torch.float32
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    plain, own = made(tmp_path / "plain")[1], made(tmp_path / "own", loss=loss)[1]
    assert [entry["loss"] for entry in own] == pytest.approx(
        [entry["loss"] for entry in plain], abs=2e-3
    )


def test_gradients_that_no_scale_saves_end_the_run(tmp_path):
    model = tiny_llama()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(
        NumericsError,
        match="max_consecutive_skipped_steps 2: .* at a loss scale of 0.25: .* in bf16",
    ):
        made(tmp_path, Noting({0: 1.0}), model, max_consecutive_skipped_steps=2)


def test_a_frozen_fp16_part_stays_as_it_is(tmp_path):
    model = tiny_llama().half().requires_grad_(False)
    model.lm_head.float().requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, log, _ = made(tmp_path, model=model)
    plain = tiny_llama().requires_grad_(False)
    plain.lm_head.requires_grad_(True)
    expected = made(tmp_path / "plain", model=plain)[1]
    assert [entry["loss"] for entry in log] == pytest.approx(
        [entry["loss"] for entry in expected], abs=3e-3
    )
    trainer.save_model(str(tmp_path / "saved"))
    for name, value in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]) == (
            name != "lm_head.weight"
        )


def test_what_does_not_train_in_fp16_is_named(tmp_path):
    with pytest.raises(ConfigError, match="one of fp16 and bf16"):
        MerakArguments(str(tmp_path), bf16=True, **RUN)
    with pytest.raises(
        ConfigError, match="fp16_full_eval .* in the precision of training. Use fp16"
    ):
        MerakArguments(str(tmp_path), fp16_full_eval=True, **RUN)
    with pytest.raises(
        ConfigError, match="its dtype is bfloat16, and fp16=True is for models in float32"
    ):
        made(tmp_path, model=tiny_llama().bfloat16())
    for fp16 in (False, True):
        with pytest.raises(
            ConfigError, match=r"its dtype is float16.* model.float\(\) before, and set fp16=True"
        ):
            made(tmp_path, model=tiny_llama().half(), fp16=fp16)
