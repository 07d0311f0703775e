"""A rewritten graph run through the real engine, in one range of units or in several that are
chained by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.lowering.rewrite import Rewritten, rewrite
from megatron_merak.graph.lowering.split import split
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.runtime.engine import Interpreter, State
from megatron_merak.runtime.weights import Gradient, WeightGradients
from megatron_merak.segment import Common, LayerAxis
from megatron_merak.tensor_parallel import derive_seed
from tests.graph.lockstep import part
from tests.graph.tiny import randomise, tiny

CPU = torch.device("cpu")


class Family:
    """A tiny model with random weights, its capture, and one rank's program."""

    def __init__(
        self,
        name: str,
        rank: int = 0,
        tp: int = 1,
        training: bool = True,
        dtype=torch.float32,
        **overrides,
    ):
        real, empty, self.batch = tiny(name, **overrides)
        self.model: nn.Module = randomise(real()).to(dtype)
        self.batch = {k: v.to(dtype) if _floating(v) else v for k, v in self.batch.items()}
        self.model.train(training)
        self.captured: Captured = capture(empty(), self.batch, training=training, dtype=dtype)
        chain = cut(self.captured)
        self.units, self.rank, self.tp = len(chain.units), rank, tp
        self.cp_rank = self.expert_rank = 0
        self.sharding = shard(self.captured, tp)
        self.rewritten: Rewritten = rewrite(self.captured, chain, self.sharding, rank, tp)

    def ranges(self, count: int) -> list[range]:
        borders = [round(i * self.units / count) for i in range(count + 1)]
        return [range(a, b) for a, b in zip(borders, borders[1:], strict=False)]


class Sum(Gradient):
    """Takes rows in the type of the sum, so that fp64 stays fp64."""

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        self.total.index_add_(0, index, rows.to(self.total.dtype))


def sink_of(dtypes: Mapping[Tensor, torch.dtype]) -> WeightGradients:
    """Gradients of parameters, zero, each in its dtype."""
    return WeightGradients(
        {p: Sum(torch.zeros(p.shape, dtype=dtype)) for p, dtype in dtypes.items()}
    )


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Stages:
    """Ranges of one rank's units, each behind an engine of its own. No value is shared between them
    but by name.
    """

    def __init__(
        self,
        family: Family,
        count: int = 1,
        recompute: bool = False,
        group: dist.ProcessGroup | None = None,
        contexts: dist.ProcessGroup | None = None,
        experts: dist.ProcessGroup | None = None,
        levels: Sequence[dist.ProcessGroup | None] = (None, None),
    ):
        real = dict(family.model.named_parameters(remove_duplicate=False))
        self.parameters = {}
        for name, t in family.sharding.tensors.items():
            rank = family.expert_rank if t.experts else family.rank
            values = part(real[name].detach(), t, rank, family.sharding.ranks_of(t))
            self.parameters[name] = nn.Parameter(values, real[name].requires_grad)
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self.sink = sink_of({p: torch.promote_types(p.dtype, torch.float32) for p in trained})
        self.family = family
        self.group = group
        self.contexts = contexts
        self.parts = [split(family.rewritten, units) for units in family.ranges(count)]
        self.engines = []
        for parts, units in zip(self.parts, family.ranges(count), strict=True):
            outputs = [value.name for value in parts.targets] + list(parts.results)
            segments = parts.segments(self.parameters, self.sink)
            again = [(unit,) for unit in units] if recompute else ()
            self.engines.append(
                Interpreter(
                    segments,
                    again,
                    outputs,
                    group,
                    weights=self.sink,
                    device=CPU,
                    groups={
                        LayerAxis.CP: contexts,
                        LayerAxis.INNER: levels[0],
                        LayerAxis.OUTER: levels[1],
                        LayerAxis.EP: experts,
                    },
                )
            )

    def seed(self, segment) -> None:
        family = self.family
        shard = segment.random_shard(family.rank, family.cp_rank, family.tp)
        torch.default_generator.manual_seed(derive_seed(5, segment.unit, segment.index, shard))

    def forward(
        self, batch: Mapping[str, Any], training: bool = True
    ) -> tuple[list[State], dict[str, Tensor]]:
        """The states, and the results of the last range."""
        states, values = [], {}
        for parts, engine in zip(self.parts, self.engines, strict=True):
            state = State(Common(parts.prelude(batch), self.seed), training)
            for value in parts.sources:
                assert (values[value.name].shape, values[value.name].dtype) == (
                    value.shape,
                    value.dtype,
                ), value
                state.values[value.name] = values[value.name].clone()
            engine.forward(state)
            names = [*(value.name for value in parts.targets), *parts.results]
            values = {name: engine.take(state, name) for name in names}
            states.append(state)
        return states, values

    def step(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, gradients by name), those in ``partial`` summed over the ranks."""
        states, values = self.forward(batch)
        grads: dict[str, Tensor | None] = {"loss": torch.ones_like(values["loss"])}
        for parts, engine, state in reversed(
            list(zip(self.parts, self.engines, states, strict=True))
        ):
            for name, grad in grads.items():
                if grad is not None:
                    state.add_grad(name, grad)
            engine.backward(state)
            grads = {
                value.name: state.take_grad(value.name) for value in parts.sources if value.grad
            }
            assert state.leftovers() == [] and state.values == {}
        found = {
            name: self.sink.grads[p].total.clone()
            for name, p in self.parameters.items()
            if p in self.sink.grads
        }
        for name in self.family.rewritten.partial if self.group is not None else ():
            dist.all_reduce(found[name], group=self.group)
        for name, grad in found.items() if self.contexts is not None else ():
            if not self.family.sharding.tensors[name].experts:  # all contexts divide these
                dist.all_reduce(grad, group=self.contexts)
        return values["loss"], found


def graph_gradients(family: Family) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients) of the captured graph as one autograd graph."""
    from tests.graph.tiny import run

    family.model.zero_grad(set_to_none=True)
    (loss, *_) = run(family.captured, dict(family.model.named_parameters()), family.batch)
    loss.backward()
    grads = {
        name: p.grad.clone() for name, p in family.model.named_parameters() if p.grad is not None
    }
    family.model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def unequal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Gradients that differ in any bit, with the largest difference relative to the largest entry.

    A parameter without gradient must have received zero.
    """
    differ = {}
    for name, grad in found.items():
        if name not in wanted:
            assert not grad.any(), f"{name} has no gradient"
        elif not torch.equal(grad, wanted[name]):
            scale = max(float(wanted[name].abs().max()), 1e-7)
            differ[name] = float((grad - wanted[name]).abs().max()) / scale
    assert set(wanted) <= set(found), "gradients are missing"
    return differ


def worst(differ: Mapping[str, float], allowed: Sequence[str] = ()) -> float:
    """The largest difference of those not in ``allowed``."""
    return max((error for name, error in differ.items() if name not in allowed), default=0.0)
