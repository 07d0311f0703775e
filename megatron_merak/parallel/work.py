"""Common parts of process groups implemented in Python: the underlying gloo backend and the work
handle.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work


def ranks_of(options) -> list[int]:
    """Return a group's global ranks, from the options that ``Backend.register_backend`` passes to
    its creator.
    """
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def gloo_of(options) -> dist.ProcessGroupGloo:
    """Return a gloo backend with the ranks of a group."""
    store = dist.PrefixStore("gloo", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    gloo.options.global_ranks_in_group, gloo.options.group_name = (
        ranks_of(options),
        options.group_id,
    )
    return gloo


class FinishedByWaiting(Work):
    """A work that only completes in `wait`.

    outputs: the tensors that receive its results.
    """

    def __init__(self, outputs: list[Tensor]):
        super().__init__()
        self.outputs = outputs

    def result(self) -> list[Tensor]:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        """Return a completed future, after waiting."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.outputs)
        return future
