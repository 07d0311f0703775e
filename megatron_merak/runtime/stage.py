"""One pipeline stage: its programs and its micro-batches in flight."""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Kind
from ..segment import Common, In, LayerAxis, Out, Segment
from ..tensor_parallel import default_generator, derive_seed
from .engine import Interpreter, Pass, State
from .offload import HostMemory, OffloadedTapes
from .parameters import RankParameters
from .program import LOSS, Program
from .units import Visit, visits_of

Batch = Mapping[str, Tensor]
Split = Callable[[Batch], Sequence[Batch]]


class _Runner:
    """A program and the engine that runs it."""

    def __init__(
        self,
        program: Program,
        recompute: Collection[Sequence[int]],
        parameters: RankParameters,
        mesh: Mesh,
        overlap: bool,
    ):
        self.program = program
        self.engine = Interpreter(
            program.segments,
            recompute,
            program.outputs,
            mesh.tp,
            weights=parameters.weights,
            device=mesh.device,
            overlap=overlap,
            wait_for_parameters=parameters.wait_for,
            pulse=mesh.pulse,
            groups=_groups_beside(mesh),
        )
        self.parameters = parameters
        self.last_uses = parameters.used_by(program.segments)
        self.collectives = _collectives_of(program)
        self.trains = False

    def train(self) -> None:
        """Register the program for training; called before its first backward, never for one that
        only evaluates.
        """
        if not self.trains:
            self.parameters.trained_by(self.program.segments)
            self.trains = True


def _groups_beside(mesh: Mesh) -> dict[LayerAxis, dist.ProcessGroup | None]:
    """Return a rank's groups of the axes of a layer beside the tensor-parallel one."""
    groups: dict[LayerAxis, dist.ProcessGroup | None] = {}
    if mesh.contexts is not None:
        groups[LayerAxis.CP] = mesh.contexts.cp
        groups[LayerAxis.INNER] = mesh.contexts.inner
        groups[LayerAxis.OUTER] = mesh.contexts.outer
    if mesh.experts is not None:
        groups[LayerAxis.EP] = mesh.experts.group
    return groups


def _collectives_of(program: Program) -> bytes:
    """Return a checksum of a program's collectives of layers, in the order of its forward,
    and of its borders.
    """
    code = zlib.crc32(
        repr(
            [(value.shape, value.dtype) for value in (*program.sources, *program.targets)]
        ).encode()
    )
    for segment in program.segments:
        kinds = "/".join(
            [
                *(_described(edge) for edge in segment.ins),
                *(_described(edge) for edge in segment.outs),
            ]
        )
        code = zlib.crc32(f"{segment.unit}.{segment.index}:{kinds}".encode(), code)
    return code.to_bytes(4, "little")


def _described(edge: In | Out) -> str:
    return f"{edge.collective} {edge.axis}" if edge.collective else ""


@dataclass(frozen=True)
class MicroBatchPart:
    """A micro-batch in flight, or one of the halves it was split into."""

    runner: _Runner
    state: State

    @property
    def program(self) -> Program:
        return self.runner.program

    def take(self, name: str) -> Tensor:
        """Return a value that leaves the stage, and free it here unless a recomputation
        needs it.
        """
        if name in self.state.common and name not in self.state.values:
            return self.state.common[name]
        return self.runner.engine.take(self.state, name)


