"""The same stages under the schedules of torch.distributed.pipelining."""

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.schedules.cells import Cell
from benchmarks.schedules.timed_stages import ROWS, WIDTH, initial_scale
from megatron_merak.parallel.clock import Clock


class Through(torch.autograd.Function):
    """The forward, and the gradient of the input."""

    @staticmethod
    def forward(ctx, x: Tensor, clock: Clock, forward: float, backward: float):
        ctx.clock, ctx.seconds = clock, backward
        clock.kernel(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.clock.kernel(ctx.seconds)
        return grad, None, None, None


class Weigh(torch.autograd.Function):
    """The gradient of the weight, a node of its own: where a schedule splits the backward, torch
    runs the nodes on the way to the input first, and those to the weights later.
    """

    @staticmethod
    def forward(ctx, scale: Tensor, clock: Clock, seconds: float):
        ctx.clock, ctx.seconds = clock, seconds
        return scale.view_as(scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.clock.kernel(ctx.seconds)
        return grad, None, None


class TimedModule(nn.Module):
    """One stage; it also differentiates an input that asks for no gradient, as layers behind an
    embedding do.
    """

    def __init__(self, stage: int, cell: Cell, clock: Clock):
        super().__init__()
        self.scale = nn.Parameter(initial_scale(stage))
        self.cell, self.clock = cell, clock

    def forward(self, x: Tensor) -> Tensor:
        forward, backward, weight = self.cell.stage_times()
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return Through.apply(x, self.clock, forward, backward - weight) * Weigh.apply(
            self.scale, self.clock, weight
        )


class PeerPipeline:
    """This rank's stages, as ``timed_stages.Pipeline``: ``mine`` of the ``stages`` of all ranks.

    ``batches``: those of every step. Torch wants them as one tensor, which it splits again.
    """

    def __init__(
        self,
        cell: Cell,
        stages: int,
        mine: list[int],
        batches: list[dict[str, Tensor]],
        clock: Clock,
    ):
        self.modules = {stage: TimedModule(stage, cell, clock) for stage in mine}
        message = torch.empty(ROWS, WIDTH)
        made = []
        for stage, module in self.modules.items():
            # Shapes are told, so that torch runs nothing to find them out.
            made.append(
                PipelineStage(module, stage, stages, torch.device("cpu"), input_args=(message,))
            )
        kind = getattr(schedules, cell.peer)
        given = made[0] if issubclass(kind, PipelineScheduleSingle) else made
        self.schedule = kind(given, cell.microbatches, loss_fn=lambda output, target: output.mean())
        self.inputs, self.last = torch.cat([batch["x"] for batch in batches]), stages - 1 in mine

    def prepare(self) -> None:
        """Before each step."""
        for module in self.modules.values():
            module.scale.grad = None

    def step(self, batches: list[dict[str, Tensor]]) -> None:
        given = (self.inputs,) if 0 in self.modules else ()
        self.schedule.step(*given, target=self.inputs if self.last else None, return_outputs=False)

    def gradients(self) -> dict[int, Tensor]:
        return {stage: module.scale.grad.clone() for stage, module in self.modules.items()}
