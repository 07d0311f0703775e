"""The part of a collective's handle that process groups made in Python share."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work


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
