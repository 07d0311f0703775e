"""What TRL's trainers do around training, parallelized; what cannot be so is refused by name."""

import functools
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
import trl
from peft import PromptTuningConfig
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.overrides import Refused
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.trl import parallelize
from megatron_merak.trl.parallelize import SERIES
from tests.ranks import run_ranks
from tests.trl_trainers.cases import COMMON, llama, mixtral, pairs, passages, tokenizer
from tests.trl_trainers.test_parity import history, parallel

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")


def sft(directory, kind=None, made=parallelize, model=None, **more):
    args = made(trl.SFTConfig)(str(directory), **COMMON | more)
    data = {
        "train_dataset": passages(24),
        "eval_dataset": passages(8),
        "processing_class": tokenizer(),
    }
    return made(kind or trl.SFTTrainer)(model or llama(), args=args, **data)


def test_no_usage_data_is_sent(tmp_path, monkeypatch):
    sent = []
    monkeypatch.delenv("CI")
    monkeypatch.setattr(
        "trl.trainer.base_trainer.send_telemetry", lambda *args, **more: sent.append(args)
    )
    sft(tmp_path / "theirs", made=lambda kind: kind)
    assert len(sent) == 1
    sft(tmp_path / "ours")
    assert len(sent) == 1


def dpo(directory, **more):
    args = parallelize(trl.DPOConfig)(str(directory), **COMMON | {"eval_strategy": "no"} | more)
    data = {"train_dataset": pairs(8), "processing_class": tokenizer()}
    return parallelize(trl.DPOTrainer)(llama(), llama(), args=args, **data)


@pytest.mark.long
def test_resumes(tmp_path):
    told = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    through = sft(tmp_path, **told)
    through.train()
    resumed = sft(tmp_path / "again", **told)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(resumed)[-2]["loss"] == history(through)[-2]["loss"]


