"""What one tensor-parallel rank holds, computes, keeps and sends of each unit: numbers for the planner.

They come from the graph that the rank will run, rewritten and fused. What autograd keeps for the backward is found by
running a unit once on tensors without memory; units of equal structure are measured once.
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
from .ir.nodes import flops, is_op, nbytes, op_name, values
from .kept_state import StateOf, kept_state
from .lowering.documents import known_documents
from .lowering.emit import call_with_sink
from .lowering.flow import REDUCTIONS, Flow
from .lowering.rewrite import rewrite
from .more_flops import ATTENTION, more_flops, unneeded_flops
from .partition.cut import Chain
from .sharding.shard import Sharding

_MARKS = (copy_in, *REDUCTIONS)
_BACKWARD_OPERATIONS = 2.3  # started by the backward for each one of the forward
_FREE = ("prim", "promote_types", "empty_strided")  # dispatched, but starting nothing


@dataclass(frozen=True)
class Work:
    """The numbers of a unit that follow from its operations; see ``plan.Unit``."""

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
    """The chain as the planner sees it. ``fused_attention``: of the device that runs it, see ``cluster.Device``.
    ``loss_chunk``, ``recompute_activations``: see ``fuse``. ``positions``: those of packed rows on a CPU, see
    ``known_documents``. ``state_of``: bytes that the optimizer keeps of a parameter's value; None: as the plan says."""
    rewritten = rewrite(captured, chain, sharding, 0, tp)
    products = _units(rewritten.graph.nodes, len(chain.units))
    counted = [(sum(map(flops, nodes)), _sides(nodes), unneeded_flops(nodes)) for nodes in products]
    counts = fuse(rewritten.graph, loss_chunk, recompute_activations)
    if recompute_activations and not counts[RECOMPUTED]:
        reason = "the model has no linear layer behind an activation that is known"
        raise PlanError(
            "--recompute-granularity", "selective (recompute_activations)", reason, "Leave it out, or use full"
        )
    flow = Flow(
        rewritten, {} if positions is None else known_documents(rewritten.graph, rewritten.constants, positions)
    )
    known: dict[Hashable, Work] = {}
    works = []
    for (total, sides, unneeded), nodes in zip(counted, _flow_units(flow, len(chain.units)), strict=True):
        key = (total, sides, unneeded, signature(nodes, flow))
        if key not in known:
            done = work(nodes, flow, fused_attention)
            known[key] = replace(done, flops=total, products=sides, unneeded_flops=unneeded)
        works.append(known[key])
    return _assembled(captured, chain, sharding, tp, works, state_of)


