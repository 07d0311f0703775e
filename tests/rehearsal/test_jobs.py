"""Whole jobs on a GPU that only pretends: launched, trained, evaluated, saved and resumed."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from megatron_merak import MerakArguments, MerakTrainer
from megatron_merak.parallel.launch import launch
from megatron_merak.training.pretrain import pretrain
from tests.graph.tiny import tiny
from tests.parity.cases import Case

from .device import DEVICE, Rehearsal
from .driver import driver
from .trainers import LAYERS

STEPS = 3


def by_file(rehearsal):
    return Counter(finding.place.split(":")[0].rpartition("/")[2] for finding in rehearsal.findings)


def samples(count):
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(3, 96, (16 - 4 * (k % 3 == 2),), generator=generator) for k in range(count)
    ]
    return [
        {"input_ids": each, "labels": each, "attention_mask": torch.ones_like(each)} for each in ids
    ]


def collate(rows):
    """Padded on the right; two of three rows are whole."""
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        key: torch.stack([pad(r[key], (0, 16 - len(r[key])), value=v) for r in rows])
        for key, v in filled.items()
    }


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set", "ignore:Accessing the data pointer of FakeTensor"
)
def test_merak_trainer(tmp_path):
    """The loss and the norm are read once per step, together."""
    real, _, _ = tiny("llama")
    arguments = {
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    arguments |= {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
        "bf16": True,
    }
    data = {"train_dataset": samples(12), "eval_dataset": samples(4), "data_collator": collate}
    with Rehearsal() as rehearsal, driver():
        trainer = MerakTrainer(
            real(), MerakArguments(str(tmp_path), length_buckets="none", **arguments), **data
        )
        assert trainer.args.device == DEVICE
        assert trainer.train().global_step == STEPS
        tables = [finding for finding in rehearsal.findings if finding.inside]
        found = by_file(rehearsal)
    assert found["host_read.py"] == STEPS and not found.keys() & {
        "adamw.py",
        "replicas.py",
        "loop.py",
    }
    assert found["trained_model.py"] == found["trials.py"], (
        "only the first batch, computed in two ways, is read alone"
    )
    assert {finding.kind for finding in tables} == {"sync"} and found["prelude.py"] == len(tables)
    assert (tmp_path / f"checkpoint-{STEPS}").is_dir()


def test_pretraining(tmp_path, capsys):
    """With the loss of the last evaluation; what is resumed trains one step more."""
    config = Case("gpt2", dtype="bf16").config()
    train = replace(
        config.train, train_iters=STEPS, global_batch_size=4, eval_interval=2, eval_iters=1
    )
    config = replace(config, model=replace(config.model, num_layers=LAYERS), train=train)
    config = replace(config, optimizer=replace(config.optimizer, lr_warmup_iters=0))
    save = replace(config.checkpoint, save=str(tmp_path), save_interval=2)
    with Rehearsal() as rehearsal, driver():
        pretrain(replace(config, checkpoint=save), launch())
        assert "predicted on H200" in capsys.readouterr().out
        found = by_file(rehearsal)
        assert not rehearsal.inside() and found["host_read.py"] == STEPS and "adamw.py" not in found
        rehearsal.findings.clear()
        pretrain(
            replace(config, checkpoint=replace(save, load=str(tmp_path), ckpt_step=2)), launch()
        )
        assert not rehearsal.inside() and by_file(rehearsal)["host_read.py"] == 1
