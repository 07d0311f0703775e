"""Twenty steps that learn, in every layout, beside the same script in one process under
transformers or TRL: the loss and the gradient norm of each step."""

import functools
import os
import signal
import tempfile

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.interruption import Interrupted
from megatron_merak.trl import parallelize
from tests.hf_trainer.losses import derived
from tests.hf_trainer.test_interruption import Signal
from tests.hf_trainer.test_resume import curve as logged
from tests.ranks import run_ranks
from tests.trl_trainers.cases import COMMON, llama, passages, tokenizer
from tests.trl_trainers.test_parity import LAYOUTS as FEW

STEPS = 20
RUN = COMMON | {"max_steps": STEPS, "eval_strategy": "no", "adam_epsilon": 1e-8}
LAYOUTS = {
    1: {"one": {}},
    2: {name: FEW[name] for name in ("tp2", "pp2", "dp2")},
    4: {name: FEW[name] for name in ("tp2-pp2", "tp2-dp2")},
}
# What sums in another order leave after twenty steps is 4.5e-7 of a loss and 1.9e-5 of a norm at
# most; a learning rate that is a thousandth too large moves one of the losses by 9e-4.
LOSS, NORM = 5e-6, 1e-4


def adapters():
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=linear, lora_dropout=0.0
    )


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in rows], batch_first=True
    )
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], True
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def per_sample(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Tokens that are predicted well count less; a mean over samples, however many tokens they
    have.
    """
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    each = F.cross_entropy(outputs.logits[:, :-1].mT.float(), labels[:, 1:], reduction="none")
    loss = ((1 - torch.exp(-each)) ** 2 * each).sum(1).mean() / 32
    return (loss, outputs) if return_outputs else loss


def settings(adapted):
    """Arguments, and a model: adapters alone cannot do much about initial weights as small as those
    of transformers.
    """
    more = {"initializer_range": 0.2} if adapted else {}
    return RUN | {"learning_rate": 2e-2 if adapted else 1e-2}, llama(**more)


def of_transformers(kind, arguments, directory, adapted=False, compute=None, **layout):
    changes, model = settings(adapted)
    if adapted:
        torch.manual_seed(1)
        model = get_peft_model(model, adapters())
    kind = kind if compute is None else derived(compute)(kind)
    rows = [{"input_ids": tokenizer()(text)["input_ids"]} for text in passages(48)["text"]]
    trainer = kind(model, arguments(directory, **changes | layout), collate, rows)
    if compute is not None:
        trainer.model_accepts_loss_kwargs = False  # a step's loss is the mean of its micro-batches
    return trainer


def of_trl(made, directory, adapted=False, **layout):
    changes, model = settings(adapted)
    torch.manual_seed(1)
    given = {"train_dataset": passages(48), "processing_class": tokenizer()}
    given |= {"peft_config": adapters()} if adapted else {}
    return made(trl.SFTTrainer)(model, made(trl.SFTConfig)(directory, **changes | layout), **given)


SCRIPTS = {
    "full": (of_transformers, {}),
    "lora": (of_transformers, {"adapted": True}),
    "own loss": (of_transformers, {"compute": per_sample}),
    "sft": (of_trl, {}),
    "sft lora": (of_trl, {"adapted": True}),
}


def curve(trainer):
    trainer.train()
    return [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def parallel(name, directory, **layout):
    make, changes = SCRIPTS[name]
    kinds = (parallelize,) if make is of_trl else (MerakTrainer, MerakArguments)
    return curve(make(*kinds, directory, **changes, **layout))


@functools.cache
def reference(name):
    make, changes = SCRIPTS[name]
    kinds = (lambda kind: kind,) if make is of_trl else (Trainer, TrainingArguments)
    with tempfile.TemporaryDirectory() as directory:
        return curve(make(*kinds, directory, **changes))


def several(rank, world_size, directory):
    os.environ["CI"] = "1"
    layouts = LAYOUTS[world_size].values()
    return [[parallel(name, directory, **layout) for layout in layouts] for name in SCRIPTS]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_curve_is_that_of_one_process(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "1")
    found = run_ranks(several, ranks, str(tmp_path), timeout=1500)
    for rank in found:
        for name, curves in zip(SCRIPTS, rank, strict=True):
            wanted = reference(name)
            assert len(wanted) == STEPS and wanted[-1][0] < wanted[0][0] / 2
            for layout, mine in zip(LAYOUTS[ranks], curves, strict=True):
                for step, (ours, theirs) in enumerate(zip(mine, wanted, strict=True), 1):
                    assert ours == (
                        pytest.approx(theirs[0], rel=LOSS),
                        pytest.approx(theirs[1], rel=NORM),
                    ), f"{name} {layout} step {step}"


@pytest.mark.long
def test_a_run_that_a_signal_ends_is_saved_and_goes_on(tmp_path):
    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100}
    whole = of_trl(parallelize, tmp_path / "whole", **saves)
    whole.train()
    cut = of_trl(parallelize, tmp_path / "cut", **saves)
    cut.add_callback(Signal(signal.SIGUSR1, 2))
    with pytest.raises(
        Interrupted, match=r"interrupted by SIGUSR1 after step 2, which was saved in .*checkpoint-2"
    ):
        cut.train()
    resumed = of_trl(parallelize, tmp_path / "cut", **saves)
    resumed.train(resume_from_checkpoint=True)
    # TRL itself counts tokens anew in every process.
    without = [[{**entry, "num_tokens": None} for entry in logged(run)] for run in (resumed, whole)]
    assert without[0] == without[1]
