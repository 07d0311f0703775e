"""Attention priced as the one kernel that it is on a GPU, under a dispatch mode that prices
operations.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


class Pricing(Protocol):
    """A dispatch mode that prices operations."""

    fused_attention: bool

    def attention(
        self, run: Callable[[], Any], operands: tuple[Tensor | None, ...], causal: bool, back: bool
    ) -> Any:
        """Return what ``run`` returns; its operations together have the price of one kernel."""


def pricing() -> Pricing | None:
    """Return the active mode, if it prices attention as one kernel. Costs a fraction of a
    microsecond without one.
    """
    mode: Any = _get_current_dispatch_mode()
    return mode if getattr(mode, "fused_attention", False) else None


class AsOneKernel(torch.autograd.Function):
    """``run(query, key, value, mask)`` and its gradients, bit for bit, priced as one kernel in each
    direction.

    operands: heads [b, n, s, d], and the mask or None; autograd differentiates ``run``.
    """

    @staticmethod
    def forward(ctx, run: Callable[..., Tensor], causal: bool, *operands: Tensor | None) -> Tensor:
        leaves = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in operands]
        with torch.enable_grad():
            out = priced(lambda: run(*leaves), operands, causal, back=False)
        ctx.save_for_backward(*operands)  # what a kernel keeps, or gets again
        ctx.leaves = leaves
        ctx.out = out
        ctx.causal = causal
        return out.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        inputs = [x for x in ctx.leaves if x is not None and x.requires_grad]
        operands = (*ctx.saved_tensors, ctx.out, grad)
        computed = iter(
            priced(
                lambda: torch.autograd.grad(ctx.out, inputs, grad), operands, ctx.causal, back=True
            )
        )
        return (
            None,
            None,
            *(next(computed) if x is not None and x.requires_grad else None for x in ctx.leaves),
        )


def priced(
    run: Callable[[], Any], operands: tuple[Tensor | None, ...], causal: bool, back: bool
) -> Any:
    """Return what ``run`` returns, priced as one kernel by a mode that does so."""
    mode = pricing()
    return run() if mode is None else mode.attention(run, operands, causal, back)
