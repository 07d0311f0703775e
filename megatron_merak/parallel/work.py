"""What process groups made in Python share: gloo behind them, and the part of a collective's handle."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work


def ranks_of(options) -> list[int]:
    """The job's ranks that a group is made of, from what ``Backend.register_backend`` hands its maker."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def gloo_of(options) -> dist.ProcessGroupGloo:
    """A gloo backend of a group's ranks."""
    store = dist.PrefixStore("gloo", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    gloo.options.global_ranks_in_group, gloo.options.group_name = ranks_of(options), options.group_id
    return gloo


class FinishedByWaiting(Work):
    """A work that goes on in waits alone. ``outputs``: the tensors it leaves its results in."""

    def __init__(self, outputs: list[Tensor]):
        super().__init__()
        self.outputs = outputs

    def result(self) -> list[Tensor]:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        """Waits first."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self.outputs)
        return future
