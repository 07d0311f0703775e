"""Executes a schedule: one handler per kind of op, no knowledge of any particular schedule."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..parallel.p2p import Pipes
from ..pipeline_parallel.ops import Kind, Op, Schedule, ops_of
from .stage import LOSS, Stage

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepLoss:
    """What the last stage knows after a step: fp32 scalars, summed over this rank's micro-batches; None elsewhere.

    total: sum of token losses. tokens: number of unmasked tokens. mean: sum over micro-batches of their mean token
    loss.
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

        ``training`` turns dropout on and adds gradients to ``main_grad``.
        """
        self.batches, self.step, self.training, self.losses = batches, step, training, []
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
        border = stage.source if op.kind is Kind.F else stage.target
        if border is not None:
            self._state(stage, op).wait(border.name)
        began = time.perf_counter()
        self._handlers[op.kind](stage, op)
        self.trace.append((str(op), began, time.perf_counter()))

    def _state(self, stage: Stage, op: Op):
        if op.microbatch in stage.states:
            return stage.states[op.microbatch]
        return stage.begin(op.microbatch, self.batches[op.microbatch], self.step, self.training)

    def _forward(self, stage: Stage, op: Op) -> None:
        state = self._state(stage, op)
        stage.forward(op.microbatch)
        if stage.target is None:
            total, tokens = state.values.pop(LOSS), state.common["loss_mask"].sum()
            self.losses.append((total, tokens, total / tokens.clamp(min=1)))
        if stage.target is None and not self.training:
            stage.end(op.microbatch)

    def _backward(self, stage: Stage, op: Op) -> None:
        scale = None
        if stage.target is None:
            tokens = stage.states[op.microbatch].common["loss_mask"].sum().clamp(min=1)
            replicas = len(self.batches) * self.mesh.grid.dp
            scale = torch.ones_like(tokens) if self.per_token else 1 / (tokens * replicas)
        stage.backward(op.microbatch, scale, op == self.last_backward[stage.index])
        if stage.source is None:
            stage.end(op.microbatch)

    def _receive_activation(self, stage: Stage, op: Op) -> None:
        state, value = self._state(stage, op), stage.source
        state.arriving(value.name, *self.pipes.receive(op, value.shape, value.dtype))

    def _receive_gradient(self, stage: Stage, op: Op) -> None:
        value = stage.target
        stage.states[op.microbatch].arriving_grad(value.name, *self.pipes.receive(op, value.shape, value.dtype))

    def _send_activation(self, stage: Stage, op: Op) -> None:
        state = stage.states[op.microbatch]
        self.pipes.send(op, state.values.pop(stage.target.name))
        if not self.training:
            stage.end(op.microbatch)

    def _send_gradient(self, stage: Stage, op: Op) -> None:
        grad = stage.states[op.microbatch].take_grad(stage.source.name)
        self.pipes.send(op, grad)
        stage.end(op.microbatch)
