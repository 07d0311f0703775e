"""Executes any pipeline schedule, op by op, with one handler per kind of op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..parallel.p2p import Pipes
from ..pipeline_parallel.arrivals import arrivals
from ..pipeline_parallel.ops import Entry, Kind, Op, Schedule, ops_of
from ..segment import Crossing
from .engine import Pass, execute
from .program import LOSS
from .recorded_ops import OpRecordings
from .stage import Batch, MicroBatchPart, Stage
from .stopwatch import GpuStopwatch, Stopwatch


@dataclass(frozen=True)
class StepLoss:
    """The losses of a step on the last stage: fp32 scalars, summed over this rank's micro-batches.

    A model's loss is either a sum over tokens or complete, i.e. reduced by the model itself.

    total:  sum of the micro-batches' losses.
    tokens: number of unmasked tokens; number of micro-batches where losses are complete.
    mean:   sum over micro-batches of their mean loss per token; of their losses where these are
            complete.
    """

    total: Tensor
    tokens: Tensor
    mean: Tensor


@dataclass
class StepRun:
    """One run of a schedule.

    batches, ...: see `Executor.run`.
    losses:       per micro-batch, what `StepLoss` sums; empty before the last stage.
    results:      per micro-batch of the last stage, the model's outputs beside its loss.
    stopwatch:    times compute ops; None where nobody asked for a trace.
    marks:        (op, start, end) of each compute op, as the stopwatch marks them.
    waited:       seconds that compute ops waited inside for other ranks, where waits are timed.
    """

    batches: Sequence[Batch] = ()
    step: int = 0
    training: bool = True
    weights: Sequence[float] | None = None
    loss_scale: float = 1.0
    sum_losses: bool = False
    task: Any = None
    stopwatch: Stopwatch | GpuStopwatch | None = None
    losses: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    results: list[dict[str, Tensor]] = field(default_factory=list)
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)
    waited: float = 0.0

    def trace(self) -> list[tuple[str, float, float]]:
        """Return (op, start, end) of each compute op, in seconds."""
        if self.stopwatch is None:
            return []
        read = self.stopwatch.seconds
        return [(op, read(began), read(ended)) for op, began, ended in self.marks]

    def computing(self) -> float:
        """Return the seconds that this rank computed, as far as waits inside ops are timed."""
        # Ops that ran together have the same marks.
        spans = {(began, ended) for _, began, ended in self.trace()}
        return sum(ended - began for began, ended in spans) - self.waited


class Between(Protocol):
    """What happens around the compute ops of a schedule that updates weights on its way."""

    def before(self, op: Op) -> None:
        """Called before an op that computes."""

    def after(self, op: Op) -> None:
        """Called after it, when its results are handed over."""


class Executor:
    """Runs one rank's ops of a step.

    stages:   this rank's stages, by global index.
    schedule: with communication ops.
    pipes:    the pipes of another executor over the same stages, whose schedule uses every channel
              that this one uses.
    warm_up:  training steps after which one is recorded and all later ones replay it; None: none
              is.

    Attributes:
    last: the run that is under way, or was the last; kept until the next begins.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        mesh: Mesh,
        pipes: Pipes | None = None,
        warm_up: int | None = None,
    ):
        self.stages = stages
        self.schedule = schedule
        self.mesh = mesh
        self.program = schedule.ranks[mesh.pp_rank]
        ops = [op for entry in self.program for op in ops_of(entry)]
        self.deferred = frozenset((op.stage, op.microbatch) for op in ops if op.kind is Kind.W)
        # The op that makes a stage's gradients final, and the last op of a stage that uses a
        # micro-batch.
        self.finals = {op.stage: op for op in ops if op.kind in (Kind.B, Kind.W)}
        self.ends = {(op.stage, op.microbatch): op for op in ops}
        self.pipes = pipes or Pipes(mesh, schedule)
        self._arrived = arrivals(schedule, mesh.pp_rank)
        self._next_unit = self._next_units(ops)
        self.recordings = None if warm_up is None else self._recordings(warm_up)
        # If set to a list, a run appends (op, start, end) of each compute op, in seconds, at its
        # end. The time spent waiting for transfers is not included.
        self.trace: list[tuple[str, float, float]] | None = None
        # called with each value that leaves a stage
        self.on_send: Callable[[Tensor], None] | None = None
        self.last = StepRun()
        self._handlers = {
            Kind.W: self._finish_weights,
            Kind.SEND_F: self._send_activation,
            Kind.RECV_F: self._receive_activation,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }

    def _recordings(self, warm_up: int) -> OpRecordings:
        parameters = next(iter(self.stages.values())).parameters
        # These send each gradient as soon as it is final, which a replay would not tell them.
        finals = [(op.stage, op.microbatch) for op in self.finals.values()]
        return OpRecordings(parameters, warm_up, finals if parameters.reducer.eager else ())

    def _next_units(self, ops: Sequence[Op]) -> dict[Op, int]:
        """Return, per compute op, the first unit whose parameters a later one needs; no entry if
        none does.
        """
        next_units: dict[Op, int] = {}
        recomputed_early = {(op.stage, op.microbatch) for op in ops if op.kind is Kind.R}
        next_unit: int | None = None
        for op in reversed([op for op in ops if op.kind.is_compute]):
            if next_unit is not None:
                next_units[op] = next_unit
            key = (op.stage, op.microbatch)
            recomputed = op.kind is Kind.W or (op.kind is Kind.B and key in recomputed_early)
            visits = self.stages[op.stage].visits(op.kind, recomputed, key in self.deferred)
            next_unit = next((visit.unit for visit in visits if visit.computes), next_unit)
        return next_units

    def run(
        self,
        batches: Sequence[Batch],
        step: int,
        training: bool = True,
        weights: Sequence[float] | None = None,
        loss_scale: float = 1.0,
        sum_losses: bool = False,
        task: Any = None,
        between: Between | None = None,
    ) -> StepLoss | None:
        """Run every op in order. Return the losses on the last stage, None elsewhere.

        Afterwards ``last.results`` has, on the last stage, the model's outputs beside its loss.
        A forward-only schedule may have more micro-batches than ``batches``. For these nothing is
        computed, but sharded parameters are gathered, because other replicas take part in the
        collective.

        batches:    one per micro-batch, on every rank.
        training:   whether dropout is on and gradients are added to ``main_grad``.
        weights:    factors of the micro-batches' losses; 1 by default.
        loss_scale: factor of all gradients, not of losses.
        sum_losses: whether gradients are those of the sum of the micro-batches' losses (a caller
                    divides sums over tokens by the step's tokens); else those of the mean over
                    micro-batches and replicas of their means.
        task:       what the stages' programs compute, see `Stage`; None: the model's loss.
        between:    called around each compute op; None: nothing is.
        """
        stopwatch = None if self.trace is None else self._new_stopwatch()
        self.last = StepRun(
            batches,
            step,
            training,
            weights,
            loss_scale=loss_scale,
            sum_losses=sum_losses,
            task=task,
            stopwatch=stopwatch,
        )
        for stage in self.stages.values():
            stage.start_run(training)
        if self.recordings is not None:
            self.recordings.start(training, self.stages.values())
        pulse = self.mesh.pulse
        for entry in self.program:
            pulse.at(entry)
            if ops_of(entry)[0].microbatch >= len(batches):
                self._idle(entry)
                continue
            around = between if ops_of(entry)[0].kind.is_compute else None
            if around is not None:
                for op in ops_of(entry):
                    around.before(op)
            self._run(entry)
            if around is not None:
                for op in ops_of(entry):
                    around.after(op)
            for op in ops_of(entry):
                if self.ends[op.stage, op.microbatch] == op:
                    self.stages[op.stage].end(op.microbatch)
        pulse.at("the sends of its stage")
        self.pipes.finish()
        if self.recordings is not None:
            self.recordings.end()
        pulse.at("")
        if self.trace is not None:
            self.trace += self.last.trace()
        if not self.last.losses:
            return None
        return StepLoss(
            *(torch.stack(values).sum() for values in zip(*self.last.losses, strict=True))
        )

    def _new_stopwatch(self) -> Stopwatch | GpuStopwatch:
        device = self.mesh.device
        now = self.mesh.clock.now
        return GpuStopwatch(now, device) if device.type == "cuda" else Stopwatch(now)

    def _run(self, entry: Entry) -> None:
        ops = ops_of(entry)
        stopwatch = self.last.stopwatch if ops[0].kind.is_compute else None
        if stopwatch is not None:
            self._await(ops)
            began = stopwatch.mark()
            waited = self.mesh.pulse.waited
        if ops[0].kind in self._handlers:
            for op in ops:
                self._handlers[op.kind](self.stages[op.stage], op)
        else:
            self._compute(ops)
            for op in ops:
                self.pipes.arrived(self._arrived.get(op, ()))
                self._hand_over(self.stages[op.stage], op)
        if stopwatch is not None:
            ended = stopwatch.mark()
            self.last.waited += self.mesh.pulse.waited - waited
            self.last.marks += [(str(op), began, ended) for op in ops]

    def _compute(self, ops: Sequence[Op]) -> None:
        passes = [each for op in ops for each in self._passes(op)]
        recorded = self._recorded(ops[0]) if len(passes) == 1 else None
        if recorded is None:
            execute(passes)
        else:
            recorded.run(ops[0], passes[0])

    def _recorded(self, op: Op) -> OpRecordings | None:
        """Return what records or replays an op; None where it runs as it is."""
        covered = self.recordings is not None and self.recordings.covers(self.stages[op.stage], op)
        return self.recordings if covered else None

    def _idle(self, entry: Entry) -> None:
        for op in ops_of(entry):
            stage = self.stages[op.stage]
            if not op.kind.is_compute:
                continue
            sharded_pass = stage.parameters.sharded_pass(
                stage.visits(op.kind), self._next_unit.get(op)
            )
            if sharded_pass is not None:
                sharded_pass.end()

    def _await(self, ops: Sequence[Op]) -> None:
        """Wait for the inputs that ops receive, so that a trace excludes the time of waiting."""
        for op in ops:
            for part in self._parts(op):
                if op.kind is Kind.F:
                    for value in part.program.sources:
                        part.state.wait(value.name)
                elif op.kind is Kind.B:
                    for value in part.program.targets:
                        part.state.wait_grad(value.name)

    def _parts(self, op: Op) -> list[MicroBatchPart]:
        stage = self.stages[op.stage]
        if op.microbatch in stage.parts:
            return stage.parts[op.microbatch]
        run = self.last
        stage.begin(op.microbatch, run.batches[op.microbatch], run.step, run.training, run.task)
        if self.recordings is not None:
            self.recordings.begin(stage, op.microbatch)
        return stage.parts[op.microbatch]

    def _passes(self, op: Op) -> list[Pass]:
        """Return the passes of a forward, recomputation or backward op, one per part of its
        micro-batch.
        """
        stage = self.stages[op.stage]
        self._parts(op)
        if op.kind is Kind.F:
            return stage.forward(op.microbatch, self._next_unit.get(op))
        if op.kind is Kind.R:
            return stage.recomputation(op.microbatch, self._next_unit.get(op))
        defer = (op.stage, op.microbatch) in self.deferred
        last = op == self.finals[op.stage]
        return stage.backward(
            op.microbatch, self._scale(stage, op), defer, last, self._next_unit.get(op)
        )

    def _scale(self, stage: Stage, op: Op) -> Tensor | None:
        """Return the gradient of the step's scaled loss with respect to a micro-batch's; None
        before the last stage.
        """
        if not self._is_last(stage):
            return None
        run = self.last
        count = stage.count(op.microbatch).clamp(min=1)
        updates = self.schedule.updates
        summed = len(run.batches) if updates is None else updates.every
        replicas = summed * self.mesh.summed
        scale = torch.ones_like(count) if run.sum_losses else 1 / (count * replicas)
        scale = scale if run.loss_scale == 1.0 else scale * run.loss_scale
        return scale if run.weights is None else scale * run.weights[op.microbatch]

    def _is_last(self, stage: Stage) -> bool:
        return stage.index == self.schedule.stages - 1

    def _hand_over(self, stage: Stage, op: Op) -> None:
        """Deliver an op's outputs that stay on this rank: the loss, or values and gradients for
        neighbouring stages.
        """
        if op.kind is Kind.F and self._is_last(stage):
            self._note_results(stage, op)
        elif op.kind is Kind.F and op.stage + 1 in self.stages:
            for part, other in self._beside(op, op.stage + 1):
                for value in part.program.targets:
                    taken = part.take(value.name)
                    if self.on_send is not None:
                        self.on_send(taken)
                    other.state.values[value.name] = taken
        elif op.kind is Kind.B and op.stage - 1 in self.stages:
            for part, other in self._beside(op, op.stage - 1):
                for value in part.program.sources:
                    if (grad := part.state.take_grad(value.name)) is not None:
                        other.state.add_grad(value.name, grad)

    def _beside(self, op: Op, stage: int) -> Iterator[tuple[MicroBatchPart, MicroBatchPart]]:
        """Yield the parts of an op's micro-batch in pairs: on the op's stage and on another stage
        of this rank.
        """
        return zip(self._parts(op), self._parts(Op(stage, op.kind, op.microbatch)), strict=True)

    def _note_results(self, stage: Stage, op: Op) -> None:
        parts = stage.parts[op.microbatch]
        count = stage.count(op.microbatch)
        results = [{name: part.take(name) for name in part.program.results} for part in parts]
        total = sum(
            (values.pop(LOSS) for values in results if LOSS in values), torch.zeros_like(count)
        )
        run = self.last
        if run.weights is not None:
            total = total * run.weights[op.microbatch]
        run.losses.append((total, count, total / count.clamp(min=1)))
        run.results.append(results[0])

    def _finish_weights(self, stage: Stage, op: Op) -> None:
        last = op == self.finals[op.stage]
        recorded = self._recorded(op)
        if recorded is None:
            stage.finish_weights(op.microbatch, last)
        else:
            recorded.finish_weights(stage, op, last)

    def _crossings(self, op: Op) -> Iterator[tuple[int, MicroBatchPart, Crossing]]:
        """Yield (index in the transfer, part of the micro-batch, value) of each value that a send
        or receive moves.
        """
        entering = op.kind in (Kind.RECV_F, Kind.SEND_B)
        index = 0
        # a gradient may be received for a micro-batch whose forward has not begun
        for part in self._parts(op):
            for value in part.program.sources if entering else part.program.targets:
                if value.grad or op.kind in (Kind.SEND_F, Kind.RECV_F):
                    yield index, part, value
                index += 1

    def _receive_activation(self, stage: Stage, op: Op) -> None:
        for index, part, value in self._crossings(op):
            part.state.arriving(
                value.name, *self.pipes.receive(op, value.shape, value.dtype, index)
            )

    def _receive_gradient(self, stage: Stage, op: Op) -> None:
        for index, part, value in self._crossings(op):
            part.state.arriving_grad(
                value.name, *self.pipes.receive(op, value.shape, value.dtype, index)
            )

    def _send_activation(self, stage: Stage, op: Op) -> None:
        for index, part, value in self._crossings(op):
            taken = part.take(value.name)
            if self.on_send is not None:
                self.on_send(taken)
            self.pipes.send(op, taken, index)

    def _send_gradient(self, stage: Stage, op: Op) -> None:
        for index, part, value in self._crossings(op):
            grad = part.state.take_grad(value.name)
            if grad is None:  # its receiver waits, whether or not a gradient came here
                grad = torch.zeros(value.shape, dtype=value.dtype, device=self.mesh.device)
            self.pipes.send(op, grad, index)
