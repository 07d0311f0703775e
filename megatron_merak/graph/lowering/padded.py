"""Padding of the vocabulary where one tensor-parallel rank has all of it.

Products are fast where the number of rows is a multiple of 128, say. Padded rows stand behind the
others: nothing looks them up, and what a product gives for them is left out, so that their
gradient is zero.
"""

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from ...plan import TensorSharding
from ..ir.kinds import kinds_like
from ..ir.nodes import is_op

aten = torch.ops.aten


def pad_vocabularies(
    graph: Graph, tensors: Mapping[str, TensorSharding], mode: FakeTensorMode
) -> None:
    """Let a graph read the padded tensors of one rank."""
    for node in graph.find_nodes(op="get_attr"):
        tensor = tensors.get(str(node.target))
        if tensor is not None and tensor.padded:
            _pad(graph, node, tensor.padded, mode)


def _pad(graph: Graph, table: Node, padded: int, mode: FakeTensorMode) -> None:
    value = table.meta["val"]
    rows = value.shape[0]
    for user in list(table.users):
        if is_op(user, "embedding") and user.args[0] is table:
            continue
        if is_op(user, "linear") and user.args[1:] == (table,):
            made = user.meta["val"]
            with mode:
                user.meta["val"] = made.new_empty(*made.shape[:-1], padded)
            with graph.inserting_after(user):
                cut = graph.call_function(aten.slice.Tensor, (user, made.dim() - 1, 0, rows))
            cut.meta = {**user.meta, "val": made}
            for reader in [reader for reader in user.users if reader is not cut]:
                reader.replace_input_with(user, cut)
        else:
            with graph.inserting_before(user):
                own = graph.call_function(aten.slice.Tensor, (table, 0, 0, rows))
            own.meta = {**kinds_like(user), "val": value, "grad": table.meta["grad"]}
            own.meta["unit"] = user.meta["unit"]
            user.replace_input_with(table, own)
    with mode:
        table.meta["val"] = value.new_empty(padded, *value.shape[1:])
