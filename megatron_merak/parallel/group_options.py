"""What NCCL is told of a group, by what the group is for: how soon its kernels start, how much of the GPU they take.

Kernels of a group run on a stream of its own. Beside a product that fills the GPU they start when that ends, unless the
stream has high priority: then with the next blocks that become free. A kernel that waits for its peer keeps its blocks.
"""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ..config.backends import BACKENDS


class Traffic(NamedTuple):
    """urgent: the next computation waits for it. blocks: that one kernel takes at most, None: as many as NCCL likes."""

    urgent: bool
    blocks: int | None = None


TRAFFIC = {
    "tp": Traffic(urgent=True),
    "pp": Traffic(urgent=True),
    "tp-pp": Traffic(urgent=False),  # the gradient norm, when all is computed
    "dp": Traffic(urgent=False),  # gradients: behind the backward, which may as well go first
    "tied": Traffic(urgent=False),
    "channel": Traffic(urgent=True, blocks=4),  # receives are posted ahead of need, and spin
}


def group_options(use: str, backend: str, timeout: timedelta | None) -> "dist.ProcessGroupNCCL.Options | None":
    """Options of one new group, to be used once; None where the backend is not NCCL's. use: a key of `TRAFFIC`."""
    traffic = TRAFFIC[use]
    if backend not in BACKENDS or BACKENDS[backend].job != "nccl" or not dist.is_nccl_available():
        return None
    told = dist.ProcessGroupNCCL.Options(is_high_priority_stream=traffic.urgent)
    if traffic.blocks is not None:
        told.config.max_ctas = traffic.blocks
    if timeout is not None:
        told._timeout = timeout  # torch warns where it differs from the group's
    return told
