"""How an operation becomes known to PyTorch: its schema, shapes, gradient, and PyTorch twin.

There are two namespaces with the same operations. In ``torch.ops.merak`` the twin serves the devices for which no
compiled kernel is loaded, so that graphs name the same operations either way; in ``torch.ops.merak_torch`` it serves
all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .schemas import SCHEMAS

MERAK, MERAK_TORCH = (torch.library.Library(namespace, "DEF") for namespace in ("merak", "merak_torch"))
_COMPILED_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def operation(
    name: str, fake: Callable[..., Any], setup: Callable[..., None] | None = None, backward: Callable | None = None
) -> Callable[[Callable], Callable]:
    """Decorate the twin of ``torch.ops.merak.<name>``; returns it unchanged.

    fake: the results for fake tensors. setup(ctx, inputs, output) and backward(ctx, *grads) as in
    ``torch.library.register_autograd``.
    """

    def register(reference: Callable) -> Callable:
        for library in (MERAK, MERAK_TORCH):
            library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(name, reference, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
            if backward is not None:
                overload = getattr(getattr(torch.ops, library.ns), name).default
                library.impl(name, _differentiable(overload, setup, backward), "Autograd", with_keyset=True)
        return reference

    return register


def _differentiable(overload: Any, setup: Callable[..., None], backward: Callable) -> Callable:
    """What ``torch.library.register_autograd`` registers, without what it does in each call for operations with
    keywords, defaults and lists: 20 microseconds of a forward and backward.
    """
    assert not any(a.kwarg_only or a.has_default_value() for a in overload._schema.arguments), overload

    def below(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    class Operation(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *args):
            output = below(keys, *args)
            setup(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            grads_in = backward(ctx, *grads)
            return (None, *grads_in) if isinstance(grads_in, tuple) else (None, grads_in)

    Operation.__name__ = f"{overload._opname}Backward"

    def run(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        needed = torch._C._any_requires_grad(*args) and torch.is_grad_enabled()
        return Operation.apply(keys, *args) if needed else below(keys, *args)

    return run


def kernels(*tensors: Tensor | None) -> Any:
    """``torch.ops.merak``, or ``torch.ops.merak_torch`` for element types that compiled kernels do not know (fp64)."""
    known = all(tensor is None or tensor.dtype in _COMPILED_TYPES for tensor in tensors)
    return torch.ops.merak if known else torch.ops.merak_torch
