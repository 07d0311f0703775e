"""What stands for values that TRL computes for its metrics alone while a loss is captured."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError


class Unread:
    """Whatever is computed from one is another one; as a number it is 1, as a condition true.

    A captured graph has no use for metrics, which TRL brings to the host at every step: they are computed afterwards,
    from what the graph hands out.
    """

    dtype, device = torch.float32, torch.device("cpu")

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

    def item(self) -> float:
        return 1.0

    def __bool__(self) -> bool:
        return True

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> "Unread":
        return cls()

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __and__ = __rand__ = __or__ = __neg__ = __invert__ = __floordiv__ = __lt__ = __le__ = __gt__ = __ge__ = _same


class Missing(Unread):
    """Stands for outputs that a captured graph did not hand out, when metrics are computed: as a number it raises
    ConfigError."""

    def item(self) -> float:
        remedy = "Let compute_loss make metrics of what TRL's own makes them of, or use compute_metrics"
        reason = "it is made of outputs that the captured graph does not hand out"
        raise ConfigError("compute_loss", "(a metric)", reason, remedy)

    def __bool__(self) -> bool:
        return bool(self.item())
