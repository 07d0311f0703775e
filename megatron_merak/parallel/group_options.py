"""NCCL options of a process group by its use: stream priority, and the number of thread blocks per
kernel.

Each group's kernels run on a stream of its own. While a matrix product fills the GPU, they start
only when it ends; on a high-priority stream, as soon as blocks become free. A kernel that waits for
its peer occupies its blocks.
"""

from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from ..config.backends import BACKENDS


class Traffic(NamedTuple):
    """The requirements of a group.

    urgent: whether the next computation waits for its collectives.
    blocks: maximum thread blocks of one kernel; None: NCCL's default.
    """

    urgent: bool
    blocks: int | None = None


TRAFFIC = {
    "tp": Traffic(urgent=True),
    "pp": Traffic(urgent=True),
    "tp-pp": Traffic(urgent=False),  # the gradient norm, after all computation
    "dp": Traffic(urgent=False),  # gradients: overlapped with the backward, which takes precedence
    "tied": Traffic(urgent=False),
    "channel": Traffic(urgent=True, blocks=4),  # receives are pre-posted, and spin
}


def group_options(
    use: str, backend: str, timeout: timedelta | None
) -> "dist.ProcessGroupNCCL.Options | None":
    """Return options for one new group, not to be reused; None for backends other than NCCL.

    use: a key of `TRAFFIC`.
    """
    traffic = TRAFFIC[use]
    if backend not in BACKENDS or BACKENDS[backend].job != "nccl" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=traffic.urgent)
    if traffic.blocks is not None:
        options.config.max_ctas = traffic.blocks
    if timeout is not None:
        options._timeout = timeout  # torch warns where it differs from the group's
    return options
