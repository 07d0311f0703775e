"""Parameters that some batches do not use: told by name, since torch's AdamW would leave them as they are."""

import warnings

import pytest
import torch
from torch import nn

from megatron_merak.errors import PlanError
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
    with pytest.warns(UserWarning, match=r"^second\.bias, second\.weight: some batches do not use") as told:
        trainer.gradients([batch(FIRST, 2)])
        trainer.gradients([batch(FIRST, 3)])
    assert len(told) == 1


def test_a_head_that_the_first_batch_did_not_use_is_refused_by_name():
    trainer = trainer_of(Tasks(), batch(FIRST), Grid(), 0, 1)
    with pytest.raises(PlanError, match=r"second\.bias.*Start with a batch that uses every parameter"):
        trainer.gradients([batch(BOTH, 1)])
