"""Rewritten graphs drawn by hand."""

import torch
from torch.fx import Graph

from megatron_merak.graph.ir.kinds import NodeKind
from megatron_merak.graph.ir.marks import all_gather, copy_in, exchange_rows, reduce_sum, stack
from megatron_merak.graph.lowering.rewrite import Rewritten
from megatron_merak.segment import LayerAxis


class Sketch:
    """A rewritten graph drawn by hand: values [2, 4] unless said, one parameter or batch entry per
    name.
    """

    def __init__(self):
        self.graph, self.parameters, self.constants = Graph(), [], {}

    def weight(self, name, *shape):
        return self._leaf(
            self.graph.get_attr(name), torch.ones(*shape or (4,)), self.parameters.append(name)
        )

    def constant(self, name, value):
        self.constants[name] = value
        return self._leaf(self.graph.get_attr(name), value)

    def input(self, name, dtype=torch.float32):
        return self._leaf(self.graph.placeholder(name), torch.ones(2, 4).to(dtype))

    def _leaf(self, node, value, _=None):
        node.meta.update(val=value, unit=None)
        return node

    def call(self, target, *args, unit=None, sharded=False, name=None):
        node = self.graph.create_node("call_function", target, args, name=name)
        values = torch.fx.node.map_arg(args, lambda x: x.meta["val"])
        meanings = {
            copy_in: torch.clone,
            reduce_sum: torch.clone,
            all_gather: torch.clone,
            exchange_rows: lambda x, counts: torch.clone(x),
            stack: lambda x: torch.stack([x, x]),
        }
        node.meta.update(val=meanings.get(target, target)(*values), unit=unit)
        node.meta[LayerAxis.TP] = NodeKind.SHARDS if sharded else NodeKind.FULL
        return node

    def done(self, *outputs, names=("loss",)):
        self.graph.output(tuple(outputs))
        return Rewritten(self.graph, self.constants, names, (), frozenset(self.parameters))
