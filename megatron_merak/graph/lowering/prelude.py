"""Computes the common values of a stage, which its segments share and which take no gradient, from
the batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..ir.aliases import storages, writers
from .emit import Emitter
from .flow import Flow


class Prelude:
    """Maps a batch to the values of the ``wanted`` nodes, by node name, on ``device``.

    constants: the graph's constants that are needed.
    first:     function of ``constants`` for values that depend on them alone (rotary tables, causal
               masks). It runs once, at the first batch.
    then:      function of the results of ``first`` and the batch for the other values. It runs for
               every batch.
    reads:     keys of the batch that are needed.
    fixed:     names of the values whose memory is the same for every batch, as that of constants:
               segments may write to it.
    """

    def __init__(self, flow: Flow, outputs: Sequence[Node], device: torch.device):
        self.device = device
        self.names = tuple(node.name for node in outputs)
        needed = _upstream(flow, outputs)
        nodes = [node for node in flow.order if node in needed]
        varies = _varies(flow, nodes)
        constants = [n for n in nodes if n.op == "get_attr" and not flow.is_module(n)]
        inputs = [n for n in nodes if n.op == "placeholder"]
        first = [n for n in nodes if n.op == "call_function" and not varies[n]]
        then = [n for n in nodes if n.op == "call_function" and varies[n]]
        late = dict.fromkeys((*outputs, *(x for n in then for x in n.all_input_nodes)))
        intermediate = [n for n in (*constants, *first) if n in late]
        self.constants = tuple(flow.constants[str(n.target)] for n in constants)
        self.first = _code(flow, constants, first, intermediate, device)
        self.then = _code(flow, (*intermediate, *inputs), then, outputs, device)
        self.reads = tuple(str(n.target) for n in inputs)
        root = storages(flow.graph)
        stays = {*constants, *first}
        self.fixed = tuple(node.name for node in outputs if root[node] in stays)
        self._fixed: tuple[Tensor, ...] | None = None

    def with_code(self, first: Callable, then: Callable) -> "Prelude":
        """Return a prelude of the same constants and batch entries that runs other code."""
        other = copy.copy(self)
        other.first = first
        other.then = then
        other._fixed = None
        return other

    def state(self) -> tuple[Tensor, ...] | None:
        """Return a copy of the values computed once, which a model may write to; None before the
        first batch.
        """
        return None if self._fixed is None else tuple(value.clone() for value in self._fixed)

    @torch.no_grad()
    def restore(self, state: tuple[Tensor, ...] | None) -> None:
        """Undo what was written since ``state`` was taken."""
        if state is None:
            self._fixed = None
        else:
            assert self._fixed is not None
            for value, saved in zip(self._fixed, state, strict=True):
                # tables may be expanded views, which cannot be written to
                if not torch.equal(value, saved):
                    value.copy_(saved)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._fixed is None:
            self._fixed = self.first(*(constant.to(self.device) for constant in self.constants))
        entries = (batch[name].to(self.device, non_blocking=True) for name in self.reads)
        return dict(zip(self.names, self.then(*self._fixed, *entries), strict=True))


def _upstream(flow: Flow, targets: Sequence[Node]) -> dict[Node, None]:
    """Return all nodes that ``targets`` depend on, including those that write in place to what they
    depend on.
    """
    of_storage = writers(flow.graph)
    needed: dict[Node, None] = {}
    pending = list(targets)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed[node] = None
            pending += [*node.all_input_nodes, *flow.after.get(node, ()), *of_storage.get(node, ())]
    return needed


def _varies(flow: Flow, nodes: Sequence[Node]) -> dict[Node, bool]:
    """Return, for each node, whether it must be computed for every batch; memory written in place
    always is.
    """
    root = storages(flow.graph)
    written = writers(flow.graph)
    varies: dict[Node, bool] = {}
    for node in nodes:
        varies[node] = (
            node.op == "placeholder"
            or root[node] in written
            or any(map(varies.get, node.all_input_nodes))
        )
    return varies


def _code(
    flow: Flow,
    leaves: Sequence[Node],
    nodes: Sequence[Node],
    results: Sequence[Node],
    device: torch.device,
) -> Callable[..., tuple[Tensor, ...]]:
    emitter = Emitter(flow, device)
    emitter.arguments([(leaf.name, (leaf,)) for leaf in leaves])
    for node in nodes:
        emitter.add(node)
    return emitter.finish(results)
