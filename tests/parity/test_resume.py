"""Save, load into a new trainer, go on: the unbroken run, to the bit in its own layout, up to
rounding in another.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_merak.training.trainer import Trainer
from tests.ranks import run_ranks

from .batches import SAMPLES, replica_batch
from .cases import Case
from .rig import mesh_of, new_trainer, one

pytestmark = pytest.mark.long

SAVED, LAST = 3, 7
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
# (unbroken run, layouts that resume it). Masks of attention depend on the tensor-parallel size:
# there dropout is off.
RUNS = [
    (Case("gpt2", tp=2, pp=2, **DROPOUT), []),
    (
        Case("gpt2", tp=2, pp=2),
        [
            {"tp": 4, "pp": 1},
            {"tp": 1, "dp": 2, "sharding": "optim_grads"},
            {"tp": 1, "pp": 4, "recompute": "full"},
        ],
    ),
    (
        Case("llama", tp=1, pp=2, dp=2, sharding="optim_grads_params", **DROPOUT),
        [{"sharding": "optim"}, {"pp": 4, "dp": 1, "schedule": "gpipe", "sharding": "no_shard"}],
    ),
    (
        Case(
            "qwen",
            tp=2,
            dp=2,
            dtype="bf16",
            sharding="optim",
            sent_in_bf16=True,
            fp32_residual=True,
        ),
        [
            {"tp": 1, "dp": 2, "pp": 2, "sharding": "optim_grads_params"},
            {"tp": 4, "dp": 1, "sharding": "no_shard"},
        ],
    ),
    (
        Case("llama", tp=2, dp=2, dtype="fp16", sharding="optim_grads"),
        [{"tp": 1, "pp": 2, "sharding": "no_shard"}],
    ),
]
FOUR = {"dp": 4, "micro_batch": 1}
INSTANCES = [
    (
        Case("llama", **FOUR, sharding="optim_grads_params", instances=2, **DROPOUT),
        [
            {"sharding": "optim"},
            {"instances": 1},
            {"pp": 2, "dp": 2, "sharding": "optim_grads", "instances": 1},
        ],
    ),
    (
        Case("qwen", **FOUR, sharding="optim", dtype="bf16"),
        [
            {"instances": 2},
            {"sharding": "optim_grads", "instances": 2},
            {"tp": 4, "dp": 1, "sharding": "no_shard"},
        ],
    ),
    (
        Case("gpt2", **FOUR, sharding="optim_grads", instances=2, dtype="fp16"),
        [{"sharding": "optim_grads_params"}, {"sharding": "no_shard", "instances": 1}],
    ),
]
RUNS += [pytest.param(*run, marks=pytest.mark.slow) for run in INSTANCES]


def go_on(trainer: Trainer, case: Case, until: int) -> list[float | None]:
    losses = []
    while trainer.iteration < until:
        losses.append(
            trainer.step(replica_batch(case, trainer.iteration, trainer.mesh.dp_rank)).loss
        )
    return losses


def state(trainer: Trainer) -> list[torch.Tensor]:
    trainer.model.gatherer.finish()
    return [*trainer.model.buffer.own_data, *trainer.optimizer.state().values()]


def _resume(rank: int, world_size: int, case: Case, others: list[dict], root: str) -> tuple:
    unbroken = new_trainer(case, mesh_of(case, rank))
    go_on(unbroken, case, SAVED)
    unbroken.save(root)
    losses = go_on(unbroken, case, LAST)
    trainer = new_trainer(case, unbroken.mesh)
    go_on(trainer, case, 1)  # whatever was there before is gone
    trainer.load(root)
    assert (trainer.iteration, trainer.optimizer.steps) == (SAVED, SAVED)
    assert trainer.consumed_samples == sum(SAMPLES[step % len(SAMPLES)] for step in range(SAVED))
    again = go_on(trainer, case, LAST)
    equal = all(torch.equal(a, b) for a, b in zip(state(trainer), state(unbroken), strict=True))
    assert trainer.optimizer.scaler.state() == unbroken.optimizer.scaler.state()
    elsewhere = []
    for other in others:
        moved = replace(case, **other)
        trainer = new_trainer(moved, mesh_of(moved, rank))
        trainer.load(root)
        elsewhere.append(go_on(trainer, moved, LAST))
    return losses, again, equal, elsewhere


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case, others", RUNS, ids=lambda value: str(value) if isinstance(value, Case) else ""
)
def test_a_resumed_run_is_the_unbroken_run(case, others, tmp_path):
    ranks = run_ranks(_resume, case.world, case, others, os.fspath(tmp_path), timeout=250)
    assert all(again == losses for losses, again, _, _ in ranks)
    assert all(equal for _, _, equal, _ in ranks), "weights, moments or masters differ"
    unbroken = [one(each) for each in zip(*(losses for losses, *_ in ranks), strict=True)]
    assert len(set(unbroken)) == LAST - SAVED
    limit = 1e-5 if case.dtype == "fp32" else 2e-2
    for layout in range(len(others)):
        moved = [
            one(each) for each in zip(*(elsewhere[layout] for *_, elsewhere in ranks), strict=True)
        ]
        assert max(abs(a - b) for a, b in zip(moved, unbroken, strict=True)) < limit, others[layout]
    if others:
        _resumes_alone(
            replace(case, tp=1, pp=1, dp=1, sharding="no_shard", instances=1),
            tmp_path,
            unbroken,
            limit,
        )


def _resumes_alone(case: Case, root: Path, unbroken: list[float], limit: float) -> None:
    trainer = new_trainer(case, mesh_of(case))
    trainer.load(root)
    assert (
        max(abs(a - b) for a, b in zip(go_on(trainer, case, LAST), unbroken, strict=True)) < limit
    )
