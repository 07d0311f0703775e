"""Parameters that some batches do not use: told by name, since torch's AdamW would leave them as
they are.
"""

import warnings

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, default_data_collator

from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.plan import Grid
from tests.stages.test_captured import trainer_of

BOTH, FIRST = torch.tensor([0, 1, 0, 1]), torch.zeros(4, dtype=torch.long)


class Tasks(nn.Module):
    """Two heads; a batch uses those of its tasks."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(8, width) for width in (8, 4, 4))

    def forward(self, x, task, labels):
        hidden, loss = self.body(x).relu(), x.new_zeros(())
        for number, head in enumerate((self.first, self.second)):
            if (task == number).any():
                losses = nn.functional.cross_entropy(head(hidden), labels, reduction="none")
                loss = loss + (losses * (task == number)).mean()
        return {"loss": loss}


def batch(task, seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (4,), generator=draw)
    return {"x": torch.randn(4, 8, generator=draw), "task": task, "labels": labels}


def test_a_head_that_a_batch_does_not_use_is_told_once_by_name():
    trainer = trainer_of(Tasks(), batch(BOTH), Grid(), 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.gradients([batch(BOTH, 1)])
    with pytest.warns(
        UserWarning, match=r"^second\.bias, second\.weight: some batches do not use"
    ) as told:
        trainer.gradients([batch(FIRST, 2)])
        trainer.gradients([batch(FIRST, 3)])
    assert len(told) == 1


def test_a_head_that_the_first_batch_did_not_use_is_refused_by_name():
    trainer = trainer_of(Tasks(), batch(FIRST), Grid(), 0, 1)
    with pytest.raises(
        PlanError, match=r"second\.bias.*Start with a batch that uses every parameter"
    ):
        trainer.gradients([batch(BOTH, 1)])


class Reads(nn.Module):
    """Reads a layer of which nothing gets a gradient, unless a batch has an odd label."""

    def __init__(self, always=True):
        super().__init__()
        torch.manual_seed(0)
        self.always = always
        self.body = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8)
        self.table = nn.Embedding(4, 8)

    def forward(self, x, labels=None):
        hidden = self.body(x)
        if self.always or (labels % 2 == 0).all():
            with torch.no_grad():
                side = self.fixed(x)
        else:
            side = self.fixed(x)
        logits = hidden + side + self.table.weight[0].detach()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_what_is_read_without_a_gradient_does_not_decay(tmp_path):
    rows = [
        {"x": torch.randn(8, generator=torch.Generator().manual_seed(n)), "labels": n % 8}
        for n in range(8)
    ]
    run = {
        "use_cpu": True,
        "max_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    run |= {"weight_decay": 0.9, "learning_rate": 1e-2}
    trained = []
    for kind, arguments in ((Trainer, TrainingArguments), (MerakTrainer, MerakArguments)):
        trainer = kind(Reads(), arguments(str(tmp_path), **run), default_data_collator, rows)
        trainer.train()
        trained.append(trainer.model)
    assert torch.equal(trained[1].fixed.weight, Reads().fixed.weight)
    for one, other in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Merged(Reads):
    """Reads nothing with a gradient but what is frozen, as with adapters that are merged."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)


def test_training_that_would_change_nothing_is_refused(tmp_path):
    rows = [{"x": torch.ones(8), "labels": 2} for _ in range(4)]
    arguments = MerakArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to="none", save_strategy="no"
    )
    trainer = MerakTrainer(Merged(), arguments, default_data_collator, rows)
    with pytest.raises(ConfigError, match="none of its trainable parameters a gradient.*unmerge"):
        trainer.train()


def test_what_has_a_gradient_in_later_batches_only_is_refused_by_name():
    def of(label):
        return {"x": torch.randn(4, 8), "labels": torch.full((4,), label)}

    trainer = trainer_of(Reads(always=False), of(2), Grid(), 0, 1)
    trainer.gradients([of(4)])
    with pytest.raises(PlanError, match=r"fixed\.bias.*a gradient, but the first batch did not"):
        trainer.gradients([of(3)])
