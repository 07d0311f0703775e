"""Runs the operations of a unit once on fake tensors, to find what its backward needs and what the
host starts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from .ir.bundle import Bundle
from .ir.marks import MARKS, all_gather, reduce_scatter, rotate
from .ir.nodes import called, nbytes, operand, values
from .ir.operators import facts
from .lowering.flow import Flow
from .lowering.regathered import is_regathered, without_gathered

# they are dispatched, but the host starts nothing
_NOT_OPERATIONS = ("prim", "promote_types", "empty_strided")


class _Counter(TorchDispatchMode):
    """Counts the operations that the host starts, including views, since each takes host time."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not any(name in str(func) for name in _NOT_OPERATIONS)
        return func(*args, **(kwargs or {}))


class _Unkept:
    """Stands for the sink of weight gradients, which gets some values again for the backward.

    places: storages of these values.
    """

    def __init__(self):
        self.places: dict[int, None] = {}

    def add(self, value: Tensor) -> None:
        self.places[storage_of(value)] = None

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        return (lambda: input) if storage_of(input) in self.places else None

    def again(self, result: Tensor, get: Callable[[], Tensor]) -> None:
        self.add(result)

    def unkept(self) -> AbstractContextManager[object]:
        return nullcontext()


class Replay:
    """A unit run once on fake tensors.

    results:      what each node of the unit returned.
    outside:      fakes of the parameters, constants and other units' values that the unit reads.
    saved:        storage -> its bytes, for each that the backward needs, not counting those of
                  ``outside``.
    saved_inputs: storages of ``outside`` that the backward needs.
    transient:    most bytes that other values, except the outputs, take at one time in the forward,
                  or bytes of the largest value's gradient where that is more.
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
        gathered = [node for node in nodes if is_regathered(flow, node, nodes)]
        self._unkept = _Unkept()
        self._others = {x: call for node in gathered for x, call in without_gathered(node).items()}
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), _Counter() as counter:
            self._counter = counter
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                for node in nodes:
                    self.results[node] = self._run(node)
                    if node in gathered:
                        self._unkept.add(self.results[node])
        self.operations = counter.operations
        for node in gathered:
            self._save(self.value(operand(operand(node))))  # this rank's part
        for place in self._unkept.places:
            self.saved.pop(place, None)
        inputs = {
            storage_of(tensor) for value in self.outside.values() for tensor in tensors_of(value)
        }
        self.saved_inputs = [key for key in self.saved if key in inputs]
        self.saved = {key: size for key, size in self.saved.items() if key not in inputs}
        self.transient = self._transient(inputs)

    def _save(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        self.saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _run(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.value)
        if node.target in MARKS:
            source = self.value(operand(node))
            if node.target in (all_gather, reduce_scatter, rotate):
                return source.new_empty(values(node)[0].shape).requires_grad_(source.requires_grad)
            return source.expand(values(node)[0].shape)
        if self.fused_attention and facts(node).attends and isinstance(node.meta["val"], Tensor):
            return self._attend(node, args)
        if node in self._others:
            return self._others[node](*args, sink=self._unkept, **kwargs)
        if isinstance(node.target, Bundle):
            return self._at_once(node.target, args)
        return called(node)(*args, **kwargs)

    def _at_once(self, bundle: Bundle, args: Sequence[Any]) -> Any:
        """Run operations that are one for the host, once they are compiled."""
        before = self._counter.operations
        results = bundle(*args)
        self._counter.operations = before + 1
        return results

    def _attend(self, node: Node, args: Sequence[Any]) -> Tensor:
        """Stand in for a fused kernel, which saves its operands, its result and one fp32 statistic
        per query.
        """
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
            self.outside[node] = fake_input(self.flow, node)
        return self.outside[node]

    def _transient(self, inputs: set[int]) -> int:
        inner = [node for node in self.nodes if all(user in self.results for user in node.users)]
        outputs = {
            storage_of(x)
            for node in self.nodes
            if node not in inner
            for x in tensors_of(self.results[node])
        }
        last_use = {
            self.flow.resolve(x): index
            for index, node in enumerate(self.nodes)
            for x in node.all_input_nodes
        }
        # storage -> bytes, index of its first and of its last use
        spans: dict[int, tuple[int, int, int]] = {}
        for index, node in enumerate(self.nodes):
            for tensor in tensors_of(self.results[node]):
                key = storage_of(tensor)
                if key not in self.saved and key not in inputs and key not in outputs:
                    _, first, end = spans.get(key, (0, index, index))
                    spans[key] = (
                        tensor.untyped_storage().nbytes(),
                        first,
                        max(end, last_use.get(node, index)),
                    )
        changes = [0] * (len(self.nodes) + 1)
        for size, first, end in spans.values():
            changes[first] += size
            changes[end + 1] -= size
        return max(max(accumulate(changes)), max(map(nbytes, inner), default=0))


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def fake_input(flow: Flow, node: Node) -> Any:
    """Return a fake of what comes to a unit from outside: a parameter, a constant, a common value,
    another unit's value.
    """
    if flow.is_module(node):
        return flow.constants[str(node.target)]
    value = flow.documents.get(node, node.meta["val"])
    if not isinstance(value, Tensor) or node in flow.documents:
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fake.requires_grad_(flow.differentiable.get(node, False))
