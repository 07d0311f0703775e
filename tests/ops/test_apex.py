"""NVIDIA apex as a provider: what its kernels are asked for, and that an unrelated ``apex`` is left
alone.
"""

import sys
import types

import pytest
import torch

from megatron_merak.ops import apex, layer_norm, rms_norm
from megatron_merak.ops.schemas import SCHEMAS


class Norms:
    """The interface of apex's module, by PyTorch: statistics are one number per row, everything has
    x's type.
    """

    def rms_forward_affine(self, x, shape, weight, eps):
        self.check(x, shape, weight)
        y, rstd = torch.ops.merak_torch.rms_norm(x, weight, eps)
        return y, rstd.reshape(-1)

    def rms_backward_affine(self, grad, rstd, x, shape, weight, eps, memory_efficient):
        self.check(x, shape, weight, grad)
        assert rstd.dim() == 1 and not memory_efficient
        return torch.ops.merak_torch.rms_norm_backward(grad, x, weight, rstd.view(x.shape[:-1]))

    def forward_affine(self, x, shape, weight, bias, eps):
        self.check(x, shape, weight, bias)
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, mean.reshape(-1), rstd.reshape(-1)

    def backward_affine(self, grad, mean, rstd, x, shape, weight, bias, eps, memory_efficient):
        self.check(x, shape, weight, bias, grad)
        assert mean.dim() == rstd.dim() == 1 and not memory_efficient
        rows = (*x.shape[:-1], 1)
        return torch.ops.aten.native_layer_norm_backward(
            grad, x, shape, mean.view(rows), rstd.view(rows), weight, bias, [True] * 3
        )

    @staticmethod
    def check(x, shape, *others):
        assert x.is_contiguous() and tuple(shape) == x.shape[-1:]
        assert all(other.is_contiguous() and other.dtype == x.dtype for other in others)


@pytest.fixture
def served():
    """A namespace of its own with the norms' schemas, served on the CPU as apex would
    serve CUDA.
    """
    library = torch.library.Library("merak_apex_test", "DEF")
    for name in ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"):
        library.define(name + SCHEMAS[name])
    names = apex.provide(library, Norms(), "CPU")
    yield torch.ops.merak_apex_test, names
    library._destroy()


def test_each_norm_is_served(served):
    ops, names = served
    assert set(names) == {"rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"}
    x = torch.randn(24, 3, 5).permute(1, 2, 0).bfloat16()
    weight, bias, grad = 1 + torch.randn(24), torch.randn(24), torch.randn_like(x)
    y, rstd = ops.rms_norm(x, weight, 1e-5)
    expected = rms_norm(x, weight.bfloat16(), 1e-5)
    assert rstd.shape == (3, 5)
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=1e-6)
    grad_x, grad_weight = ops.rms_norm_backward(grad, x, weight, rstd)
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    y, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(
        y, layer_norm(x, weight.bfloat16(), bias.bfloat16(), 1e-5), rtol=2**-6, atol=2e-2
    )
    assert mean.shape == rstd.shape == (3, 5)
    results = ops.layer_norm_backward(grad, x, weight, mean, rstd)
    assert [r.shape for r in results] == [x.shape, weight.shape, bias.shape]


def test_another_projects_apex_is_not_nvidias(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.delitem(sys.modules, apex.MODULE, raising=False)
    assert apex.find() is None
