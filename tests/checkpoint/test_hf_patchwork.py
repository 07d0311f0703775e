"""Patchworks against the same operations on real tensors: equal values, and no element fetched that
is not shown.
"""

import pytest
import torch

from megatron_merak.checkpoint import hf_patchwork as patchwork

TENSORS = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(100.0, 124.0).reshape(4, 6),
    "c": torch.arange(12.0).reshape(2, 6),
    "s": torch.tensor(3.0),
}


class Store:
    """Fetches from TENSORS and counts elements."""

    def __init__(self):
        self.elements = 0

    def __call__(self, name, take):
        values = TENSORS[name][tuple(slice(*bounds) for bounds in take)]
        self.elements += values.numel()
        return values


MOVES = {
    "cat": lambda a, b, c, s: torch.cat([a, c, b]),
    "stack": lambda a, b, c, s: torch.stack([a, b], dim=1),
    "merge experts": lambda a, b, c, s: torch.cat(
        [torch.stack([a, b]), torch.stack([b, a])], dim=1
    ),
    "chunk": lambda a, b, c, s: torch.chunk(torch.cat([a, b], dim=1), 3, dim=1)[1].contiguous(),
    "unbind": lambda a, b, c, s: torch.unbind(torch.stack([a, b]))[1],
    "split": lambda a, b, c, s: torch.split(a, [1, 3])[1],
    "transpose": lambda a, b, c, s: torch.cat([a, c]).transpose(0, 1).contiguous()[2:4],
    "permute": lambda a, b, c, s: torch.stack([a, b]).permute(2, 0, 1)[:, 1],
    "squeeze": lambda a, b, c, s: torch.stack([a, b])[1:].squeeze(0)[-1],
    "scalar": lambda a, b, c, s: torch.stack([s, s])[0],
    "empty": lambda a, b, c, s: a[2:2],
}
COMPUTED = {
    "rotary": lambda a, b, c, s: a.view(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "sum": lambda a, b, c, s: (a + b)[1:2],
    "strided": lambda a, b, c, s: torch.cat([a, b])[::3],
    "top": lambda a, b, c, s: torch.sort(a, dim=1, descending=True)[1][:, 0],
}


def both(function):
    store = Store()
    lazy = function(*(patchwork.stored(name, x.shape, x.dtype) for name, x in TENSORS.items()))
    return function(*TENSORS.values()), lazy, store


@pytest.mark.parametrize("name", MOVES)
def test_rectangles_move_like_tensors_and_only_they_are_read(name):
    want, lazy, store = both(MOVES[name])
    got = patchwork.read(lazy, store)
    assert got.dtype == want.dtype and torch.equal(got, want)
    assert store.elements == want.numel()


@pytest.mark.parametrize("name", COMPUTED)
def test_other_operations_are_computed_when_read(name):
    want, lazy, store = both(COMPUTED[name])
    assert lazy.shape == want.shape and lazy.dtype == want.dtype and store.elements == 0
    assert torch.equal(patchwork.read(lazy, store), want)


def test_a_part_reads_its_intervals_in_their_order():
    _, lazy, store = both(MOVES["merge experts"])
    want = MOVES["merge experts"](*TENSORS.values())
    got = patchwork.read(patchwork.part(lazy, 1, ((5, 7), (0, 1))), store)
    assert (
        torch.equal(got, torch.cat([want[:, 5:7], want[:, :1]], dim=1))
        and store.elements == got.numel()
    )
    assert patchwork.sources(lazy) == ["a", "b"]


def test_values_on_meta_give_the_shape_only():
    _, lazy, _ = both(COMPUTED["rotary"])
    got = patchwork.read(
        lazy, lambda name, take: torch.empty([b - a for a, b in take], device="meta")
    )
    assert got.device.type == "meta" and got.shape == lazy.shape


def test_in_place_operations_are_refused():
    with pytest.raises(NotImplementedError, match="not in memory"):
        patchwork.stored("a", (4, 6), torch.float32).add_(1)
