"""Placeholders for values that TRL computes for its metrics alone, while a loss is captured."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError, TraceError


class Unread:
    """A value whose every operation returns another one; as a condition of TRL's it is true.

    A captured graph has no use for metrics, which TRL copies to the host at every step: they are
    computed later, from the graph's outputs. A script that branches on one, or converts it to a
    number, gets a TraceError.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    @property
    def shape(self) -> "Unread":
        return self

    def __getattr__(self, name: str) -> Callable[..., "Unread"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._same

    def _same(self, *args: Any, **kwargs: Any) -> "Unread":
        return self

    def chunk(self, chunks: int, dim: int = 0) -> tuple["Unread", ...]:
        return (self,) * chunks

    def item(self) -> Any:
        return self

    def __bool__(self) -> bool:
        return (
            sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "trl" or _number()
        )

    def __float__(self) -> float:
        return _number()

    __int__ = __index__ = __float__

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> "Unread":
        return cls()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _same
    __and__ = __rand__ = __or__ = __neg__ = __invert__ = __floordiv__ = __lt__ = __le__ = __gt__ = (
        __ge__
    ) = _same
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __abs__ = __round__ = __rand__ = __ror__ = _same


def _number() -> Any:
    reason = (
        "it makes a number, or a condition, of what TRL computes for metrics, not known in "
        "a capture"
    )
    raise TraceError(
        "compute_loss",
        "(a metric)",
        reason,
        "Use tensor operations: torch.exp(x).item(), torch.where",
    )


class Missing(Unread):
    """An output that a captured graph does not have, when metrics are computed: as a number it
    raises ConfigError.
    """

    def item(self) -> Any:
        remedy = (
            "Let compute_loss make metrics of what TRL's own makes them of, or use compute_metrics"
        )
        reason = "it is made of outputs that the captured graph does not hand out"
        raise ConfigError("compute_loss", "(a metric)", reason, remedy)

    def __bool__(self) -> bool:
        return self.item()

    def __float__(self) -> float:
        return self.item()

    __int__ = __index__ = __float__
