"""One pipeline stage: the programs it runs and its micro-batches in flight."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ..parallel.mesh import Mesh
from ..segment import Common, Segment
from ..tensor_parallel import default_generator, derive_seed
from .engine import Engine, State
from .parameters import StageParameters
from .program import LOSS, Program

Batch = Mapping[str, Tensor]


class _Run:
    """A program and the engine that runs it."""

    def __init__(self, program: Program, recompute: Collection[int], held: StageParameters, mesh: Mesh):
        self.program = program
        self.engine = Engine(program.segments, recompute, program.outputs, mesh.tp, held.weights, mesh.device)
        self.final = held.used_by(program.segments)


class Stage:
    """Runs forwards and backwards of one stage's units.

    program_for: (batch, training) -> the program for a micro-batch of that shape; asked again, it returns the same
    object. recompute: units that keep no tape. mode: called with ``training`` before a schedule runs.
    """

    def __init__(
        self,
        index: int,
        program_for: Callable[[Batch, bool], Program],
        held: StageParameters,
        recompute: Collection[int],
        mesh: Mesh,
        seed: int,
        mode: Callable[[bool], object] | None = None,
    ):
        self.index, self.program_for, self.held, self.recompute = index, program_for, held, recompute
        self.mesh, self.seed, self.mode = mesh, seed, mode
        self.generator = default_generator(mesh.device)
        self.states: dict[int, State] = {}
        self._runs: dict[Program, _Run] = {}
        self._of: dict[int, _Run] = {}

    def start_run(self, training: bool) -> None:
        """Before the first op of a schedule; what an earlier run left behind when it failed is forgotten."""
        if self.mode is not None:
            self.mode(training)
        self.states.clear()
        self._of.clear()

    def begin(self, microbatch: int, batch: Batch, step: int, training: bool) -> State:
        """Admit a micro-batch; ``batch`` is this stage's own copy, never sent."""
        program = self.program_for(batch, training)
        if program not in self._runs:
            self._runs[program] = _Run(program, self.recompute, self.held, self.mesh)
        self._of[microbatch] = self._runs[program]
        place = microbatch * self.mesh.grid.dp + self.mesh.dp_rank

        def seed(segment: Segment) -> None:
            shard = self.mesh.tp_rank if segment.sharded else 0
            self.generator.manual_seed(derive_seed(self.seed, step, place, segment.unit, segment.index, shard))

        state = self.states[microbatch] = State(Common(program.prelude(batch), seed if training else None), training)
        return state

    def program(self, microbatch: int) -> Program:
        """The program of a micro-batch in flight."""
        return self._of[microbatch].program

    def forward(self, microbatch: int) -> None:
        self._of[microbatch].engine.forward(self.states[microbatch])

    def result(self, microbatch: int, name: str) -> Tensor:
        """Take a value that leaves this stage; what a recomputation still needs stays."""
        return self._of[microbatch].engine.take(self.states[microbatch], name)

    def count(self, microbatch: int) -> Tensor:
        """fp32 scalar: the tokens that a micro-batch's loss is a sum over, 1 where it is complete."""
        count = self.program(microbatch).count
        if count is None:
            return torch.ones((), device=self.mesh.device)
        return count(self.states[microbatch].common)

    def backward(self, microbatch: int, loss_scale: Tensor | None, last: bool) -> None:
        """``loss_scale``: gradient of the step's loss with respect to this micro-batch's, on the last stage only.

        ``last``: no micro-batch follows in this step, so gradients become final as the segments finish.
        """
        state, run = self.states[microbatch], self._of[microbatch]
        if loss_scale is not None:
            state.add_grad(LOSS, loss_scale)

        def report(segment: Segment) -> None:
            for name in run.final.get(segment, ()):
                self.held.reducer.ready(name)

        run.engine.backward(state, report if last else None)

    def end(self, microbatch: int) -> None:
        """Release a micro-batch."""
        left = self.states.pop(microbatch).leftovers()
        del self._of[microbatch]
        assert not left, f"stage {self.index}, micro-batch {microbatch} leaves {left}"