class Stage:
    """Runs forwards, recomputations, backwards and weight gradients of one stage's units.

    index:       of the stage in the pipeline.
    program_for: (batch, training, task) -> the program for a micro-batch of that shape, the same
                 object at each call.
    recompute:   groups of consecutive units that are recomputed.
    mode:        called with ``training`` before a schedule runs.
    split:       splits a training micro-batch into parts whose segments are interleaved; None: no
                 split.
    overlap:     whether collectives overlap with other work.
    units:       of the model's chain, in forward order.
    offload:     units whose tapes are in host memory until their backward.
    host:        where these go; None if there are none.

    Attributes:
    replica:  whose micro-batches it runs, from which random numbers follow.
    launched: checksum of the sequence of tensor-parallel collectives of all its micro-batches.
    """

    def __init__(
        self,
        index: int,
        program_for: Callable[[Batch, bool, Any], Program],
        parameters: RankParameters,
        recompute: Collection[Sequence[int]],
        mesh: Mesh,
        seed: int,
        mode: Callable[[bool], object] | None = None,
        split: Split | None = None,
        overlap: bool = True,
        units: Sequence[int] = (),
        offload: Collection[int] = (),
        host: HostMemory | None = None,
    ):
        self.index = index
        self.program_for = program_for
        self.parameters = parameters
        self.recompute = recompute
        self.units = units
        self.offload = frozenset(offload)
        self.host = host
        self.mesh = mesh
        self.seed = seed
        self.mode = mode
        self.split = split
        self.overlap = overlap
        self.generator = default_generator(mesh.device)
        self.replica = mesh.replica
        self.launched = 0
        self._observer: Callable[..., None] | None = None
        self.parts: dict[int, list[MicroBatchPart]] = {}
        self._runners: dict[Program, _Runner] = {}
        self._visits: dict[tuple[Kind, bool, bool], Sequence[Visit]] = {}

    def observe(self, observer: Callable[..., None] | None) -> None:
        """Call ``observer`` after each forward and backward of a segment, until it is None; see
        `watching`.
        """
        self._observer = observer
        for runner in self._runners.values():
            runner.engine.observer = observer

    @property
    def observed(self) -> bool:
        """Whether somebody looks at what segments compute."""
        return self._observer is not None

    def start_run(self, training: bool) -> None:
        """Prepare for the first op of a schedule; drop the micro-batches of an earlier run that
        failed.
        """
        if self.mode is not None:
            self.mode(training)
        self.parts.clear()

    def begin(
        self, microbatch: int, batch: Batch, step: int, training: bool, task: Any = None
    ) -> list[MicroBatchPart]:
        """Create the parts of a micro-batch. ``batch`` comes from this rank's data, not from
        another stage.

        task: for ``program_for``.
        """
        batches = [batch] if self.split is None or not training else self.split(batch)
        position = (step, microbatch * self.mesh.replicas + self.replica)
        halves = range(len(batches)) if len(batches) > 1 else (None,)
        self.parts[microbatch] = [
            self._new_part(part, (*position, half), training, task)
            for part, half in zip(batches, halves, strict=True)
        ]
        return self.parts[microbatch]

    def _new_part(
        self, batch: Batch, position: tuple[int, int, int | None], training: bool, task: Any
    ) -> MicroBatchPart:
        program = self.program_for(batch, training, task)
        if program not in self._runners:
            self._runners[program] = _Runner(
                program, self.recompute, self.parameters, self.mesh, overlap=self.overlap
            )
            self._runners[program].engine.observer = self._observer
        self.launched = zlib.crc32(self._runners[program].collectives, self.launched)
        if training:
            self._runners[program].train()
        step, microbatch, half = position

        def seed(segment: Segment) -> None:
            mesh = self.mesh
            shard = segment.random_shard(mesh.tp_rank, mesh.cp_rank, mesh.grid.tp)
            where = [step, microbatch, segment.unit, segment.index, shard]
            if half is not None:  # another number for whole ones would be another mask in every run
                where.append(half)
            self.generator.manual_seed(derive_seed(self.seed, *where))

        common = Common(program.prelude(batch), seed if training else None)
        offloaded = None
        if training and self.host is not None:
            offloaded = OffloadedTapes(self.host, self.offload, common)
        return MicroBatchPart(self._runners[program], State(common, training, offloaded))

    def program(self, microbatch: int) -> Program:
        """The program of a micro-batch in flight, or of its first half."""
        return self.parts[microbatch][0].program

    def count(self, microbatch: int) -> Tensor:
        """Return the number of tokens that a micro-batch's loss is summed over (1 if it is
        complete): fp32 scalar.
        """
        total = torch.zeros((), device=self.mesh.device)
        for part in self.parts[microbatch]:
            if part.program.count is None:
                return torch.ones((), device=self.mesh.device)
            total = total + part.program.count(part.state.common)
        return total

    def visits(self, kind: Kind, recomputed: bool = False, defer: bool = False) -> Sequence[Visit]:
        """Return the visits of a pass. recomputed: whether an R ran before a backward; defer: as in
        `backward`.
        """
        key = (kind, recomputed, defer)
        if key not in self._visits:
            self._visits[key] = visits_of(
                kind, self.units, () if recomputed else self.recompute, defer
            )
        return self._visits[key]

    def forward(self, microbatch: int, next_unit: int | None = None) -> list[Pass]:
        """Return the passes of a forward.

        next_unit: here and below, the first unit whose parameters the rank's next pass needs.
        """
        sharded = self.parameters.sharded_pass(self.visits(Kind.F), next_unit)
        parts = self.parts[microbatch]
        return [
            Pass(p.runner.engine, p.state, p.runner.engine.forward_runs, sharded_pass=sharded)
            for p in parts
        ]

    def recomputation(self, microbatch: int, next_unit: int | None = None) -> list[Pass]:
        """Return the passes of a recomputation, which the backward then omits."""
        for part in self.parts[microbatch]:
            part.state.recomputed = True
        sharded = self.parameters.sharded_pass(self.visits(Kind.R), next_unit)
        parts = self.parts[microbatch]
        return [
            Pass(p.runner.engine, p.state, p.runner.engine.recompute_runs, sharded_pass=sharded)
            for p in parts
        ]

    def backward(
        self,
        microbatch: int,
        loss_scale: Tensor | None,
        defer: bool,
        last: bool,
        next_unit: int | None = None,
    ) -> list[Pass]:
        """Return the passes of a backward.

        loss_scale: gradient of the step's loss with respect to this micro-batch's; None before the
                    last stage.
        defer:      leave the weight gradients to `finish_weights`.
        last:       no micro-batch follows in this step, so gradients become final as the segments
                    finish.
        """
        parts = self.parts[microbatch]
        callback_for = self._ready_callbacks(microbatch) if last and not defer else None
        recomputed = any(part.state.recomputed for part in parts)
        sharded = self.parameters.sharded_pass(
            self.visits(Kind.B, recomputed, defer), next_unit, last
        )
        if loss_scale is not None:
            for part in parts:
                part.state.add_grad(LOSS, loss_scale)
        return [
            Pass(
                p.runner.engine,
                p.state,
                p.runner.engine.backward_runs(p.state),
                defer,
                on_complete=callback_for and callback_for(p.runner),
                sharded_pass=sharded,
            )
            for p in parts
        ]

    def finish_weights(self, microbatch: int, last: bool) -> None:
        """Compute the weight gradients that a backward deferred; ``last`` as in `backward`."""
        callback_for = self._ready_callbacks(microbatch) if last else None
        for part in self.parts[microbatch]:
            sharded = self.parameters.sharded_pass(self.visits(Kind.W, True), last=last)
            part.runner.engine.finish_weights(
                part.state, callback_for and callback_for(part.runner), sharded
            )

    def completion(self, microbatch: int, runner: _Runner) -> Callable[[Segment], None] | None:
        """Return what is to be called after each segment's last weight gradient, of a micro-batch
        with one part; None where nothing is.
        """
        callback_for = self._ready_callbacks(microbatch)
        return callback_for and callback_for(runner)

    def _ready_callbacks(
        self, microbatch: int
    ) -> Callable[[_Runner], Callable[[Segment], None]] | None:
        """Return a factory of callbacks, one per part, to call after each segment's backward; None
        where gradients are reduced unit by unit.

        They report a parameter as ready when every part of the micro-batch has finished its last
        use.
        """
        if self.parameters.units is not None:
            return None
        parts = self.parts[microbatch]
        missing = Counter(
            name for p in parts for names in p.runner.last_uses.values() for name in names
        )

        def callback_for(runner: _Runner) -> Callable[[Segment], None]:
            def on_complete(segment: Segment) -> None:
                for name in runner.last_uses.get(segment, ()):
                    missing[name] -= 1
                    if not missing[name]:
                        self.parameters.ready(name)

            return on_complete

        return callback_for

    def end(self, microbatch: int) -> None:
        """Drop a micro-batch, all ops of which have run."""
        left = [name for part in self.parts.pop(microbatch) for name in part.state.leftovers()]
        assert not left, f"stage {self.index}, micro-batch {microbatch} leaves {left}"
