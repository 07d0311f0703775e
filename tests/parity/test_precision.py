"""Gradients sent in bf16, and a residual stream in fp32: one process, to the bit where every sum
has one order.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.config.parallel import SHARDINGS
from tests.engines import gradient_step
from tests.ranks import run_ranks

from .batches import replica_batch
from .cases import Case
from .compare import TOLERANCE, apart, differing, distance, flat
from .rig import assemble, mesh_of, new_trainer, parts, run_all

STREAM = Case("llama", dtype="bf16", fp32_residual=True, steps=2, clip=0.0)
PIPELINES = [
    [{"pp": 2, "schedule": "zb-v", "recompute": "block"}],
    [
        {"pp": 2, "schedule": "1f1b", "recompute": "full"},
        {"pp": 2, "schedule": "early-recompute", "recompute": "full"},
        {"pp": 2, "schedule": "interleaved", "hidden_dropout": 0.1, "dtype": "fp16"},
    ],
]
LAYOUTS = [
    [
        {"family": "qwen", "tp": 2, "sequence_parallel": True},
        {"dp": 2, "sharding": "optim_grads_params"},
    ],
    [
        {"family": "gpt2", "tp": 2, "pp": 2, "overlap": "pair"},
        {"family": "gpt2", "pp": 2, "dp": 2, "sharding": "optim", "sent_in_bf16": True},
        {
            "family": "llama",
            "tp": 2,
            "overlap": "sub-pipeline",
            "recompute": "full",
            "dtype": "fp16",
        },
    ],
]


def few_and_more(groups):
    return [groups[0], pytest.param(groups[1], marks=pytest.mark.slow)]


def beside_one_process(changes):
    """(case, its run, that of one process) of each."""
    alone = {
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "schedule": "1f1b",
        "recompute": "none",
        "overlap": "weight-gradient",
    }
    alone |= {"sequence_parallel": False, "sharding": "no_shard", "sent_in_bf16": False}
    cases = {case: replace(case, **alone) for case in (replace(STREAM, **each) for each in changes)}
    runs = run_all(list(dict.fromkeys([*cases, *cases.values()])))
    return [(case, runs[case], runs[one]) for case, one in cases.items()]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("pipelines", few_and_more(PIPELINES), ids=("few", "more"))
def test_a_pipeline_sends_the_fp32_stream_as_it_is(pipelines):
    for case, ours, alone in beside_one_process(pipelines):
        assert ours.curve == alone.curve and ours.first_loss == alone.first_loss, case
        assert (
            differing(ours.gradients, alone.gradients)
            == differing(ours.weights, alone.weights)
            == []
        ), case


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layouts", few_and_more(LAYOUTS), ids=("few", "more"))
def test_other_layouts_of_an_fp32_stream(layouts):
    for case, ours, alone in beside_one_process(layouts):
        assert distance(ours, alone).within(TOLERANCE[case.dtype]), case


def gradients(rank, world_size, cases):
    """Of a step in which all replicas have the same micro-batches."""
    found = []
    for case in cases:
        trainer = new_trainer(case, mesh_of(case, rank))
        gradient_step(trainer, replica_batch(replace(case, dp=1), 0, 0)[:3])
        trainer.model.gatherer.full(trainer.model.buffer.own_gradient())
        found.append(parts(trainer, trainer.model.buffer.main_grad))
    return found


def gradients_of(cases):
    world = cases[0].world
    ranks = run_ranks(gradients, world, cases) if world > 1 else [gradients(0, 1, cases)]
    return [flat(assemble(shards)) for shards in zip(*ranks, strict=True)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "degrees", few_and_more([{}, {"tp": 2}]) + [pytest.param({"pp": 2}, marks=pytest.mark.slow)]
)
def test_two_replicas_with_the_same_samples_have_the_gradient_of_one_rounded_to_bf16(degrees):
    """Each sends half of it, so that its double is exact; micro-batch by micro-batch where
    gradients are sharded.

    GPT-2's shape for two tensor-parallel ranks: what a gate and its input add up to is rounded once
    where their weights are neighbours in memory, and twice where a shard's padding lies between.
    """
    family = "gpt2" if "tp" in degrees else "llama"
    (whole,) = gradients_of([Case(family, dtype="bf16", **degrees)])
    cases = [
        Case(family, dp=2, dtype="bf16", sharding=each, sent_in_bf16=True, **degrees)
        for each in SHARDINGS
    ]
    cases.append(replace(cases[0], early=False))
    rounded = whole.bfloat16().double()
    assert not torch.equal(rounded, whole)
    for case, found in zip(cases, gradients_of(cases), strict=True):
        if case.sharding in ("no_shard", "optim"):
            assert torch.equal(found, rounded), case
        else:
            assert not torch.equal(found, whole) and apart(found, whole) < 2**-8, case
