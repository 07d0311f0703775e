"""Vocabulary-parallel cross entropy against F.cross_entropy, and label smoothing against its
definition in float64.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_merak.tensor_parallel import vocab_parallel_cross_entropy
from tests.ranks import run_ranks

ROWS, CLASSES = (2, 6), 16


def problem(kind):
    """Logits [2, 6, 16], targets on every shard, and how many of the classes are real."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(*ROWS, CLASSES, generator=generator)
    target = torch.randint(11, ROWS, generator=generator)
    target[0, :4] = torch.tensor([0, 3, 4, 10])
    real = CLASSES
    if kind == "extreme":
        logits = logits * 300 + 5000
    elif kind == "padded":
        real = 11
        logits[..., real:] = -torch.inf
    elif kind == "bfloat16":
        logits = (3 * logits).bfloat16()
    return logits, target, real


def definition(logits, target, real, smoothing):
    """(1 - s) nll + s / (V - 1) times the sum of the nll of the other V - 1 real classes,
    float64.
    """
    nll = -logits.double().log_softmax(-1)
    chosen = nll.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if smoothing == 0:
        return chosen
    return (1 - smoothing) * chosen + smoothing / (real - 1) * (nll[..., :real].sum(-1) - chosen)


def upstream():
    return torch.linspace(-1, 2, 12).view(ROWS)


def measure(rank, world_size, kind, smoothing):
    group = dist.group.WORLD if world_size > 1 else None
    logits, target, _ = problem(kind)
    mine = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    kept = mine.detach().clone()
    loss = vocab_parallel_cross_entropy(mine, target, group, smoothing)
    loss.backward(upstream())
    assert torch.equal(mine, kept), "the logits were written to"
    return loss.detach(), mine.grad


def measure_all(rank, world_size):
    return {case: measure(rank, world_size, *case) for case in CASES}


CASES = [(kind, s) for kind in ("plain", "extreme", "padded", "bfloat16") for s in (0.0, 0.1)]


@pytest.fixture(scope="module")
def measured():
    alone = [{case: measure(0, 1, *case) for case in CASES}]
    return {1: alone} | {n: run_ranks(measure_all, n) for n in (2, 4)}


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("kind", "smoothing"), CASES)
def test_loss_and_gradient_equal_the_definition(measured, n, kind, smoothing):
    losses, grads = zip(*(result[kind, smoothing] for result in measured[n]), strict=True)
    logits, target, real = problem(kind)
    exact = logits.double().requires_grad_()
    expected = definition(exact, target, real, smoothing)
    expected.backward(upstream().double())
    for loss in losses:
        assert loss.dtype == torch.float32 and torch.equal(loss, losses[0])
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    grad = torch.cat(grads, -1)
    assert grad.dtype == logits.dtype
    tolerance = 4e-3 if kind == "bfloat16" else 2e-6  # bfloat16: the one rounding of the gradient
    torch.testing.assert_close(grad.double(), exact.grad.nan_to_num(0.0), rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "extreme", "padded"])
def test_without_smoothing_it_is_pytorchs(measured, n, kind):
    logits, target, _ = problem(kind)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(ROWS)
    torch.testing.assert_close(measured[n][0][kind, 0.0][0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4])
def test_padding_takes_no_gradient(measured, n):
    for smoothing in (0.0, 0.1):
        grad = torch.cat([result["padded", smoothing][1] for result in measured[n]], -1)
        assert grad[..., 11:].count_nonzero() == 0 and grad[..., :11].isfinite().all()


def test_smoothing_is_not_pytorchs():
    """PyTorch spreads over all V classes; over the other V - 1 it is the same with smoothing * V /
    (V - 1).
    """
    logits, target, _ = problem("plain")
    theirs = F.cross_entropy(
        logits.flatten(0, 1),
        target.flatten(),
        reduction="none",
        label_smoothing=0.1 * CLASSES / (CLASSES - 1),
    ).view(ROWS)
    torch.testing.assert_close(
        vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1), theirs
    )
