"""Measure each unit for the planner: what one tensor-parallel rank stores, computes, saves for the backward and sends.

The numbers come from the graph that the rank will run, rewritten and fused. To find what autograd saves for the
backward, a unit is run once on fake tensors. Units of equal structure are measured once.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..errors import PlanError
from ..plan import TensorSharding, Unit
from .capture.captured import Captured
from .fusion.fuse import fuse
from .fusion.linear import RECOMPUTED
from .ir.marks import copy_in, reduce_sum, stack
from .ir.nodes import called, is_op, nbytes, operand, values
from .ir.operators import facts, flops
from .kept_state import StateOf, kept_state
from .lowering.documents import known_documents
from .lowering.emit import call_with_sink
from .lowering.flow import REDUCTIONS, Flow
from .lowering.rewrite import rewrite
from .more_flops import more_flops, unneeded_flops
from .partition.cut import Chain
from .sharding.shard import Sharding

_MARKS = (copy_in, *REDUCTIONS)
_BACKWARD_OPERATIONS = 2.3  # operations that the backward starts for each one of the forward
_NOT_OPERATIONS = ("prim", "promote_types", "empty_strided")  # they are dispatched, but the host starts nothing


@dataclass(frozen=True)
class UnitCosts:
    """What a unit's operations cost; each field is the field of ``plan.Unit`` of the same name."""

    flops: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    reduces: tuple[int, int] = (0, 0)
    reduced_bytes: tuple[int, int] = (0, 0)
    operations: tuple[int, int] = (0, 0)
    weight_bytes: int = 0
    unread_bytes: int = 0
    attention_flops: int = 0
    more_flops: tuple[int, int] = (0, 0)
    products: tuple[tuple[int, int, int], ...] = ()
    unneeded_flops: tuple[int, int] = (0, 0)


def measure(
    captured: Captured,
    chain: Chain,
    sharding: Sharding,
    tp: int,
    fused_attention: bool = False,
    loss_chunk: int = 0,
    recompute_activations: bool = False,
    positions: Tensor | None = None,
    state_of: StateOf | None = None,
) -> tuple[Unit, ...]:
    """Return the units of a chain, with one tensor-parallel rank's numbers.

    fused_attention:       whether the device that will run them has fused attention, see ``cluster.Device``.
    loss_chunk:            see ``fuse``.
    recompute_activations: see ``fuse``.
    positions:             those of packed rows on a CPU, see ``known_documents``.
    state_of:              bytes that the optimizer stores for each value of a parameter; None: as the plan says.

    Raises PlanError if there is no activation to recompute.
    """
    rewritten = rewrite(captured, chain, sharding, 0, tp=tp)
    calls = [node for node in rewritten.graph.nodes if node.op == "call_function"]
    unfused = _by_unit(((node, node.meta.get("unit")) for node in calls), len(chain.units))
    products = [(sum(map(flops, nodes)), _product_sizes(nodes), unneeded_flops(nodes)) for nodes in unfused]
    counts = fuse(rewritten.graph, loss_chunk, recompute_activations)
    if recompute_activations and not counts[RECOMPUTED]:
        reason = "the model has no linear layer behind an activation that is known"
        raise PlanError(
            "--recompute-granularity", "selective (recompute_activations)", reason, "Leave it out, or use full"
        )
    documents = {} if positions is None else known_documents(rewritten.graph, rewritten.constants, positions)
    flow = Flow(rewritten, documents)
    measured: dict[Hashable, UnitCosts] = {}
    costs = []
    for (total, sizes, unneeded), nodes in zip(products, _by_unit(flow.unit.items(), len(chain.units)), strict=True):
        key = (total, sizes, unneeded, signature(nodes, flow))
        if key not in measured:
            rest = unit_costs(nodes, flow, fused_attention)
            measured[key] = replace(rest, flops=total, products=sizes, unneeded_flops=unneeded)
        costs.append(measured[key])
    return _assembled(captured, chain, sharding, tp, costs=costs, state_of=state_of)


