"""The common values of a stage: what its segments share and take no gradient for, computed from the batch."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..ir.aliases import storages, writers
from .emit import Emitter
from .flow import Flow


class Prelude:
    """Batch -> the values of ``wanted`` nodes by name, with what they are computed from, on ``device``.

    What depends on constants alone (rotary tables, causal masks) is computed once, at the first batch, by ``first`` of
    ``constants``, the rest for every batch by ``then``. reads: the keys of the batch that are needed.
    """

    def __init__(self, flow: Flow, wanted: Sequence[Node], device: torch.device):
        self.device, self.names = device, tuple(node.name for node in wanted)
        needed = _upstream(flow, wanted)
        nodes = [node for node in flow.order if node in needed]
        varies = _varies(flow, nodes)
        constants = [n for n in nodes if n.op == "get_attr" and not flow.is_module(n)]
        inputs = [n for n in nodes if n.op == "placeholder"]
        first = [n for n in nodes if n.op == "call_function" and not varies[n]]
        then = [n for n in nodes if n.op == "call_function" and varies[n]]
        late = dict.fromkeys((*wanted, *(x for n in then for x in n.all_input_nodes)))
        handed = [n for n in (*constants, *first) if n in late]
        self.constants = tuple(flow.constants[str(n.target)] for n in constants)
        self.first = _code(flow, constants, first, handed, device)
        self.then = _code(flow, (*handed, *inputs), then, wanted, device)
        self.reads = tuple(str(n.target) for n in inputs)
        self._fixed: tuple[Tensor, ...] | None = None

    def with_code(self, first: Callable, then: Callable) -> "Prelude":
        """The same values, of what other code computes of the same constants and entries."""
        other = copy.copy(self)
        other.first, other.then, other._fixed = first, then, None
        return other

    def state(self) -> tuple[Tensor, ...] | None:
        """A copy of the constants on the device, which a model may write to; None before the first batch."""
        return None if self._fixed is None else tuple(value.clone() for value in self._fixed)

    @torch.no_grad()
    def restore(self, state: tuple[Tensor, ...] | None) -> None:
        """Undo what was written since ``state`` was taken."""
        if state is None:
            self._fixed = None
        else:
            for value, saved in zip(self._fixed, state, strict=True):
                if not torch.equal(value, saved):  # tables may be expanded views, which nobody writes to
                    value.copy_(saved)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._fixed is None:
            self._fixed = self.first(*(constant.to(self.device) for constant in self.constants))
        taken = (batch[name].to(self.device, non_blocking=True) for name in self.reads)
        return dict(zip(self.names, self.then(*self._fixed, *taken), strict=True))


def _upstream(flow: Flow, wanted: Sequence[Node]) -> dict[Node, None]:
    """What ``wanted`` is computed from, and whatever writes in place to that."""
    of_storage = writers(flow.graph)
    found: dict[Node, None] = {}
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [*node.all_input_nodes, *flow.after.get(node, ()), *of_storage.get(node, ())]
    return found


def _varies(flow: Flow, nodes: Sequence[Node]) -> dict[Node, bool]:
    """Whether a node is computed for every batch; so is what is written in place."""
    root, written = storages(flow.graph), writers(flow.graph)
    varies: dict[Node, bool] = {}
    for node in nodes:
        varies[node] = node.op == "placeholder" or root[node] in written or any(map(varies.get, node.all_input_nodes))
    return varies


def _code(
    flow: Flow, leaves: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node], device: torch.device
) -> Callable[..., tuple[Tensor, ...]]:
    emitter = Emitter(flow, device)
    emitter.arguments([(leaf.name, (leaf,)) for leaf in leaves])
    for node in nodes:
        emitter.add(node)
    return emitter.finish(results)
