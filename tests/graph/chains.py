"""Chains of units, checked and run stage by stage."""

from functools import cache
from itertools import pairwise

import torch
from torch import nn
from torch.fx import map_arg

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.ir.aliases import aliased, mutation_deps, storages
from megatron_merak.graph.partition.loads import unit_loads
from megatron_merak.planner.partition import partition
from tests.graph.tiny import tiny

FAMILIES = "llama gpt2 bloom gemma2 t5 bert vit whisper mixtral bart gpt_oss clip phi3".split()


# its own gelu takes its gradient by another formula: rounding must not matter
DTYPES = {"bloom": torch.float64}


@cache
def captured_family(name, training=True, **sizes):
    _, empty, batch = tiny(name, **sizes)
    return capture(empty(), batch, training=training, dtype=DTYPES.get(name))


def run_stages(captured, chain, bounds, parameters, batch):
    """The outputs, computed stage by stage: each sees the values that cross into it and what the
    batch gives.
    """
    graph, kinds, after = captured.module.graph, chain.kinds, mutation_deps(captured.module.graph)
    values = {}
    for first, last in pairwise(bounds):
        mine = {node for unit in chain.units[first:last] for node in unit}
        needed, waiting = set(mine), list(mine)
        while waiting:
            for above in [*(node := waiting.pop()).all_input_nodes, *after.get(node, ())]:
                if above not in needed and kinds[above] not in ("main", "side"):
                    needed.add(above)
                    waiting.append(above)
        values = {node: values[node] for node in (chain.crossing[first - 1] if first else ())}
        for node in graph.nodes:
            if node in needed:
                values[node] = evaluate(node, captured, parameters, batch, values)
    return map_arg(graph.output_node().args[0], values.__getitem__)


def evaluate(node, captured, parameters, batch, values):
    if node.op == "placeholder":
        return batch[node.target]
    if node.op == "get_attr":
        return (
            parameters[node.target]
            if node.target in captured.shapes
            else attribute(captured.module, node.target)
        )
    return node.target(
        *map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__)
    )


def attribute(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


def stages(chain, count):
    return partition(
        [3 * load.flops + 1 for load in unit_loads(chain)], min(count, len(chain.units))
    )


def check_chain(captured, chain):
    """What is promised of every chain."""
    graph, kinds = captured.module.graph, chain.kinds
    line = [node for node in graph.nodes if kinds[node] in ("main", "side")]
    assert [node for unit in chain.units for node in unit] == line and all(chain.units)
    assert len(set(chain.names)) == len(chain.names) == len(chain.units) == len(chain.parameters)
    where = {node: k for k, unit in enumerate(chain.units) for node in unit}
    outputs = graph.output_node().all_input_nodes
    for k, crossing in enumerate(chain.crossing):
        read_later = {
            node
            for node in line
            if where[node] <= k and any(where.get(user, len(where)) > k for user in node.users)
        }
        assert list(crossing) == [node for node in line if node in read_later]
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in crossing)
    assert all(
        node in chain.units[-1] or node in chain.crossing[-1] for node in outputs if node in where
    )
    root = storages(graph)
    for writer in line:
        for node in line if aliased(writer)[1] else ():
            if root[node] is root[writer] and line.index(node) < line.index(writer):
                assert where[node] == where[writer]


def crossings(chain):
    """How many main values each cut sends."""
    return [sum(chain.kinds[node] == "main" for node in crossing) for crossing in chain.crossing]


def imbalance(chain, count):
    """The costliest of ``count`` stages over their mean."""
    flops, bounds = [3 * load.flops + 1 for load in unit_loads(chain)], stages(chain, count)
    return max(sum(flops[a:b]) for a, b in pairwise(bounds)) * count / sum(flops)


class Loss(nn.Module):
    """``body`` and a mean squared error."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x, y):
        return ((self.body(x) - y) ** 2).mean()
