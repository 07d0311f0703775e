"""What an edge does to a tensor, with integers that one can add by hand."""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.runtime.collectives import launch, own_gradient
from megatron_merak.segment import Collective
from tests.ranks import run_ranks


def whole(batch, length):
    """x[b, t, c] = 100 b + 10 t + c."""
    b, t, c = torch.meshgrid(
        torch.arange(batch), torch.arange(length), torch.arange(2), indexing="ij"
    )
    return (100 * b + 10 * t + c).float()


def every_kind(rank, n):
    group = dist.group.WORLD
    for batch in (1, 3):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = whole(batch, 2 * n).remainder(16).to(dtype)  # so that sums are exact in bf16, too
            part = x[:, 2 * rank : 2 * rank + 2]
            scaled = x * (rank + 1)
            kept = part.clone(), scaled.clone()
            total = x * (n * (n + 1) // 2)
            for kind, given, expected in (
                (Collective.ALL_GATHER, part, x),
                (Collective.ALL_GATHER, part.transpose(0, 2).contiguous().transpose(0, 2), x),
                (Collective.REDUCE_SCATTER, scaled, total[:, 2 * rank : 2 * rank + 2]),
                (
                    Collective.REDUCE_SCATTER,
                    scaled.transpose(0, 2).contiguous().transpose(0, 2),
                    total[:, 2 * rank : 2 * rank + 2],
                ),
                (Collective.ALL_REDUCE, scaled, total),
                (Collective.STACK, scaled, torch.stack([x * (r + 1) for r in range(n)])),
                (
                    Collective.STACK,
                    scaled.transpose(0, 2),
                    torch.stack([(x * (r + 1)).transpose(0, 2) for r in range(n)]),
                ),
                (Collective.ROTATE, scaled, x * ((rank - 1) % n + 1)),
                (Collective.ROTATE_BACK, scaled, x * ((rank + 1) % n + 1)),
                (
                    Collective.ROTATE,
                    scaled.transpose(0, 2),
                    (x * ((rank - 1) % n + 1)).transpose(0, 2),
                ),
            ):
                out, work = launch(given, kind, group, inplace=False)
                work.wait()
                assert torch.equal(out, expected), (kind, batch, dtype)
                assert out.is_contiguous()
            assert torch.equal(part, kept[0]) and torch.equal(scaled, kept[1]), (
                "a collective wrote into its input"
            )
    return True


def several_at_once(rank, n):
    """Launched one after the other, awaited in another order: each result is its own."""
    started = [
        launch(whole(2, 2) + rank + 1000 * i, Collective.ALL_GATHER, dist.group.WORLD, inplace=True)
        for i in range(4)
    ]
    for i in (2, 0, 3, 1):
        out, work = started[i]
        work.wait()
        assert torch.equal(out, torch.cat([whole(2, 2) + r + 1000 * i for r in range(n)], 1))


def uneven(rank, n):
    with pytest.raises(RuntimeError, match="don't multiply up to the size of dim 1 \\(3\\)"):
        launch(torch.zeros(1, 3, 2), Collective.REDUCE_SCATTER, dist.group.WORLD, inplace=True)


def gradients_of_what_was_given(rank, n):
    grad = torch.arange(2.0 * n).view(n, 2)
    assert torch.equal(own_gradient(grad, Collective.STACK, dist.group.WORLD), grad[rank])
    assert all(
        own_gradient(grad, kind, dist.group.WORLD) is grad
        for kind in (
            Collective.NONE,
            Collective.ALL_REDUCE,
            Collective.ALL_GATHER,
            Collective.REDUCE_SCATTER,
        )
    )


def checks(rank, n):
    gradients_of_what_was_given(rank, n)
    several_at_once(rank, n)
    if n == 2:
        uneven(rank, n)
    return every_kind(rank, n)


@pytest.mark.parametrize("n", [2, 4])
def test_every_kind(n):
    assert run_ranks(checks, n) == [True] * n
