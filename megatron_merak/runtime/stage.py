"""One pipeline stage: its units as segments, its micro-batches in flight, its part of each step's gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.buffers import ParameterBuffer
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..segment import Common, Crossing, Segment, fuse
from ..tensor_parallel import default_generator, derive_seed
from .engine import Engine, State
from .grads import GradientReducer
from .weights import WeightGradients

LOSS = "loss"


class Stage:
    """Runs forwards and backwards of one stage's units.

    units: modules with ``segments()``, whose parameters are views of ``buffer``; names: parameter -> its name there.
    hidden: (shape, dtype) of the value that crosses stage borders. prelude: batch -> what segments share.
    replicated: parameters of which every tensor-parallel rank holds all. ties: parameters that other stages hold as
    well, with the group of the ranks that do.
    """

    def __init__(
        self,
        index: int,
        plan: Plan,
        units: list[nn.Module],
        buffer: ParameterBuffer,
        names: Mapping[nn.Parameter, str],
        prelude: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
        mesh: Mesh,
        hidden: tuple[tuple[int, ...], torch.dtype],
        seed: int,
        overlap: bool = True,
        replicated: Collection[str] = (),
        ties: Sequence[tuple[str, dist.ProcessGroup]] = (),
    ):
        self.index, self.units, self.names, self.mesh, self.seed = index, nn.ModuleList(units), names, mesh, seed
        self.prelude, self.generator = prelude, default_generator(mesh.device)
        self.source = Crossing(units[0].source, *hidden) if index > 0 else None
        self.target = Crossing(units[-1].target, *hidden) if index < len(plan.stages) - 1 else None
        segments = [s for unit in units for s in (unit.segments() if mesh.tp is not None else [fuse(unit.segments())])]
        self.weights = WeightGradients({p: buffer.grad(name) for p, name in names.items()})
        for module in self.units.modules():
            if hasattr(module, "sink"):
                module.sink = self.weights
        outputs = (LOSS,) if self.target is None else (self.target.name,)
        self.engine = Engine(segments, plan.stages[index].recompute, outputs, mesh.tp, self.weights, mesh.device)
        self.reducer = GradientReducer(buffer, mesh.dp, overlap)
        first_use = {p: s for s in reversed(segments) for p in s.parameters}
        self._final: dict[Segment, list[str]] = {}
        for parameter, segment in first_use.items():
            self._final.setdefault(segment, []).append(names[parameter])
        self.states: dict[int, State] = {}
        partial = {p for s in segments if s.sharded for p in s.parameters if names[p] in replicated}
        self._partial = [name for p, name in names.items() if p in partial] if mesh.tp is not None else []
        self._ties, self._buffer = ties, buffer

    def start_step(self) -> None:
        self._buffer.zero_grad()
        self.reducer.start()

    def finish_step(self) -> None:
        """Make the gradients final: sum them over replicas, and where a parameter's gradient is in parts, over its
        holders.
        """
        self.reducer.finish()
        for name in self._partial:
            dist.all_reduce(self._buffer.grad(name), group=self.mesh.tp)
        for name, group in self._ties:
            dist.all_reduce(self._buffer.grad(name), group=group)

    def start_run(self, training: bool) -> None:
        """Before the first op of a schedule; what an earlier run left behind when it failed is forgotten."""
        self.units.train(training)
        self.states.clear()

    def begin(self, microbatch: int, batch: Mapping[str, Tensor], step: int, training: bool) -> State:
        """Admit a micro-batch; ``batch`` is this stage's own copy, never sent."""
        place = microbatch * self.mesh.grid.dp + self.mesh.dp_rank

        def seed(segment: Segment) -> None:
            shard = self.mesh.tp_rank if segment.sharded else 0
            self.generator.manual_seed(derive_seed(self.seed, step, place, segment.unit, segment.index, shard))

        state = self.states[microbatch] = State(Common(self.prelude(batch), seed if training else None), training)
        return state

    def forward(self, microbatch: int) -> None:
        self.engine.forward(self.states[microbatch])

    def backward(self, microbatch: int, loss_scale: Tensor | None, last: bool) -> None:
        """``loss_scale``: gradient of the step's loss with respect to this micro-batch's, on the last stage only.

        ``last``: no micro-batch follows in this step, so gradients become final as the segments finish.
        """
        state = self.states[microbatch]
        if self.target is None:
            state.add_grad(LOSS, loss_scale)
        self.engine.backward(state, self._report if last else None)

    def _report(self, segment: Segment) -> None:
        for name in self._final.get(segment, ()):
            self.reducer.ready(name)

    def end(self, microbatch: int) -> None:
        """Release a micro-batch."""
        left = self.states.pop(microbatch).leftovers()
        assert not left, f"stage {self.index}, micro-batch {microbatch} leaves {left}"