@pytest.mark.long
def test_a_directory_in_bf16(tmp_path):
    """As shipped: TRL trains in bf16 unless told not to, and loads the model of a
    directory itself.
    """
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    curves = []
    for made in (parallelize, lambda kind: kind):
        args = made(trl.SFTConfig)(str(tmp_path / "out"), **COMMON | {"bf16": None})
        trainer = made(trl.SFTTrainer)(
            str(tmp_path / "model"), args, train_dataset=passages(24), eval_dataset=passages(8)
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert curves[0] == pytest.approx(curves[1], rel=5e-3)
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.long
def test_a_step_of_fewer_micro_batches_balances_experts_as_trl_does(tmp_path):
    """Five batches of an epoch in steps of two: the loss of the experts is a mean over one in the
    third.
    """
    curves = []
    for made in (parallelize, lambda kind: kind):
        args = made(trl.SFTConfig)(
            str(tmp_path), **COMMON | {"eval_strategy": "no", "router_aux_loss_coef": 0.5}
        )
        trainer = made(trl.SFTTrainer)(
            mixtral(), args, train_dataset=passages(20), processing_class=tokenizer()
        )
        trainer.train()
        curves.append(
            [
                entry[name]
                for entry in trainer.state.log_history[:3]
                for name in ("loss", "grad_norm", "aux_loss")
            ]
        )
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def accuracy(prediction):
    return {
        "right": float(
            (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean()
        )
    }


def test_metrics_of_logits(tmp_path):
    def run(made):
        args = made(trl.SFTConfig)(str(tmp_path), **COMMON | {"per_device_eval_batch_size": 4})
        trainer = made(trl.SFTTrainer)(
            llama(), args, train_dataset=passages(8), eval_dataset=passages(8), processing_class=tokenizer(),
            compute_metrics=accuracy,
        )  # fmt: skip
        return trainer.evaluate()

    ours, theirs = run(parallelize), run(lambda kind: kind)
    for name in ("eval_loss", "eval_right", "eval_entropy", "eval_mean_token_accuracy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def smoothed(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
    batch, length, words = logits.shape
    losses = cross_entropy(
        logits.reshape(-1, words), targets.reshape(-1), reduction="none", label_smoothing=0.1
    )
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.view(batch, length).masked_fill(targets == -100, 0).sum() / count


def test_streams_a_loss_of_logits_and_predictions(tmp_path):
    """Metrics of an evaluation in which nothing asks for logits, then predictions without
    ``compute_metrics``.
    """
    found = []
    for made in (parallelize, lambda kind: kind):
        args = made(trl.SFTConfig)(
            str(tmp_path), **COMMON | {"max_steps": 2, "eval_steps": 1, "pad_to_multiple_of": 64}
        )
        trainer = made(trl.SFTTrainer)(
            llama(), args, train_dataset=passages(24).to_iterable_dataset(), eval_dataset=passages(6),
            processing_class=tokenizer(), compute_loss_func=smoothed,
        )  # fmt: skip
        trainer.train()
        output = trainer.predict(trainer.eval_dataset)
        found.append((history(trainer), output.predictions, output.label_ids))
        trainer.create_model_card(model_name="tiny")
    ours, theirs = found
    for entry, other in zip(ours[0], theirs[0], strict=True):
        assert entry == pytest.approx(other, rel=2e-4, abs=2e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3, abs=1e-4)
    assert (ours[2] == theirs[2]).all()


def test_losses_of_experts_are_whole_in_evaluations(tmp_path):
    """TRL divides them by the steps of accumulation in training only."""
    ours, theirs = (
        sft(tmp_path, made=made, model=mixtral()).evaluate()
        for made in (parallelize, lambda kind: kind)
    )
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert ours["eval_aux_loss"] == pytest.approx(theirs["eval_aux_loss"], rel=1e-5)


class Penalized(trl.SFTTrainer):
    """A script's own loss over TRL's, with a metric of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        outputs = model(**inputs, fused_lm_head=True)
        self._metrics["train" if self.model.training else "eval"]["least"].append(
            self.accelerator.gather(outputs.log_probs.detach()).min().item()
        )
        return loss + 0.1 * (outputs.log_probs**2).mean()


@pytest.mark.long
def test_a_class_derived_from_trls(tmp_path):
    runs = [sft(tmp_path, Penalized, made) for made in (parallelize, lambda kind: kind)]
    for trainer in runs:
        trainer.train()
    ours, theirs = map(history, runs)
    for entry, other in zip(ours, theirs, strict=True):
        assert entry == pytest.approx(other, rel=2e-4, abs=2e-5)


class Decayed(trl.SFTTrainer):
    """A penalty on weights, over TRL's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        norms = [
            p.float()
            for name, p in model.named_parameters()
            if name.endswith("norm.weight") and p.dim() == 1
        ]
        return loss + 0.1 * sum((norm**2).sum() for norm in norms)


def decayed(rank, world_size, directory, **layout):
    os.environ["CI"] = "1"
    trainer = sft(directory, Decayed, eval_strategy="no", max_steps=2, **layout)
    trainer.train()
    return history(trainer)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    ["tensor_model_parallel_size", "pipeline_model_parallel_size"],
)
def test_a_loss_may_read_weights_that_ranks_share(layout, tmp_path):
    theirs = sft(tmp_path, Decayed, lambda kind: kind, eval_strategy="no", max_steps=2)
    theirs.train()
    for ours in run_ranks(functools.partial(decayed, **{layout: 2}), 2, str(tmp_path), timeout=240):
        for entry, other in zip(ours, history(theirs), strict=True):
            assert entry == pytest.approx(other, rel=2e-4, abs=2e-5)


class FromLogits(trl.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        self._metrics["train"]["largest"].append(
            self.accelerator.gather(outputs.logits.detach()).max().item()
        )
        return outputs.logits.float().logsumexp(-1).mean()


class ByEntropy(trl.SFTTrainer):
    """Weighs its loss by what TRL computes for metrics."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return self.weighed(loss, model(**inputs, fused_lm_head=True).entropy)

    def weighed(self, loss, entropy):
        return loss * 0.5 if entropy.max() > 100 else loss


class ByNumber(ByEntropy):
    def weighed(self, loss, entropy):
        return loss * (1 + entropy.mean().item())


class ByFloat(ByEntropy):
    def weighed(self, loss, entropy):
        return loss * math.exp(entropy.mean().item())


def prompted(directory):
    args = parallelize(trl.SFTConfig)(str(directory), **COMMON | {"eval_strategy": "no"})
    tokens = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    data = {"train_dataset": passages(8), "processing_class": tokenizer(), "peft_config": tokens}
    return parallelize(trl.SFTTrainer)(llama(), args, **data)


class Steps(trl.SFTTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    "run, what",
    [
        (lambda d: parallelize(trl.GRPOTrainer), "GRPOTrainer"),
        (
            lambda d: sft(
                d, made=lambda kind: parallelize(kind) if kind is trl.SFTTrainer else kind
            ),
            "args SFTConfig",
        ),
        (
            lambda d: parallelize(trl.SFTTrainer)(llama(), MerakArguments(str(d), use_cpu=True)),
            "args MerakArguments",
        ),
        (prompted, "PromptTuningConfig"),
        (lambda d: sft(d, ByEntropy).train(), "condition"),
        (lambda d: sft(d, ByNumber).train(), "metrics only"),
        (lambda d: sft(d, ByFloat).train(), "makes a number"),
        (lambda d: sft(d, activation_offloading=True), "activation_offloading"),
        (lambda d: sft(d, Steps), "training_step"),
        (lambda d: sft(d, FromLogits, eval_strategy="no").train(), "handed out|hand out"),
        (lambda d: dpo(d, sync_ref_model=True), "sync_ref_model"),
        (lambda d: dpo(d, precompute_ref_log_probs=True), "precompute_ref_log_probs"),
    ],
)
def test_refused(run, what, tmp_path):
    with pytest.raises((ConfigError, TraceError), match=what):
        run(tmp_path)


@pytest.mark.long
def test_adapters_are_saved_alone(tmp_path):
    parallel("sft-lora", str(tmp_path))
    assert (tmp_path / "adapter_model.safetensors").exists() and not (
        tmp_path / "model.safetensors"
    ).exists()
    base = AutoModelForCausalLM.from_config(llama().config)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert any(
        "lora_B" in name and torch.any(value != 0) for name, value in loaded.named_parameters()
    )


def test_a_config_survives_a_dictionary_and_a_pickle(tmp_path):
    args = parallelize(trl.SFTConfig)(str(tmp_path), **COMMON)
    again = parallelize(trl.SFTConfig)(**args.to_dict())
    for other in (again, pickle.loads(pickle.dumps(args))):
        assert isinstance(other, trl.SFTConfig) and isinstance(other, MerakArguments)
        assert other.to_dict() == args.to_dict() and other.world.size == 1


def test_the_overrides_of_trls_trainers_are_known():
    """What MerakTrainer refuses to a class is done another way for these, and for nothing else."""
    known = {
        "prediction_step",
        "training_step",
        "_save_checkpoint",
        "_set_signature_columns_if_needed",
    }
    for kind in (trl.SFTTrainer, trl.DPOTrainer, trl.RewardTrainer):
        classes = [each for each in kind.__mro__ if each.__module__.startswith("trl.")]
        names = {
            name
            for each in classes
            for name in vars(each)
            if isinstance(vars(MerakTrainer).get(name), Refused)
        }
        assert names <= known | {"create_model_card", "loss_is_scaled_for_ga"}, kind


def test_another_series_of_trl_is_refused(monkeypatch):
    assert f"trl>={SERIES.rstrip('.')},<1.17" in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(ConfigError, match="trl 1.17.0: what its trainers do is known of 1.16"):
        parallelize(trl.SFTTrainer)
