"""What TRL's trainers ask of accelerate: each replica of the model counts as one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import AbsentError
from ..parallel.mesh import Mesh


class Accelerator:
    """``trainer.accelerator`` of a parallelized trainer.

    gather: applied to the tensors that metrics are computed from; set by whoever computes them.
    """

    parallelism_config = None  # degrees are MerakArguments'

    def __init__(self, mesh: Mesh):
        self.device = mesh.device
        self.num_processes = mesh.grid.dp
        self.process_index = mesh.dp_rank
        self.is_main_process = self.is_local_main_process = mesh.rank == 0
        self.gather: Callable[[Any], Any] = lambda value: value

    def gather_for_metrics(self, value: Any) -> Any:
        return self.gather(value)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        """Return a reference model unchanged: it is captured together with the trained model."""
        return model.eval() if evaluation_mode else model

    def autocast(self) -> AbstractContextManager:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        raise AbsentError(
            f"accelerator.{name}",
            "(read)",
            "accelerate is not used",
            "Ask trainer.args or trainer.mesh",
        )


def over_replicas(mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """Concatenate the tensors of all replicas, as accelerate's ``gather`` does; numbers become a
    vector.
    """

    def gather(value: Tensor) -> Tensor:
        if mesh.dp is None:
            return value
        local = value.detach().reshape(value.shape or (1,)).contiguous()
        sent = local.to(torch.uint8) if local.dtype == torch.bool else local
        gathered = [torch.empty_like(sent) for _ in range(mesh.grid.dp)]
        dist.all_gather(gathered, sent, group=mesh.dp)
        return torch.cat(gathered).to(local.dtype)

    return gather
