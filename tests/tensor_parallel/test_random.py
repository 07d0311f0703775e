"""Seeds and streams: the same numbers outside of tensor-parallel regions, different ones inside, on
every machine.
"""

import pytest
import torch

from megatron_merak.tensor_parallel import RngTracker, derive_seed, model_parallel_seed
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((1234, "model.embed_tokens.weight"), 5037382704562241308),
        ((1234, 7, 3, 2, 1, 0), 8279284213183234244),
        ((0,), 2631537505891389924),
    ],
)
def test_derived_seeds_never_change(parts, seed):
    """A changed value would change every initial weight and dropout mask of every run."""
    assert derive_seed(*parts) == seed


def test_every_part_counts_and_nothing_else_does():
    seeds = [
        derive_seed(*parts) for parts in [(1, 2), (2, 1), (12,), (1, "2"), (1, 2, 0), (0, 1, 2)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= derive_seed(1234, i) < 2**63 for i in range(1000))


def masks(rank, world_size):
    """Dropout masks of a replicated, a sharded, a replicated and a sharded region."""
    tracker = model_parallel_seed(99, rank, CPU)

    def draw():
        return torch.nn.functional.dropout(torch.ones(64), 0.5)

    outside = [draw()]
    with tracker.fork():
        inside = [draw()]
    outside.append(draw())
    with tracker.fork():
        inside.append(draw())
    return outside, inside


def test_dropout_differs_inside_and_agrees_outside():
    (outside, inside), *others = run_ranks(masks, 4)
    for other_outside, other_inside in others:
        assert all(map(torch.equal, outside, other_outside))
        assert not any(map(torch.equal, inside, other_inside))
    assert not torch.equal(*outside) and not torch.equal(*inside), (
        "a stream started again instead of going on"
    )
    torch.manual_seed(99)
    assert torch.equal(outside[0], torch.nn.functional.dropout(torch.ones(64), 0.5))


def test_streams_do_not_disturb_each_other():
    tracker = RngTracker(CPU)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tracker.add("a", 1)
    tracker.add("b", 2)
    with tracker.fork("a"):
        first = torch.rand(2)
        with tracker.fork("b"):
            torch.rand(10)
        second = torch.rand(2)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(1)
    assert torch.equal(torch.cat((first, second)), torch.rand(4))


def test_a_stream_goes_on_after_an_error():
    tracker = RngTracker(CPU)
    tracker.add("a", 1)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), tracker.fork("a"):
        torch.rand(2)
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_is_not_started_twice():
    tracker = RngTracker(CPU)
    tracker.add("a", 1)
    with pytest.raises(AssertionError, match="stream a exists"):
        tracker.add("a", 2)
    with pytest.raises(AssertionError, match="stream a has seed 1"):
        tracker.add("b", 1)
    tracker.add("b", 2)
