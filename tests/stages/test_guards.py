"""Training models that decide by values of the batch: each micro-batch runs the program of its
case.
"""

import pytest
import torch

from megatron_merak.errors import PlanError, TraceError
from megatron_merak.plan import Grid
from megatron_merak.stages import blueprint
from tests.graph.test_values import (
    MASKS,
    Deciding,
    copied,
    deciding_batch,
    longformer,
    longformer_batch,
)
from tests.graph.tiny import gradients, randomise
from tests.ranks import run_ranks
from tests.stages.test_captured import part, parts_of, trainer_of

pytestmark = pytest.mark.long


def cases(name):
    if name == "longformer":
        return randomise(longformer()), [
            longformer_batch(count, i) for i, count in enumerate((1, 0, 2, 0, 1))
        ]
    return randomise(Deciding()), [
        deciding_batch(mask, i) for i, mask in enumerate((*MASKS, MASKS[0]))
    ]


def _train(rank, world_size, name, grid):
    torch.set_num_threads(1)
    model, batches = cases(name)
    trainer = trainer_of(model, batches[0], grid, rank, len(batches))
    loss = trainer.gradients([*map(copied, batches)])
    made = [
        len(cases)
        for programs in trainer.programs.values()
        for cases in programs._programs.values()
    ]
    grads = parts_of(trainer, trainer.buffer.main_grad)
    evaluated = trainer.evaluate([*map(copied, batches[:2])])
    return loss, grads, made, [found["loss"].item() for found in evaluated or ()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "grid", "programs"),
    [
        pytest.param("longformer", Grid(pp=2), 3, marks=pytest.mark.slow),
        ("deciding", Grid(tp=2, pp=2), 4),
    ],
)
def test_every_case_has_its_program(name, grid, programs):
    model, batches = cases(name)
    losses, every = zip(*(gradients(model, copied(batch)) for batch in batches), strict=True)
    names = dict.fromkeys(key for found in every for key in found)
    grads = {k: sum(f[k] for f in every if k in f) / len(batches) for k in names}
    shards_seen = set()
    for loss, shards, made, evaluated in run_ranks(_train, grid.size, name, grid, timeout=200):
        assert loss == pytest.approx(sum(x.item() for x in losses) / len(batches), rel=1e-5)
        assert made == [programs]
        assert evaluated == pytest.approx(
            [x.item() for x in losses[:2]] if evaluated else [], rel=1e-5
        )
        for shard in shards:
            expected = part(grads[shard.name], shard)
            scale = max(grads[shard.name].abs().max().item(), 1e-4)
            assert (shard.tensor - expected).abs().max() <= 1e-4 * scale, shard.name
            shards_seen.add(shard.name)
    assert shards_seen == set(grads)


def test_too_many_cases_are_refused_by_line(monkeypatch):
    monkeypatch.setattr(blueprint, "MOST_CASES", 3)
    run_ranks(_too_many, 1)


def _too_many(rank, world_size):
    model, batches = cases("deciding")
    trainer = trainer_of(model, batches[0], Grid(), rank, 1)
    for _ in range(2):
        for batch in batches[:3]:
            trainer.gradients([copied(batch)])
    if blueprint.MOST_CASES == 3:
        with pytest.raises(TraceError, match=r"test_values.py.*decides by values of the batch"):
            trainer.gradients([copied(batches[3])])


def _differing(rank, world_size):
    model, batches = cases("deciding")
    with pytest.raises(PlanError, match="branches on its values, and they differ between ranks"):
        trainer_of(model, batches[rank], Grid(dp=2), rank, 2)


def test_ranks_that_captured_different_cases_say_so():
    run_ranks(_differing, 2)
