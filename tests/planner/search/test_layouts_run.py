"""What a search proposes is what the runtime runs: every layout trains, and to the same loss."""

from dataclasses import replace

import pytest
import torch

from megatron_merak.cluster import CLUSTERS, GIB, Cluster
from megatron_merak.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from megatron_merak.errors import MerakError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.planner import plan
from megatron_merak.planner.request import Request
from megatron_merak.planner.search import Choice, Search
from megatron_merak.planner.search.formulas import FormulaChain
from megatron_merak.training.searched import applied
from tests.engines import gpt_trainer
from tests.ranks import run_ranks

BATCH = 8
SEQUENCE = 16
VOCABULARY = 60
STEPS = 2
CONFIG = Config(
    model=ModelConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=SEQUENCE,
        vocab_size=VOCABULARY,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    train=TrainConfig(micro_batch_size=1, global_batch_size=BATCH, train_iters=STEPS),
    optimizer=OptimizerConfig(lr=1e-2),
)


def host() -> Cluster:
    """A host whose ranks have so much memory that recomputation is among the choices."""
    cpu = CLUSTERS["cpu"]
    return replace(cpu, device=replace(cpu.device, memory=GIB))


def proposed(ranks: int, mb: int) -> list[Choice]:
    """Every choice that the planner makes a plan of."""
    cluster = host()
    request = Request(sequence_length=SEQUENCE)
    search = Search(FormulaChain(CONFIG, cluster), request, cluster)
    space = search.space(ranks, [BATCH], {"mb": mb})
    choices = []
    for layer in space.layers():
        for degrees in space.degrees(layer, units=5):
            for choice in space.choices(degrees, units=5):
                try:
                    search.plan(choice, degrees.dp, degrees.microbatches)
                except MerakError:
                    continue
                choices.append(choice)
    return choices


def batches(step: int, mb: int, replica: int, replicas: int) -> list[dict[str, torch.Tensor]]:
    """A replica's micro-batches: every replicas-th of the global order."""
    generator = torch.Generator().manual_seed(step)
    shape = (BATCH, SEQUENCE + 1)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    whole = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": torch.ones(BATCH, SEQUENCE),
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, SEQUENCE),
    }
    cut = {name: value.split(mb) for name, value in whole.items()}
    parts = range(replica, BATCH // mb, replicas)
    return [{name: each[part].contiguous() for name, each in cut.items()} for part in parts]


def trained(rank: int, ranks: int, choices: list[Choice]) -> list[list[float | None]]:
    """The losses of each choice on this rank; None where it does not compute them."""
    meshes = {}
    curves = []
    for choice in choices:
        config = applied(CONFIG, choice)
        config.validate(ranks, training=False)
        made = plan(config, ranks, host())
        if made.grid not in meshes:
            meshes[made.grid] = build_mesh(made.grid, rank, torch.device("cpu"))
        mesh = meshes[made.grid]
        trainer = gpt_trainer(config, made, mesh)
        own = [batches(step, choice.mb, mesh.dp_rank, made.grid.dp) for step in range(STEPS)]
        curves.append([trainer.step(each).loss for each in own])
    return curves


def losses(ranks: int, choices: list[Choice]) -> list[list[float | None]]:
    """The losses of each choice, from the rank that has them."""
    told = run_ranks(trained, ranks, choices, timeout=400)
    return [whole(curves) for curves in zip(*told, strict=True)]


def whole(curves: tuple[list[float | None], ...]) -> list[float | None]:
    """The curve of a rank that computes losses."""
    return next(curve for curve in curves if None not in curve)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, mb, every",
    [(2, 2, 1), pytest.param(4, 1, 3, marks=pytest.mark.slow)],
)
def test_every_layout_that_is_proposed_trains_to_the_same_loss(ranks, mb, every):
    """every: of so many choices, one is run: all of them take minutes."""
    choices = proposed(ranks, mb)[::every]
    (alone,) = losses(1, [Choice(mb=mb)])
    kinds = {(choice.tp, choice.pp) for choice in choices}
    assert kinds == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= ranks}
    assert {choice.recompute for choice in choices} == {"none", "selective", "capacity", "full"}
    assert len(choices) > 50
    for choice, curve in zip(choices, losses(ranks, choices), strict=True):
        assert curve == pytest.approx(alone, abs=2e-6), choice
