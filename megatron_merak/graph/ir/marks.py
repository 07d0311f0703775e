"""Marks in a rewritten graph for its collectives, which the engine performs at the borders of segments."""

from torch import Tensor


def copy_in(x: Tensor) -> Tensor:
    """Mark a replicated value that sharded work reads: its gradient, a partial sum on each rank, is all-reduced."""
    raise AssertionError("a mark, not to be run")


def reduce_sum(x: Tensor) -> Tensor:
    """Mark a partial sum that leaves sharded work: it is all-reduced over the tensor-parallel ranks."""
    raise AssertionError("a mark, not to be run")


def stack(x: Tensor) -> Tensor:
    """Mark a value that leaves sharded work stacked over the ranks: [tp, ...], the same on every rank."""
    raise AssertionError("a mark, not to be run")
