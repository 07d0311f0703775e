"""Norms of NVIDIA apex, used if it is installed and our own CUDA kernels are not loaded.

The ``apex`` of the package index is another project; NVIDIA's is recognized by its compiled module.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULE = "fused_layer_norm_cuda"


def find() -> ModuleType | None:
    """Return apex's compiled norms; None if NVIDIA's apex was not built with them."""
    return import_module(MODULE) if find_spec(MODULE) is not None else None


def provide(library: torch.library.Library, norms: Any, key: str = "CUDA") -> tuple[str, ...]:
    """Implement the norms of ``library`` for the dispatch key ``key``; return the names of the
    operations.

    The kernels require x and weights of one type, contiguous, and one-dimensional statistics.
    """

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, rstd = norms.rms_forward_affine(x.contiguous(), weight.shape, weight.to(x.dtype), eps)
        return y, rstd.view(x.shape[:-1])

    def rms_norm_backward(
        grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = (
            grad.contiguous(),
            rstd.reshape(-1),
            x.contiguous(),
            weight.shape,
            weight.to(x.dtype),
            0.0,
            False,
        )
        grad_x, grad_weight = norms.rms_backward_affine(*parts)
        return grad_x, grad_weight.to(weight.dtype)

    def layer_norm(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = (x.contiguous(), weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        y, mean, rstd = norms.forward_affine(*parts)
        return y, mean.view(x.shape[:-1]), rstd.view(x.shape[:-1])

    def layer_norm_backward(
        grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = weight.to(x.dtype)
        parts = (
            grad.contiguous(),
            mean.reshape(-1),
            rstd.reshape(-1),
            x.contiguous(),
            weight.shape,
            scale,
        )
        # The bias matters to the kernel only for its type, and where the input is found again from
        # the output.
        grad_x, grad_weight, grad_bias = norms.backward_affine(*parts, scale, 0.0, False)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)

    served = (rms_norm, rms_norm_backward, layer_norm, layer_norm_backward)
    for function in served:
        library.impl(function.__name__, function, key)
    return tuple(function.__name__ for function in served)
