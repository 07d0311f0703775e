"""A rewritten model on all its ranks against the whole one: the loss and every gradient, random weights."""

import pytest
import torch

from megatron_merak.graph.capture import capture
from megatron_merak.graph.shard import shard
from tests.graph.lockstep import compare
from tests.graph.tiny import gradients, randomise, tiny


def check(name, tp, double=False, **overrides):
    """The family's (sharding, programs) for ``tp`` ranks, after comparing them with the eager model."""
    real, _, batch = tiny(name, **overrides)
    model = randomise(real())
    if double:
        model.double()
        batch = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    captured = capture(model, batch)
    sharding = shard(captured, tp)
    loss, grads = gradients(model, batch)
    difference, worst, where, programs = compare(captured, sharding, model, batch, loss, grads)
    assert difference <= (1e-10 if double else 1e-5), difference
    assert worst <= (1e-10 if double else 1e-4), (where, worst)
    return sharding, programs


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_loss_and_every_gradient(name):
    sharding, _ = check(name, 2)
    assert sharding.share() <= 0.55
