"""Check that a rank has the compiled kernels that its device needs."""

import torch

from .. import _native, ops
from ..errors import LaunchError


def check_kernels(device: torch.device) -> None:
    """Raise LaunchError for a GPU without the compiled CUDA kernels, unless MERAK_EXT=0 asks to run
    without them.

    PyTorch operations would replace them: several times slower, with fp32 copies of full
    activations.
    """
    problem = ops.PROBLEMS["_ops_cuda"]
    if device.type == "cuda" and problem and _native.enabled():
        reason = (
            f"{problem}, and the operations in PyTorch that stand in for them are slow and "
            "need far more memory"
        )
        remedy = "Build with `MERAK_CUDA=1 pip install -e .`, or set MERAK_EXT=0 to train without"
        raise LaunchError("compiled kernels", f"(for {device})", reason, remedy)
