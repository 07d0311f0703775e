"""Pipeline stages whose work takes given times on a clock: it sleeps, or a modelled clock counts.
What crosses the borders, the gradients and everything that runs the stages is real.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.schedules.cells import Cell
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.parallel.clock import Clock
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.runtime.executor import Executor
from megatron_merak.runtime.parameters import RankParameters
from megatron_merak.runtime.program import Program
from megatron_merak.runtime.stage import Stage
from megatron_merak.runtime.weights import DeferredProduct, WeightGradients
from megatron_merak.segment import Crossing, In, Out, Segment

ROWS, WIDTH = 64, 256  # of fp32: a message of 64 KiB


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch; ``backward`` without the weight gradient, which takes
    ``weight``.
    """

    forward: float
    backward: float
    weight: float


@dataclass(frozen=True, eq=False)
class TimedProduct(DeferredProduct):
    """The gradient of a scale, row by row of ``input``; it takes ``seconds``."""

    seconds: float = 0.0
    clock: Clock = field(kw_only=True)

    @torch.no_grad()
    def accumulate(self) -> None:
        self.clock.kernel(self.seconds)
        self.grad.add((self.grad_output * self.input).sum(0))


@dataclass(frozen=True, eq=False)
class Work:
    """How long the forward and backward of a stage take, and where its weight gradient goes."""

    times: Times
    clock: Clock
    sink: WeightGradients

    def take(self, scale: Tensor, grad: Tensor, x: Tensor) -> None:
        """Hand in the weight gradient: it is computed at once, or when its turn comes."""
        product = TimedProduct(
            self.sink.grads[scale], grad, x, seconds=self.times.weight, clock=self.clock
        )
        if self.sink.queue is None:
            product.accumulate()
        else:
            self.sink.queue.append(product)


class Scaled(torch.autograd.Function):
    """y = x * scale, after a while."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, work: Work):
        work.clock.kernel(work.times.forward)
        ctx.save_for_backward(x, scale)
        ctx.work = work
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale = ctx.saved_tensors
        ctx.work.clock.kernel(ctx.work.times.backward)
        ctx.work.take(scale, grad, x)
        return grad * scale, None, None


def initial_scale(stage: int) -> Tensor:
    return 1 + 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(stage))


def microbatches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(ROWS, WIDTH, generator=generator)} for _ in range(count)]


class Pipeline:
    """This rank's stages of a cell, and the executor that runs them."""

    def __init__(self, cell: Cell, schedule: Schedule, mesh: Mesh):
        mine = [
            stage for stage in range(schedule.stages) if schedule.rank_of(stage) == mesh.pp_rank
        ]
        entries = [[BufferEntry(str(stage), (WIDTH,), 0)] for stage in mine]
        self.buffer = ParameterBuffer(entries, torch.float32, mesh.device)
        scales = {}
        for stage in mine:
            self.buffer.parameter(str(stage)).copy_(initial_scale(stage))
            scales[stage] = nn.Parameter(self.buffer.parameter(str(stage)))
        self.parameters = RankParameters(
            self.buffer, {scales[stage]: str(stage) for stage in mine}, mesh
        )
        again = cell.recomputing(schedule.stages)
        stages = {}
        for stage in mine:
            program = _program(stage, schedule.stages, scales[stage], self._work(cell, mesh))
            runs = [(stage,)] if stage in again else []
            stages[stage] = Stage(
                stage, _constant(program), self.parameters, runs, mesh=mesh, seed=0
            )
        self.executor = Executor(stages, add_communication(schedule), mesh)

    def _work(self, cell: Cell, mesh: Mesh) -> Work:
        forward, backward, weight = cell.stage_times()
        return Work(Times(forward, backward - weight, weight), mesh.clock, self.parameters.weights)

    def prepare(self) -> None:
        """Before each step."""
        self.parameters.start_step()

    def step(self, batches: list[dict[str, Tensor]]) -> None:
        self.executor.run(batches, 0)

    def gradients(self) -> Mapping[int, Tensor]:
        """By stage; those of the last step."""
        return {int(name): self.buffer.grad(name).clone() for name in self.buffer.slots}


def _constant(program: Program):
    return lambda batch, training, task: program


def _program(stage: int, stages: int, scale: nn.Parameter, work: Work) -> Program:
    first, last = stage == 0, stage == stages - 1

    def fn(common, *ins: Tensor) -> tuple[Tensor, ...]:
        y = Scaled.apply(common["x"] if first else ins[0], scale, work)
        return (y.mean(),) if last else (y,)

    ins = () if first else (In(f"h{stage - 1}"),)
    outs = (Out("loss" if last else f"h{stage}"),)
    segment = Segment(stage, 0, fn, ins, outs=outs, parameters=(scale,))
    sources, targets = (
        () if absent else (Crossing(f"h{place}", (ROWS, WIDTH), torch.float32),)
        for absent, place in ((first, stage - 1), (last, stage))
    )
    return Program((segment,), dict, sources, targets, ("loss",) if last else ())
