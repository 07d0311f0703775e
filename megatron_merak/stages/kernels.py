"""Check that a rank has the compiled kernels that its device needs."""

import torch

from .. import _native, ops
from ..config.fp8 import Fp8
from ..errors import ConfigError, LaunchError


def check_fp8_products(device: torch.device, fp8: Fp8 | None) -> None:
    """Raise ConfigError for a GPU that has no products of such operands."""
    if fp8 is None or device.type != "cuda":
        return
    blocks = fp8.recipe == "blockwise"
    found = torch.cuda.get_device_capability(device)
    without_blocks = found >= (8, 9)
    if found == (9, 0) or without_blocks and not blocks:
        return
    reason = f"{torch.cuda.get_device_name(device)} has no products of operands in fp8"
    remedy = "Leave it out"
    if blocks:
        reason += " with scales of blocks"
        if without_blocks:
            remedy = "Use --fp8-recipe tensorwise"
    raise ConfigError("--fp8-format", fp8.format, reason, remedy)


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