def _product_sizes(nodes: Iterable[Node]) -> tuple[tuple[int, int, int], ...]:
    """Return (m, n, k) of each matrix product but those of attention; a batch of products counts as more rows m."""
    sizes = []
    for node in nodes:
        product_flops = 0 if facts(node).attends else flops(node)
        if product_flops and (results := values(node)):
            columns = results[0].shape[-1]
            count = results[0].numel()
            sizes.append((count // columns, columns, max(1, product_flops // (2 * count))))
    return tuple(sizes)


def _by_unit(units: Iterable[tuple[Node, int | None]], count: int) -> list[list[Node]]:
    """Return the nodes of each of ``count`` units, given (node, unit) pairs; None: of no unit."""
    nodes: list[list[Node]] = [[] for _ in range(count)]
    for node, unit in units:
        if unit is not None:
            nodes[unit].append(node)
    return nodes


def _assembled(
    captured: Captured, chain: Chain, sharding: Sharding, tp: int, costs: Sequence[UnitCosts], state_of: StateOf | None
) -> tuple[Unit, ...]:
    users: dict[str, int] = {}
    for names in chain.parameters:
        for parameter in names:
            users[parameter] = users.get(parameter, 0) + 1
    units = []
    for index, (nodes, name, names) in enumerate(zip(chain.units, chain.names, chain.parameters, strict=True)):
        last = index == len(chain.units) - 1
        crossing = _outputs(captured) if last else chain.crossing[index]
        own_nodes = frozenset(nodes)
        sizes = {parameter: stored_values(sharding.tensors[parameter], tp) for parameter in names}
        own, shared = ([parameter for parameter in names if (users[parameter] > 1) == tied] for tied in (False, True))
        frozen = [parameter for parameter in own if parameter not in captured.trainable]
        crossing_bytes = [(node, _local_bytes(node, sharding)) for node in crossing]
        units.append(
            Unit(
                name=name,
                kind=re.sub(r"\d+", "*", name),
                parameters=sum(sizes[parameter] for parameter in own),
                output_bytes=sum(size for _, size in crossing_bytes),
                tied=tuple((parameter, sizes[parameter]) for parameter in shared),
                passed_bytes=0 if last else sum(size for node, size in crossing_bytes if node not in own_nodes),
                frozen=sum(sizes[parameter] for parameter in frozen),
                tied_frozen=tuple(parameter for parameter in shared if parameter not in captured.trainable),
                **kept_state(own, shared, sizes, captured, state_of=state_of),
                **vars(costs[index]),
            )
        )
    return tuple(units)


def stored_values(tensor: TensorSharding, tp: int) -> int:
    """Return how many values of a tensor one rank stores, padding included."""
    if tensor.dim is None:
        return prod(tensor.shape)
    extent = tensor.shape[tensor.dim] if tensor.padded is None else tensor.padded
    return prod(tensor.shape) // tensor.shape[tensor.dim] * (extent // tp)


def _outputs(captured: Captured) -> tuple[Node, ...]:
    (output,) = captured.module.graph.find_nodes(op="output")
    return tuple(output.all_input_nodes)


def _local_bytes(node: Node, sharding: Sharding) -> int:
    """Return the bytes of one rank's shard of a value of the captured graph."""
    layout = sharding.layouts.get(node)
    if layout is None or isinstance(layout, tuple):
        return nbytes(node)
    return nbytes(node) // values(node)[0].shape[layout.dim] * layout.extent(sharding.tp)


def signature(nodes: Sequence[Node], flow: Flow) -> Hashable:
    """Return what is equal for units that cost the same: operations, where their operands come from, and literals."""
    positions = {node: index for index, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def described(argument: Node) -> Any:
        source = flow.resolve(argument)
        if source in positions:
            return ("inner", positions[source])
        shapes = [(tuple(value.shape), value.dtype) for value in values(source)]
        number = outside.setdefault(source, len(outside))
        documents = flow.documents.get(source)
        return (
            "outer",
            number,
            shapes,
            flow.differentiable.get(source, False),
            flow.is_parameter(source),
            _is_only_reader(nodes, flow, source),
            _saved_by_earlier_unit(nodes, flow, source),
            None if documents is None else documents.tolist(),
        )

    return tuple((node.target, repr(map_arg((node.args, node.kwargs), described))) for node in nodes)


def unit_costs(nodes: Sequence[Node], flow: Flow, fused_attention: bool = False) -> UnitCosts:
    """Return the costs of one unit, except for those of its matrix products."""
    forward_reduces = [node for node in nodes if node.target in REDUCTIONS]
    backward_reduces = [node for node in nodes if node.target is copy_in]
    replay = Replay(nodes, flow, fused_attention)
    attention, more = more_flops(nodes, fused_attention)
    return UnitCosts(
        attention_flops=attention,
        more_flops=more,
        saved_bytes=sum(replay.saved.values()),
        transient_bytes=replay.transient,
        reduces=(len(forward_reduces), len(backward_reduces)),
        reduced_bytes=(sum(map(_reduced_bytes, forward_reduces)), sum(map(nbytes, backward_reduces))),
        operations=(replay.operations, round(_BACKWARD_OPERATIONS * replay.operations)),
        weight_bytes=_weight_bytes(nodes, flow, replay),
        unread_bytes=sum(
            tensor.untyped_storage().nbytes()
            for node, value in replay.outside.items()
            for tensor in _tensors(value)
            if _is_only_reader(nodes, flow, node) and _storage(tensor) not in replay.saved_inputs
        ),
    )


def _reduced_bytes(mark: Node) -> int:
    """Return the bytes of an all-reduce that sends as much: an all-gather sends half of what one would."""
    return nbytes(mark) // 2 if mark.target is stack else nbytes(mark)


def _is_only_reader(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether a value is computed by another unit and read by this one alone."""
    unit = flow.unit[nodes[0]]
    return flow.unit.get(source, unit) != unit and all(flow.unit.get(user) == unit for user in source.users)


def _weight_bytes(nodes: Sequence[Node], flow: Flow, replay: "Replay") -> int:
    """Return the bytes that deferred weight gradients need: inputs, and gradients of outputs, of linear layers whose
    weight gradient goes to a sink."""
    sizes: dict[object, int] = {}  # by storage or node, so that what several layers need counts once
    for node in nodes:
        match = call_with_sink(flow, node)
        if match is None:
            continue
        function, operands, options = match
        outputs = values(node)
        if function is ops.linear_cross_entropy_stats or options.get("chunk"):
            continue  # their weight gradients are never deferred
        weights = operands[1] if isinstance(operands[1], list | tuple) else [operands[1]]
        trained = [flow.differentiable[flow.resolve(weight)] for weight in weights]
        if not any(trained):
            continue
        if function is ops.linears:
            outputs = tuple(output for output, each in zip(outputs, trained, strict=True) if each)
        if function is ops.linear_cross_entropy:  # the factors of the logits' gradient, and the scaled input
            rows = replay.value(operands[0])
            weight = replay.value(operands[1])
            sizes[node] = (len(rows) * weight.shape[0] + rows.numel()) * rows.element_size()
            continue
        if function in (ops.linear, ops.linears, ops.joined_linear):
            input = replay.value(operands[0])
            if not _saved_by_earlier_unit(nodes, flow, flow.resolve(operands[0])):
                sizes[_storage(input)] = input.untyped_storage().nbytes()
        if function in (ops.gated_linear, ops.gelu_linear):  # the backward recomputes the input
            source = replay.value(operands[0])
            sizes[node, "input"] = _bytes(source) // (1 + (function is ops.gated_linear))
        masked = function is ops.embedding_part or options.get("padding") is not None  # needs a copy of the gradient
        sizes[(node, "masked") if masked else _same_gradient(node)] = sum(map(_bytes, outputs))
    return sum(sizes.values())


def _saved_by_earlier_unit(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether a unit before this one also needs a value for a weight gradient."""
    unit = flow.unit[nodes[0]]
    earlier = [user for user in source.users if flow.unit.get(user, unit) < unit]
    earlier += [user for copy in earlier if copy.target is copy_in for user in copy.users]
    return any(call_with_sink(flow, user) is not None for user in earlier)


def _same_gradient(node: Node) -> Node:
    """Return the last of the sums that a value is added to, one after the other: both have the same gradient."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not reduce_sum and not is_op(user, "add"):
            break
        if values(user)[0].shape != values(node)[0].shape or user.kwargs:
            break
        node = user
    return node


class _Counter(TorchDispatchMode):
    """Counts the operations that the host starts, including views, since each takes host time."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not any(name in str(func) for name in _NOT_OPERATIONS)
        return func(*args, **(kwargs or {}))


class Replay:
    """A unit run once on fake tensors.

    results:      what each node of the unit returned.
    outside:      fakes of the parameters, constants and other units' values that the unit reads.
    saved:        storage -> its bytes, for each that the backward needs, not counting those of ``outside``.
    saved_inputs: storages of ``outside`` that the backward needs.
    transient:    most bytes that other values, except the outputs, take at one time in the forward, or bytes of the
                  largest value's gradient where that is more.
    operations:   number that the host starts.
    """

    def __init__(self, nodes: Sequence[Node], flow: Flow, fused_attention: bool):
        self.nodes = nodes
        self.flow = flow
        self.fused_attention = fused_attention
        self.results: dict[Node, Any] = {}
        self.outside: dict[Node, Any] = {}
        self.saved: dict[int, int] = {}
        self._alive: list[Tensor] = []  # the address of a freed storage could be reused by another
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), _Counter() as counter:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                for node in nodes:
                    self.results[node] = self._run(node)
        self.operations = counter.operations
        inputs = {_storage(tensor) for value in self.outside.values() for tensor in _tensors(value)}
        self.saved_inputs = [key for key in self.saved if key in inputs]
        self.saved = {key: size for key, size in self.saved.items() if key not in inputs}
        self.transient = self._transient(inputs)

    def _save(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        self.saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _run(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        if node.target in _MARKS:
            return self.value(operand(node)).expand(values(node)[0].shape)
        if self.fused_attention and facts(node).attends:
            return self._attend(node, args)
        return called(node)(*args, **kwargs)

    def _attend(self, node: Node, args: Sequence[Any]) -> Tensor:
        """Stand in for a fused kernel, which saves its operands, its result and one fp32 statistic per query."""
        (like,) = values(node)
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        query = args[0]
        statistics = torch.empty(query.numel() // query.shape[-1], dtype=torch.float32)
        for tensor in (*args[:3], result, statistics):
            self._save(tensor)
        return result.requires_grad_(any(tensor.requires_grad for tensor in args[:3]))

    def value(self, node: Node) -> Any:
        node = self.flow.resolve(node)
        if node in self.results:
            return self.results[node]
        if node not in self.outside:
            self.outside[node] = self._fake_input(node)
        return self.outside[node]

    def _fake_input(self, node: Node) -> Any:
        """Return a fake of what comes from outside: a parameter, a constant, a common value, another unit's value."""
        if self.flow.is_module(node):
            return self.flow.constants[str(node.target)]
        value = self.flow.documents.get(node, node.meta["val"])
        if not isinstance(value, Tensor) or node in self.flow.documents:
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return fake.requires_grad_(self.flow.differentiable.get(node, False))

    def _transient(self, inputs: set[int]) -> int:
        inner = [node for node in self.nodes if all(user in self.results for user in node.users)]
        outputs = {_storage(x) for node in self.nodes if node not in inner for x in _tensors(self.results[node])}
        last_use = {self.flow.resolve(x): index for index, node in enumerate(self.nodes) for x in node.all_input_nodes}
        spans: dict[int, tuple[int, int, int]] = {}  # storage -> bytes, index of its first and of its last use
        for index, node in enumerate(self.nodes):
            for tensor in _tensors(self.results[node]):
                key = _storage(tensor)
                if key not in self.saved and key not in inputs and key not in outputs:
                    _, first, end = spans.get(key, (0, index, index))
                    spans[key] = tensor.untyped_storage().nbytes(), first, max(end, last_use.get(node, index))
        changes = [0] * (len(self.nodes) + 1)
        for size, first, end in spans.values():
            changes[first] += size
            changes[end + 1] -= size
        return max(max(accumulate(changes)), max(map(nbytes, inner), default=0))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
