"""Where a rewritten graph has collectives. They are marks: the engine performs them at the borders of segments."""

from torch import Tensor


def copy_in(x: Tensor) -> Tensor:
    """A replicated value enters sharded work: its gradient is partial on each rank and is summed over them."""
    raise AssertionError("a mark, not to be run")


def reduce_sum(x: Tensor) -> Tensor:
    """A partial value leaves sharded work: it is summed over the tensor-parallel ranks."""
    raise AssertionError("a mark, not to be run")


def stack(x: Tensor) -> Tensor:
    """All ranks' values leave sharded work, one behind the other: [n, ...]; every rank reads them alike."""
    raise AssertionError("a mark, not to be run")
