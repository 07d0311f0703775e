"""One pipeline stage: the programs it runs and its micro-batches in flight."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Kind
from ..segment import Common, Segment
from ..tensor_parallel import default_generator, derive_seed
from .engine import Engine, Pass, State
from .parameters import RankParameters
from .program import LOSS, Program
from .units import Visit, visits_of

Batch = Mapping[str, Tensor]
Split = Callable[[Batch], Sequence[Batch]]


class _Runner:
    """A program and the engine that runs it."""

    def __init__(
        self, program: Program, recompute: Collection[Sequence[int]], held: RankParameters, mesh: Mesh, overlap: bool
    ):
        self.program = program
        given = (program.segments, recompute, program.outputs, mesh.tp, held.weights, mesh.device)
        self.engine = Engine(*given, overlap, held.arrive)
        self.held, self.final = held, held.used_by(program.segments)
        self.trains = False

    def train(self) -> None:
        """Before the program's first backward; what only evaluates says nothing of gradients."""
        if not self.trains:
            self.held.trained_by(self.program.segments)
            self.trains = True


@dataclass(frozen=True)
class Part:
    """A micro-batch in flight, or one of the halves it was split into."""

    runner: _Runner
    state: State

    @property
    def program(self) -> Program:
        return self.runner.program

    def take(self, name: str) -> Tensor:
        """A value that leaves the stage; what a recomputation still needs stays."""
        if name in self.state.common:
            return self.state.common[name]
        return self.runner.engine.take(self.state, name)


