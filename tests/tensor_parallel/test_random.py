"""Seeds: the same on every machine."""

import pytest

from megatron_merak.tensor_parallel import derive_seed


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
