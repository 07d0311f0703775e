"""Executes a schedule: one handler per kind of op, no knowledge of any particular schedule."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..parallel.p2p import Pipes
from ..pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from .program import LOSS
from .stage import Batch, Stage


@dataclass(frozen=True)
class StepLoss:
    """What the last stage knows after a step: fp32 scalars, summed over this rank's micro-batches; None elsewhere.

    total: sum of the micro-batches' losses, which are sums of token losses or complete. tokens: number of unmasked
    tokens; of micro-batches where losses are complete. mean: sum over micro-batches of their mean token loss.
    """

    total: Tensor
    tokens: Tensor
    mean: Tensor


class Executor:
    """One rank's part of a step.

    stages: this rank's, by global index. schedule: with communication ops. per_token: gradients are those of the sum of
    token losses (to be divided by the step's tokens), else of the mean over micro-batches and replicas of their means.
    pipes: those of another executor over the same stages, whose schedule uses every channel that this one uses.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        mesh: Mesh,
        per_token: bool = False,
        pipes: Pipes | None = None,
    ):
        self.stages, self.schedule, self.mesh, self.per_token = stages, schedule, mesh, per_token
        self.program = [op for entry in schedule.ranks[mesh.pp_rank] for op in ops_of(entry)]
        self.last_backward = {op.stage: op for op in self.program if op.kind is Kind.B}
        self.pipes = pipes or Pipes(mesh, schedule)
        # Set to a list, it takes (op, start, end) of each compute op in seconds, without the time spent waiting for a
        # transfer.
        self.trace: list[tuple[str, float, float]] | None = None
        self._handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send_activation,
            Kind.RECV_F: self._receive_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }

    def run(self, batches: Sequence[Batch], step: int, training: bool = True) -> StepLoss | None:
        """Run every op in order; ``batches`` has one entry per micro-batch, on every rank.

        ``training`` turns dropout on and adds gradients to ``main_grad``. What the model hands out beside its loss is
        in ``results`` afterwards, one dict per micro-batch, on the last stage.
        """
        self.batches, self.step, self.training, self.losses = batches, step, training, []
        self.results: list[dict[str, Tensor]] = []
        for stage in self.stages.values():
            stage.start_run(training)
        for op in self.program:
            run = self._handlers[op.kind]
            if self.trace is not None and op.kind.is_compute:
                run = self._traced
            run(self.stages[op.stage], op)
        self.pipes.finish()
        if not self.losses:
            return None
        return StepLoss(*(torch.stack(values).sum() for values in zip(*self.losses, strict=True)))

    def _traced(self, stage: Stage, op: Op) -> None:
        """Note when a compute op ran, from the arrival of what it reads."""
        state = self._state(stage, op)
        program = stage.program(op.microbatch)
        wait, awaited = (state.wait, program.sources) if op.kind is Kind.F else (state.wait_grad, program.targets)
        for value in awaited:
            wait(value.name)
        began = time.perf_counter()
        self._handlers[op.kind](stage, op)
        self.trace.append((str(op), began, time.perf_counter()))

    def _state(self, stage: Stage, op: Op):
        if op.microbatch in stage.states:
            return stage.states[op.microbatch]
        return stage.begin(op.microbatch, self.batches[op.microbatch], self.step, self.training)

    def _is_last(self, stage: Stage) -> bool:
        return stage.index == self.schedule.stages - 1

    def _forward(self, stage: Stage, op: Op) -> None:
        self._state(stage, op)
        stage.forward(op.microbatch)
        if not self._is_last(stage):
            return
        found = {name: stage.result(op.microbatch, name) for name in stage.program(op.microbatch).results}
        count = stage.count(op.microbatch)
        total = found.pop(LOSS, torch.zeros_like(count))
        self.losses.append((total, count, total / count.clamp(min=1)))
        self.results.append(found)
        if not self.training:
            stage.end(op.microbatch)

    def _backward(self, stage: Stage, op: Op) -> None:
        scale = None
        if self._is_last(stage):
            count = stage.count(op.microbatch).clamp(min=1)
            replicas = len(self.batches) * self.mesh.grid.dp
            scale = torch.ones_like(count) if self.per_token else 1 / (count * replicas)
        stage.backward(op.microbatch, scale, op == self.last_backward[stage.index])
        if stage.index == 0:
            stage.end(op.microbatch)

    def _receive_activation(self, stage: Stage, op: Op) -> None:
        state = self._state(stage, op)
        for place, value in enumerate(stage.program(op.microbatch).sources):
            state.arriving(value.name, *self.pipes.receive(op, value.shape, value.dtype, place))

    def _receive_gradient(self, stage: Stage, op: Op) -> None:
        state = self._state(stage, op)  # with one micro-batch in flight this is posted before its forward
        for place, value in enumerate(stage.program(op.microbatch).targets):
            if value.grad:
                state.arriving_grad(value.name, *self.pipes.receive(op, value.shape, value.dtype, place))

    def _send_activation(self, stage: Stage, op: Op) -> None:
        for place, value in enumerate(stage.program(op.microbatch).targets):
            self.pipes.send(op, stage.result(op.microbatch, value.name), place)
        if not self.training:
            stage.end(op.microbatch)

    def _send_gradient(self, stage: Stage, op: Op) -> None:
        state = stage.states[op.microbatch]
        for place, value in enumerate(stage.program(op.microbatch).sources):
            if value.grad:
                grad = state.take_grad(value.name)
                if grad is None:
                    grad = torch.zeros(value.shape, dtype=value.dtype, device=self.mesh.device)
                self.pipes.send(op, grad, place)
        stage.end(op.microbatch)