class Stage:
    """Runs forwards, recomputations, backwards and weight gradients of one stage's units.

    program_for: (batch, training) -> the program for a micro-batch of that shape; asked again, it returns the same
    object. recompute: runs of units that keep no tape. mode: called with ``training`` before a schedule runs.
    split: a micro-batch of training -> the parts that take turns in the segments. overlap: collectives run behind
    other work. units: of the model's chain, in forward order.
    """

    def __init__(
        self,
        index: int,
        program_for: Callable[[Batch, bool], Program],
        held: RankParameters,
        recompute: Collection[Sequence[int]],
        mesh: Mesh,
        seed: int,
        mode: Callable[[bool], object] | None = None,
        split: Split | None = None,
        overlap: bool = True,
        units: Sequence[int] = (),
    ):
        self.index, self.program_for, self.held, self.recompute = index, program_for, held, recompute
        self.units = units
        self.mesh, self.seed, self.mode, self.split, self.overlap = mesh, seed, mode, split, overlap
        self.generator = default_generator(mesh.device)
        self.parts: dict[int, list[Part]] = {}
        self._runners: dict[Program, _Runner] = {}
        self._visits: dict[tuple[Kind, bool, bool], Sequence[Visit]] = {}

    def start_run(self, training: bool) -> None:
        """Before the first op of a schedule; what an earlier run left behind when it failed is forgotten."""
        if self.mode is not None:
            self.mode(training)
        self.parts.clear()

    def begin(self, microbatch: int, batch: Batch, step: int, training: bool) -> list[Part]:
        """Admit a micro-batch; ``batch`` is this stage's own copy, never sent."""
        batches = [batch] if self.split is None or not training else self.split(batch)
        place = (step, microbatch * self.mesh.replicas + self.mesh.replica)
        halves = range(len(batches)) if len(batches) > 1 else (None,)
        self.parts[microbatch] = [
            self._admit(part, (*place, half), training) for part, half in zip(batches, halves, strict=True)
        ]
        return self.parts[microbatch]

    def _admit(self, batch: Batch, place: tuple[int, int, int | None], training: bool) -> Part:
        program = self.program_for(batch, training)
        if program not in self._runners:
            self._runners[program] = _Runner(program, self.recompute, self.held, self.mesh, self.overlap)
        if training:
            self._runners[program].train()
        step, microbatch, half = place

        def seed(segment: Segment) -> None:
            shard = self.mesh.tp_rank if segment.sharded else 0
            where = (step, microbatch, segment.unit, segment.index, shard)
            self.generator.manual_seed(derive_seed(self.seed, *where, *(() if half is None else (half,))))

        common = Common(program.prelude(batch), seed if training else None)
        return Part(self._runners[program], State(common, training))

    def program(self, microbatch: int) -> Program:
        """The program of a micro-batch in flight, or of its first half."""
        return self.parts[microbatch][0].program

    def count(self, microbatch: int) -> Tensor:
        """fp32 scalar: the tokens that a micro-batch's loss is a sum over, 1 where it is complete."""
        if self.program(microbatch).count is None:
            return torch.ones((), device=self.mesh.device)
        return sum(part.program.count(part.state.common) for part in self.parts[microbatch])

    def visits(self, kind: Kind, recomputed: bool = False, hold: bool = False) -> Sequence[Visit]:
        """What a pass visits. recomputed: before a backward; hold: as in `backward`."""
        key = (kind, recomputed, hold)
        if key not in self._visits:
            self._visits[key] = visits_of(kind, self.units, () if recomputed else self.recompute, hold)
        return self._visits[key]

    def forward(self, microbatch: int, then: int | None = None) -> list[Pass]:
        """``then``, here and below: the unit at which the rank's next pass will need parameters first."""
        tour = self.held.tour(self.visits(Kind.F), then)
        return [Pass(p.runner.engine, p.state, p.runner.engine.forward_runs, tour=tour) for p in self.parts[microbatch]]

    def again(self, microbatch: int, then: int | None = None) -> list[Pass]:
        """The recomputation that a backward would do otherwise."""
        for part in self.parts[microbatch]:
            part.state.recomputed = True
        tour, parts = self.held.tour(self.visits(Kind.R), then), self.parts[microbatch]
        return [Pass(p.runner.engine, p.state, p.runner.engine.recompute_runs, tour=tour) for p in parts]

    def backward(
        self, microbatch: int, loss_scale: Tensor | None, hold: bool, last: bool, then: int | None = None
    ) -> list[Pass]:
        """``loss_scale``: gradient of the step's loss with respect to this micro-batch's, on the last stage only.

        ``hold``: weight gradients wait for `finish_weights`. ``last``: no micro-batch follows in this step, so
        gradients become final as the segments finish.
        """
        parts, by_unit = self.parts[microbatch], self.held.units is not None
        report = self._reports(microbatch) if last and not hold and not by_unit else None
        recomputed = any(part.state.recomputed for part in parts)
        tour = self.held.tour(self.visits(Kind.B, recomputed, hold), then, last)
        for part in parts if loss_scale is not None else ():
            part.state.add_grad(LOSS, loss_scale)
        return [
            Pass(
                p.runner.engine,
                p.state,
                p.runner.engine.backward_runs(p.state),
                hold,
                report and report(p.runner),
                tour,
            )
            for p in parts
        ]

    def finish_weights(self, microbatch: int, last: bool) -> None:
        """The weight gradients that a backward left; ``last`` as in `backward`."""
        report = self._reports(microbatch) if last and self.held.units is None else None
        for part in self.parts[microbatch]:
            tour = self.held.tour(self.visits(Kind.W, True), last=last)
            part.runner.engine.finish_weights(part.state, report and report(part.runner), tour)

    def _reports(self, microbatch: int) -> Callable[[_Runner], Callable[[Segment], None]]:
        """What tells that gradients are final, when every part of the micro-batch is through with a segment."""
        missing = Counter(name for p in self.parts[microbatch] for names in p.runner.final.values() for name in names)

        def of(runner: _Runner) -> Callable[[Segment], None]:
            def report(segment: Segment) -> None:
                for name in runner.final.get(segment, ()):
                    missing[name] -= 1
                    if not missing[name]:
                        self.held.ready(name)

            return report

        return of

    def end(self, microbatch: int) -> None:
        """Release a micro-batch."""
        left = [name for part in self.parts.pop(microbatch) for name in part.state.leftovers()]
        assert not left, f"stage {self.index}, micro-batch {microbatch} leaves {left}"
