"""Marks in a rewritten graph for its collectives, which the engine performs at the borders of
segments.
"""

from collections.abc import Hashable

from torch import Tensor
from torch.fx import Node


def copy_in(x: Tensor) -> Tensor:
    """Mark a replicated value that sharded work reads: its gradient, a partial sum on each rank, is
    all-reduced.
    """
    raise AssertionError("a mark, not to be run")


def reduce_sum(x: Tensor) -> Tensor:
    """Mark a partial sum that leaves sharded work: it is all-reduced over the tensor-parallel
    ranks.
    """
    raise AssertionError("a mark, not to be run")


def stack(x: Tensor) -> Tensor:
    """Mark a value that leaves sharded work stacked over the ranks: [tp, ...], the same on every
    rank.
    """
    raise AssertionError("a mark, not to be run")


def reduce_scatter(x: Tensor) -> Tensor:
    """Mark a partial sum [b, s, ...]: each rank gets its part [b, s / n, ...] of the total."""
    raise AssertionError("a mark, not to be run")


def all_gather(x: Tensor) -> Tensor:
    """Mark a part [b, s / n, ...] of a sequence, which is gathered from all ranks: [b, s, ...].

    Only ``copy_in`` reads it, or sharded work that passes no gradient back.
    """
    raise AssertionError("a mark, not to be run")


def exchange(x: Tensor) -> Tensor:
    """Mark pieces [n, ...], one for each rank: rank r gets piece r of all ranks, [n, ...]."""
    raise AssertionError("a mark, not to be run")


def exchange_rows(x: Tensor, counts: Tensor) -> Tensor:
    """Mark rows that lie by the rank that they are for: each rank gets those that are for it.

    counts: int64 [2, n]: how many are sent to each rank, and how many are got of each.
    """
    raise AssertionError("a mark, not to be run")


def rows_of(mark: Node) -> Hashable:
    """Return what says which rows a mark exchanges, the same for all values of these rows; None if
    it is no exchange of rows.
    """
    if mark.target is exchange_rows:
        return mark.all_input_nodes[1]
    return mark.meta.get("rows") if mark.target is exchange else None  # see lowering.experts


def rotate(x: Tensor) -> Tensor:
    """Mark a value that each rank sends to the next one: it gets that of the one before."""
    raise AssertionError("a mark, not to be run")


def turn_back(x: Tensor) -> Tensor:
    """Mark a value that stays, and whose gradient each rank sends to the one before."""
    raise AssertionError("a mark, not to be run")


MARKS = (
    copy_in,
    reduce_sum,
    stack,
    reduce_scatter,
    all_gather,
    exchange,
    exchange_rows,
    rotate,
    turn_back,
)
