"""What stands at ``p.grad`` of an engine's parameters while a gradient is pending: it is in sharded
flat buffers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

_KNOWN = frozenset(
    "shape dtype device layout requires_grad is_sparse grad_fn is_leaf ndim is_cuda is_meta".split()
)


class _Elsewhere(Tensor):
    """A gradient without values: clipping, scaling or reading it by hand would do nothing, and say
    nothing.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if getattr(func, "__name__", "") == "__get__" and attribute in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        reason = (
            "gradients of an Engine are in flat buffers, sharded over ranks, and only its "
            "step reads them"
        )
        remedy = "Set max_grad_norm, scale the loss, or read grad_norm of what step returns"
        raise ConfigError("p.grad", "(used)", reason, remedy)


def stand_in(parameters: Iterable[nn.Parameter]) -> None:
    """Let ``p.grad`` of the trainable parameters refuse to be used."""
    for parameter in parameters:
        if parameter.requires_grad:
            empty = torch.empty((), dtype=parameter.dtype, device=parameter.device)
            parameter.grad = empty.expand(parameter.shape).as_subclass(_Elsewhere)


def withdraw(parameters: Iterable[nn.Parameter]) -> None:
    """Undo ``stand_in``."""
    for parameter in parameters:
        parameter.grad = None
