"""The arithmetic of resharding against the obvious way: index arrays of the full tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_merak.checkpoint.shard import Shard, local_shape, overlaps, uncovered


def _cut(full: torch.Tensor, dim: int | None, intervals: tuple, slab: tuple | None) -> torch.Tensor:
    if slab is not None:
        full = full.narrow(slab[0], slab[1], slab[2] - slab[1])
    if dim is None:
        return full
    return torch.cat([full.narrow(dim, start, stop - start) for start, stop in intervals], dim)


@st.composite
def _part(draw, shape: tuple[int, ...]):
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
        return None, (), None
    others = [each for each in range(len(shape)) if each != dim]
    slab = None
    if others and draw(st.booleans()):
        across = draw(st.sampled_from(others))
        ends = st.lists(st.integers(0, shape[across]), min_size=2, max_size=2)
        slab = (across, *draw(ends.map(sorted)))
    bounds = draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6).map(sorted))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    return dim, tuple(draw(st.permutations(pairs))), slab


@given(st.data(), st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_overlaps_pair_exactly_the_elements_that_both_parts_hold(data, shape):
    source, target = data.draw(_part(shape)), data.draw(_part(shape))
    full = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    held, wanted = _cut(full, *source), _cut(full, *target)
    assert tuple(held.shape) == local_shape(shape, *source)
    result = torch.zeros_like(wanted)
    for take, put in overlaps(shape, source, target):
        assert held[take].numel() > 0
        assert not result[put].any(), "an element was copied twice"
        result[put] = held[take]
    assert torch.equal(result, torch.where(torch.isin(wanted, held), wanted, 0))


@pytest.mark.parametrize(
    "intervals, problem",
    [
        ([(0, 3), (3, 8)], ""),
        ([(3, 8), (5, 5), (0, 3)], ""),
        ([(0, 3), (4, 8)], "indices [3, 4) are in no part"),
        ([(0, 4), (3, 8)], "indices [3, 4) are in two parts"),
        ([(0, 7)], "indices [7, 8) are in no part"),
        ([(0, 9)], "indices [8, 9) lie outside the tensor"),
        ([], "indices [0, 8) are in no part"),
    ],
)
def test_parts_must_tile_a_tensor(intervals, problem):
    assert uncovered(8, intervals) == problem


def test_a_shard_describes_its_own_tensor():
    Shard("w", (6, 4), 0, ((0, 2), (5, 6)), torch.zeros(3, 4))
    with pytest.raises(AssertionError, match="holds"):
        Shard("w", (6, 4), 0, ((0, 2),), torch.zeros(3, 4))
    with pytest.raises(AssertionError, match="of"):
        Shard("w", (6, 4), 0, ((4, 7),), torch.zeros(3, 4))