def _sides(nodes: Iterable[Node]) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of each matrix product but attention's; a batch of products counts as rows of one."""
    found = []
    for node in nodes:
        work = 0 if op_name(node) in ATTENTION else flops(node)
        if work and (made := values(node)):
            leaving, count = made[0].shape[-1], made[0].numel()
            found.append((count // leaving, leaving, max(1, work // (2 * count))))
    return tuple(found)


def _units(nodes: Iterable[Node], count: int) -> list[list[Node]]:
    found: list[list[Node]] = [[] for _ in range(count)]
    for node in nodes:
        if node.op == "call_function" and node.meta.get("unit") is not None:
            found[node.meta["unit"]].append(node)
    return found


def _flow_units(flow: Flow, count: int) -> list[list[Node]]:
    found: list[list[Node]] = [[] for _ in range(count)]
    for node, unit in flow.unit.items():
        found[unit].append(node)
    return found


def _assembled(
    captured: Captured, chain: Chain, sharding: Sharding, tp: int, works: Sequence[Work], state_of: StateOf | None
) -> tuple[Unit, ...]:
    users: dict[str, int] = {}
    for names in chain.parameters:
        for name in names:
            users[name] = users.get(name, 0) + 1
    units = []
    for index, (nodes, name, names) in enumerate(zip(chain.units, chain.names, chain.parameters, strict=True)):
        last = index == len(chain.units) - 1
        crossing = _outputs(captured) if last else chain.crossing[index]
        mine = frozenset(nodes)
        sizes = {held: stored_values(sharding.tensors[held], tp) for held in names}
        own, shared = ([held for held in names if (users[held] > 1) == tied] for tied in (False, True))
        frozen = [held for held in own if held not in captured.trainable]
        local = [(node, _local_bytes(node, sharding)) for node in crossing]
        units.append(
            Unit(
                name=name,
                kind=re.sub(r"\d+", "*", name),
                parameters=sum(sizes[held] for held in own),
                output_bytes=sum(size for _, size in local),
                tied=tuple((held, sizes[held]) for held in shared),
                passed_bytes=0 if last else sum(size for node, size in local if node not in mine),
                frozen=sum(sizes[held] for held in frozen),
                tied_frozen=tuple(held for held in shared if held not in captured.trainable),
                **kept_state(own, shared, sizes, captured, state_of),
                **vars(works[index]),
            )
        )
    return tuple(units)


def stored_values(tensor: TensorSharding, tp: int) -> int:
    """Values of a tensor that one rank stores, padding included."""
    if tensor.dim is None:
        return prod(tensor.shape)
    extent = tensor.shape[tensor.dim] if tensor.padded is None else tensor.padded
    return prod(tensor.shape) // tensor.shape[tensor.dim] * (extent // tp)


def _outputs(captured: Captured) -> tuple[Node, ...]:
    (output,) = captured.module.graph.find_nodes(op="output")
    return tuple(output.all_input_nodes)


def _local_bytes(node: Node, sharding: Sharding) -> int:
    layout = sharding.layouts.get(node)
    if layout is None or isinstance(layout, tuple):
        return nbytes(node)
    return nbytes(node) // values(node)[0].shape[layout.dim] * layout.extent(sharding.tp)


def signature(nodes: Sequence[Node], flow: Flow) -> Hashable:
    """Equal for units that do the same to inputs of the same kinds: what they call, on what, and literals."""
    places = {node: index for index, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def told(argument: Node) -> Any:
        source = flow.resolve(argument)
        if source in places:
            return ("inner", places[source])
        shape = [(tuple(value.shape), value.dtype) for value in values(source)]
        place = outside.setdefault(source, len(outside))
        kind = flow.differentiable.get(source, False), flow.is_parameter(source), _only_reader(nodes, flow, source)
        documents = flow.documents.get(source)
        kind += (_held_before(nodes, flow, source), None if documents is None else documents.tolist())
        return ("outer", place, shape, *kind)

    return tuple((node.target, repr(map_arg((node.args, node.kwargs), told))) for node in nodes)


def work(nodes: Sequence[Node], flow: Flow, fused_attention: bool = False) -> Work:
    """The work of one unit, but for its products."""
    ahead = [node for node in nodes if node.target in REDUCTIONS]
    behind = [node for node in nodes if node.target is copy_in]
    replay = Replay(nodes, flow, fused_attention)
    attention, more = more_flops(nodes, fused_attention)
    return Work(
        attention_flops=attention,
        more_flops=more,
        saved_bytes=sum(replay.saved.values()),
        transient_bytes=replay.transient,
        reduces=(len(ahead), len(behind)),
        reduced_bytes=(sum(map(_sent_bytes, ahead)), sum(map(nbytes, behind))),
        operations=(replay.started, round(_BACKWARD_OPERATIONS * replay.started)),
        weight_bytes=_weight_bytes(nodes, flow, replay),
        unread_bytes=sum(
            tensor.untyped_storage().nbytes()
            for node, value in replay.outside.items()
            for tensor in _tensors(value)
            if _only_reader(nodes, flow, node) and _storage(tensor) not in replay.entering
        ),
    )


def _sent_bytes(mark: Node) -> int:
    """A gathering sends half of what an all-reduce of its result would."""
    return nbytes(mark) // 2 if mark.target is stack else nbytes(mark)


def _only_reader(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether another unit makes a value for this one alone."""
    mine = flow.unit[nodes[0]]
    return flow.unit.get(source, mine) != mine and all(flow.unit.get(user) == mine for user in source.users)


def _weight_bytes(nodes: Sequence[Node], flow: Flow, replay: "Replay") -> int:
    """What the weight gradients that go to a sink are made of: inputs, and the gradients of outputs."""
    held: dict[object, int] = {}
    for node in nodes:
        found = call_with_sink(flow, node)
        if found is None:
            continue
        function, operands, options = found
        outputs = values(node)
        if function is ops.linear_cross_entropy_stats or options.get("chunk"):
            continue  # they are taken at once
        weights = operands[1] if isinstance(operands[1], list | tuple) else [operands[1]]
        trained = [flow.differentiable[flow.resolve(weight)] for weight in weights]
        if not any(trained):
            continue
        if function is ops.linears:
            outputs = [output for output, each in zip(outputs, trained, strict=True) if each]
        if function is ops.linear_cross_entropy:  # the factors of the logits' gradient, the input scaled anew
            rows, weight = replay.value(operands[0]), replay.value(operands[1])
            held[node] = (len(rows) * weight.shape[0] + rows.numel()) * rows.element_size()
            continue
        if function in (ops.linear, ops.linears, ops.joined_linear):
            input = replay.value(operands[0])
            if not _held_before(nodes, flow, flow.resolve(operands[0])):
                held[_storage(input)] = input.untyped_storage().nbytes()
        if function in (ops.gated_linear, ops.gelu_linear):  # made again by the backward
            source = replay.value(operands[0])
            held[node, "input"] = _bytes(source) // (1 + (function is ops.gated_linear))
        masked = function is ops.embedding_part or options.get("padding") is not None  # a copy of the gradient
        held[(node, "masked") if masked else _same_gradient(node)] = sum(map(_bytes, outputs))
    return sum(held.values())


def _held_before(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether a unit before this one reads a value for the gradient of a weight, too."""
    mine = flow.unit[nodes[0]]
    before = [user for user in source.users if flow.unit.get(user, mine) < mine]
    before += [user for copy in before if copy.target is copy_in for user in copy.users]
    return any(call_with_sink(flow, user) is not None for user in before)


def _same_gradient(node: Node) -> Node:
    """The last of the sums behind a value: its gradient is the value's, as it is."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not reduce_sum and not is_op(user, "add"):
            break
        if values(user)[0].shape != values(node)[0].shape or user.kwargs:
            break
        node = user
    return node


class _Counter(TorchDispatchMode):
    """Counts the operations that the host starts, views included: what they cost is its time."""

    def __init__(self):
        super().__init__()
        self.started = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.started += not any(name in str(func) for name in _FREE)
        return func(*args, **(kwargs or {}))


class Replay:
    """A unit run once on tensors without memory. ``saved``: bytes of each storage that its backward needs, beside its
    inputs, parameters and constants; ``entering``: which of these it needs. ``transient``: the most that other values
    but its outputs take while it runs, or the gradient of the largest where that is more. ``started``: operations."""

    def __init__(self, nodes: Sequence[Node], flow: Flow, fused_attention: bool):
        self.nodes, self.flow, self.fused_attention = nodes, flow, fused_attention
        self.made: dict[Node, Any] = {}
        self.outside: dict[Node, Any] = {}
        self.saved: dict[int, int] = {}
        self._kept: list[Tensor] = []  # a storage that is gone would give its number to another
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), _Counter() as counter:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                for node in nodes:
                    self.made[node] = self._run(node)
        self.started = counter.started
        known = {_storage(tensor) for value in self.outside.values() for tensor in _tensors(value)}
        self.entering = [key for key in self.saved if key in known]
        self.saved = {key: size for key, size in self.saved.items() if key not in known}
        self.transient = self._transient(known)

    def _save(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        self.saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _run(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        if node.target in _MARKS:
            return args[0].expand(values(node)[0].shape)
        if self.fused_attention and op_name(node) in ATTENTION:
            return self._attend(node, args)
        return node.target(*args, **kwargs)

    def _attend(self, node: Node, args: Sequence[Any]) -> Tensor:
        """A kernel that keeps its operands, its result and one fp32 statistic per query, whatever its options."""
        (like,) = values(node)
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        query = args[0]
        statistics = torch.empty(query.numel() // query.shape[-1], dtype=torch.float32)
        for tensor in (*args[:3], result, statistics):
            self._save(tensor)
        return result.requires_grad_(any(tensor.requires_grad for tensor in args[:3]))

    def value(self, node: Node) -> Any:
        node = self.flow.resolve(node)
        if node in self.made:
            return self.made[node]
        if node not in self.outside:
            self.outside[node] = self._entering(node)
        return self.outside[node]

    def _entering(self, node: Node) -> Any:
        """Something like what comes from outside: a parameter, a constant, a common value, another unit's value."""
        if self.flow.is_module(node):
            return self.flow.attribute(node)
        value = self.flow.documents.get(node, node.meta["val"])
        if not isinstance(value, Tensor) or node in self.flow.documents:
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.requires_grad_(self.flow.differentiable.get(node, False))

    def _transient(self, known: set[int]) -> int:
        inner = [node for node in self.nodes if all(user in self.made for user in node.users)]
        handed_on = {_storage(x) for node in self.nodes if node not in inner for x in _tensors(self.made[node])}
        last = {self.flow.resolve(x): place for place, node in enumerate(self.nodes) for x in node.all_input_nodes}
        spans: dict[int, tuple[int, int, int]] = {}  # storage -> bytes, first place, last place
        for place, node in enumerate(self.nodes):
            for tensor in _tensors(self.made[node]):
                key = _storage(tensor)
                if key not in self.saved and key not in known and key not in handed_on:
                    _, first, end = spans.get(key, (0, place, place))
                    spans[key] = tensor.untyped_storage().nbytes(), first, max(end, last.get(node, place))
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
