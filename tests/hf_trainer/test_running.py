"""Buffers that a training forward changes: running statistics are those of transformers.Trainer,
others are refused.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments

from megatron_merak.errors import TraceError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_steps": 1,
    "save_steps": 3,
    "disable_tqdm": True,
    "report_to": "none",
    "remove_unused_columns": False,
}


class Normed(nn.Module):
    """A norm at either end, the first of which is used twice."""

    def __init__(self, first=None):
        super().__init__()
        torch.manual_seed(0)
        # its gradient would be rounding, of which Adam makes steps
        self.first = first or nn.Linear(6, 8, bias=False)
        self.norm, self.middle = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last, self.head = nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 6)

    def forward(self, x, labels):
        x = self.middle(self.norm(self.norm(self.first(x)).relu())).relu()
        logits = self.head(self.last(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(6, generator=generator) + 1, "labels": number % 6}
        for number in range(count)
    ]


def run(kind, arguments, directory, resume=None, **more):
    trainer = kind(
        Normed(), arguments(str(directory), **{**RUN, **more}), None, rows(32, 1), rows(8, 2)
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{directory}/saved")
    history = trainer.state.log_history
    return trainer, [
        entry.get("loss", entry.get("eval_loss"))
        for entry in history
        if entry.keys() & {"loss", "eval_loss"}
    ]


def divided(rank, world_size, directory, degrees):
    trainer, losses = run(MerakTrainer, MerakArguments, directory, **degrees)
    resumed, again = run(
        MerakTrainer, MerakArguments, f"{directory}/again", f"{directory}/checkpoint-3", **degrees
    )
    assert again == losses
    buffers = dict(resumed.gather_model().named_buffers())
    return losses, {name: buffer.clone() for name, buffer in buffers.items()}


@pytest.mark.parametrize("pp", [1, 2])
def test_running_statistics_are_those_of_transformers(pp, tmp_path):
    _, wanted = run(Trainer, TrainingArguments, tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "saved" / "model.safetensors")
    degrees = {"pipeline_model_parallel_size": pp}
    ranks = (
        run_ranks(divided, pp, str(tmp_path), degrees)
        if pp > 1
        else [divided(0, 1, str(tmp_path), degrees)]
    )
    losses, buffers = ranks[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    for saved in (tmp_path / "saved", tmp_path / "again" / "saved"):
        ours = load_file(saved / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)
        for name, value in buffers.items():
            assert torch.equal(ours[name], value), name
    assert theirs["norm.num_batches_tracked"] == 16 and theirs["last.num_batches_tracked"] == 8


def replicated(rank, world_size, directory):
    args = MerakArguments(directory, **{**RUN, "eval_strategy": "no"})
    trainer = MerakTrainer(Normed(), args, None, rows(32, 1), rows(8, 2))
    trainer.train()
    before = trainer.model.norm.running_mean.clone()
    trainer.evaluate()
    return before, trainer.model.norm.running_mean.clone()


def test_replicas_evaluate_with_the_first_ones(tmp_path):
    (first, after), (second, others) = run_ranks(replicated, 2, str(tmp_path))
    assert (
        torch.equal(first, after) and torch.equal(first, others) and not torch.equal(first, second)
    )


def test_other_state_is_refused_by_name():
    mesh, batch = (
        build_mesh(Grid(), 0, torch.device("cpu")),
        {"x": torch.randn(4, 6), "labels": torch.arange(4)},
    )
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    old = nn.utils.spectral_norm(nn.Linear(6, 8))
    for first, name in ((spectral, "first.parametrizations.weight.0._u"), (old, "first.weight_v")):
        with pytest.raises(TraceError, match=f"buffer {name}: .* keeps no state"):
            engine_of(Normed(first), batch, mesh)
    model = Normed()
    model.norm.momentum = None
    with pytest.raises(TraceError, match="module norm: with momentum=None"):
        engine_of(model, batch, mesh)
