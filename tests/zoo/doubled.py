"""fp64 for models that ask for fp32 by name: inside, float32 means float64, in eager code and while
capturing.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def doubled() -> Iterator[None]:
    """Norms and softmaxes that compute "in float32" would hide whether a difference is rounding or
    a mistake.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote():
            yield
    finally:
        torch.set_default_dtype(before)


class _Promote(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = Tensor.double if func is Tensor.float else func
        swap = {
            torch.float32: torch.float64,
            torch.float16: torch.float64,
            torch.bfloat16: torch.float64,
        }
        args = tuple(swap.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        kwargs = {
            k: swap.get(x, x) if isinstance(x, torch.dtype) else x
            for k, x in (kwargs or {}).items()
        }
        return func(*args, **kwargs)
