"""Values that are moved into new memory, which a backward moves again in place of keeping them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .linear import WeightGradientSink


def moved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of x that moves its values, or returns x. Of an x that its sink gets again
    for the backward, the backward calls it again.
    """

    def run(x: Tensor, *args: Any, sink: WeightGradientSink | None = None) -> Tensor:
        result = function(x, *args)
        get = None if sink is None or result is x else sink.getter(x)
        if sink is not None and get is not None:
            sink.again(result, lambda: function(get(), *args))
        return result

    return named(run, function)


def named(run: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``run`` under a name that the code of graphs can have."""
    run.__name__ = f"unkept_{function.__name__}".replace(".", "_")
    run.__module__ = __name__
    return run
