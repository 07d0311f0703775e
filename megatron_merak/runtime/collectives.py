"""The collectives of tensor-parallel ranks that stand between segments, launched and not waited for."""

import torch
import torch.distributed as dist
from torch import Tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Done:
    """A work that is over."""

    def wait(self) -> None:
        pass


def launch(tensor: Tensor, kind: str, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, dist.Work]:
    """Start the collective ``kind`` ('sum', 'max') over ``group``; the result is valid once the work was waited for.

    ``inplace``: it may overwrite ``tensor``.
    """
    if not (inplace and tensor.is_contiguous()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor, dist.all_reduce(tensor, op=_REDUCTIONS[kind], group=group, async_op=True)
