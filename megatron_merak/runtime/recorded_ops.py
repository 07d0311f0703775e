"""The compute ops of training steps, recorded in one step and replayed in all later ones."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import Tensor

from ..pipeline_parallel.ops import Kind, Op
from ..segment import Common, Segment
from .engine import Pass, State, execute
from .parameters import RankParameters
from .program import LOSS, Program
from .recordings import Recording, recorder
from .stage import MicroBatchPart, Stage


class _Phase(Enum):
    """How a step runs: op by op, recorded, or replayed."""

    PLAIN = auto()
    RECORD = auto()
    REPLAY = auto()


@dataclass(frozen=True)
class _RecordedOp:
    """An op of one micro-batch.

    inputs:   by name, what is filled before a replay: values for a forward, gradients for a
              backward.
    outputs:  by name, what a replay has filled: values that leave the stage, or gradients.
    segments: whose deferred weight gradients a W computes.
    """

    recording: Recording
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    segments: tuple[Segment, ...] = ()


class OpRecordings:
    """What one executor has recorded of its training steps.

    The first steps run op by op, until kernels are chosen and buffers exist. Then a whole step is
    recorded, in the order of the schedule: an op uses the memory of earlier ones again as far as
    that order allows, so that there is one step's set of recordings and no second one. A
    micro-batch whose program is another than in that step, since its shape is, runs op by op, and
    so does one whose numbers that the host reads are others, that has tensors with more memory, or
    that draws random numbers or runs Python code of the model.

    parameters: of all stages of this rank.
    warm_up:    steps before the one that is recorded.
    alone:      (stage, micro-batch) of those that always run op by op.

    Attribute ``replayed``: ops that were replayed so far.
    """

    def __init__(
        self, parameters: RankParameters, warm_up: int, alone: Collection[tuple[int, int]] = ()
    ):
        self._parameters = parameters
        self._left = warm_up
        self._alone = frozenset(alone)
        self._new = recorder(parameters.mesh.device)
        self._ops: dict[Op, _RecordedOp] = {}
        self._parts: dict[tuple[int, int], MicroBatchPart] = {}
        self._phase = _Phase.PLAIN
        self._complete = False
        self.replayed = 0

    def start(self, training: bool, stages: Iterable[Stage]) -> None:
        """Begin a run of the schedule."""
        if not self._complete:  # also where an error has ended the step that was to be recorded
            self._ops.clear()
            self._parts.clear()
        self._phase = _Phase.PLAIN
        if not training or any(stage.observed for stage in stages):
            return
        if self._left:
            self._left -= 1
            return
        self._phase = _Phase.REPLAY if self._complete else _Phase.RECORD
        # Op by op, the first gradient of a step overwrites that of the step before. A recording
        # must not: which micro-batch is the first may change, where one of them runs op by op.
        self._parameters.settle()
        # A replay does not wait for weights segment by segment.
        self._parameters.gatherer.finish()

    def end(self) -> None:
        """End a run that went well."""
        self._complete = self._complete or self._phase is _Phase.RECORD

    def begin(self, stage: Stage, microbatch: int) -> None:
        """Let a micro-batch that has begun use the memory that is, or was, recorded for it."""
        parts = stage.parts[microbatch]
        place = (stage.index, microbatch)
        if self._phase is _Phase.PLAIN or len(parts) > 1 or place in self._alone:
            return
        common = parts[0].state.common
        program = parts[0].program
        if self._phase is _Phase.RECORD:
            # the first program was refused for that; others come with other batches and losses
            if program.codes or any(segment.random for segment in program.segments):
                return
            for name, value in common.items():
                if name not in program.fixed:
                    common[name] = _held(value)
            self._parts[place] = parts[0]
        elif place in self._parts and self._parts[place].runner is parts[0].runner:
            kept = self._parts[place].state.common
            if _replays(program, kept, common):
                for name, held in kept.items():
                    if held.data_ptr() != common[name].data_ptr():
                        _fill(held, common[name])
                stage.parts[microbatch] = [self._parts[place]]

    def covers(self, stage: Stage, op: Op) -> bool:
        """Whether an op is recorded or replayed in this run."""
        part = self._parts.get((op.stage, op.microbatch))
        covered = self._phase is not _Phase.PLAIN and part is not None
        return covered and stage.parts[op.microbatch][0] is part

    def run(self, op: Op, one: Pass) -> None:
        """Record or replay a forward, a recomputation or a backward."""
        state = one.state
        program = self._parts[op.stage, op.microbatch].program
        bare = replace(one, on_complete=None)
        sources = [value.name for value in program.sources]
        if op.kind is Kind.F:
            inputs = {name: _taken(state, name) for name in sources}
            self._perform(op, bare, state.values, inputs, program.outputs)
            for name in program.results:
                # A caller may keep what the model returned, and the next step overwrites that.
                own = state.values if name in state.values else state.common
                if name != LOSS and name not in program.fixed and name in own:
                    state.values[name] = own[name].clone()
        elif op.kind is Kind.B:
            targets = [LOSS, *(value.name for value in program.targets)]
            grads = {name: state.take_grad(name) for name in targets}
            inputs = {name: grad for name, grad in grads.items() if grad is not None}
            self._perform(op, bare, state.grads, inputs, sources)
        else:
            self._perform(op, bare, state.values, {}, ())
        if one.on_complete is not None:
            for kind, segment in (step for run in one.runs for step in run):
                if kind is Kind.B:
                    one.on_complete(segment)

    def finish_weights(self, stage: Stage, op: Op, last: bool) -> None:
        """Record or replay the weight gradients that a backward deferred. last: see `Stage`."""
        (part,) = stage.parts[op.microbatch]
        if self._phase is _Phase.RECORD:
            segments = tuple(segment for segment, _ in part.state.queue)
            recording = self._new()
            recording.record(lambda: part.runner.engine.finish_weights(part.state), _known(part))
            self._ops[op] = _RecordedOp(recording, {}, {}, segments)
        else:
            self._replay(op)
        completed = stage.completion(op.microbatch, part.runner) if last else None
        if completed is not None:
            for segment in self._ops[op].segments:
                completed(segment)

    def _perform(
        self,
        op: Op,
        one: Pass,
        live: dict[str, Tensor],
        inputs: Mapping[str, Tensor],
        outputs: Iterable[str],
    ) -> None:
        """Record or replay a pass. live: where it reads its inputs and leaves its outputs."""
        if self._phase is _Phase.RECORD:
            held = {name: _held(value) for name, value in inputs.items()}
            live.update(held)
            recording = self._new()
            recording.record(lambda: execute([one]), _known(self._parts[op.stage, op.microbatch]))
            left = {name: live[name] for name in outputs if name in live}
            self._ops[op] = _RecordedOp(recording, held, left)
            return
        recorded = self._ops[op]
        assert inputs.keys() == recorded.inputs.keys(), f"{op} gets {sorted(inputs)}"
        for name, value in inputs.items():
            _fill(recorded.inputs[name], value)
        self._replay(op)
        live.update(recorded.outputs)

    def _replay(self, op: Op) -> None:
        self._ops[op].recording.replay()
        self.replayed += 1


def _replays(program: Program, kept: Common, common: Common) -> bool:
    """Return whether what a micro-batch has can be put in the place of what was recorded."""
    if not all(torch.equal(kept[name], common[name]) for name in program.by_host):
        return False
    # a tensor that was expanded has memory for each element once
    sizes = ((_once(kept[name]).shape, _once(value).shape) for name, value in common.items())
    return all(a >= b for held, new in sizes for a, b in zip(held, new, strict=True))


def _known(part: MicroBatchPart) -> list[Tensor]:
    """Return what Python reads of a micro-batch, and what others must therefore equal."""
    return [part.state.common[name] for name in part.program.by_host]


def _taken(state: State, name: str) -> Tensor:
    value = state.value(name)
    del state.values[name]
    return value


def _held(value: Tensor) -> Tensor:
    """Return a copy that stays where it is, with the strides of ``value``."""
    return _once(value).clone().expand(value.shape)


def _fill(held: Tensor, value: Tensor) -> None:
    _once(held).copy_(_once(value))


def _once(value: Tensor) -> Tensor:
    """Return a view that has each element of an expanded tensor once."""
    for dimension, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dimension] > 1:
            value = value.narrow(dimension, 0, 1)
    return value
