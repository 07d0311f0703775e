"""Pointwise operations as one node of a graph, which torch.compile makes one function of, forward
and backward.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from ...errors import ConfigError
from .aliases import is_view
from .nodes import nbytes, operand, values

# A product that is rounded to bf16 between two operations is rounded in compiled code, too.
OPTIONS: Mapping[str, Any] = {"emulate_precision_casts": True, "compile_threads": 1}
FLAG = "--compile-pointwise"
_aten = torch.ops.aten


class Bundle:
    """Pointwise operations as a function of their inputs, of which its backward keeps nothing else.

    Until ``compile`` they run one by one, which is what they do on fake tensors: their results need
    no more memory compiled than so.

    forward:  the operations, (*inputs) -> tuple of results.
    examples: fakes of the inputs.
    trained:  which of the inputs get a gradient, by number.
    """

    def __init__(self, forward: GraphModule, examples: Sequence[Tensor], trained: Sequence[int]):
        self.forward = forward
        self.examples = tuple(examples)
        self.trained = tuple(trained)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [_empty(x) for x in self.examples]
            self.results = tuple(forward(*fakes))
        self.differentiable = tuple(
            bool(self.trained) and x.is_floating_point() for x in self.results
        )
        self.backward = self._derived() if self.trained else None
        self._forward: Callable[..., tuple[Tensor, ...]] = forward
        self._backward: Callable[..., tuple[Tensor | None, ...]] | None = self.backward
        self.compiled = False
        # The name that torch.fx uses in a graph and in generated code.
        self.__module__ = __name__
        self.__name__ = self.__qualname__ = "pointwise_bundle"

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        results = _AtOnce.apply(self, *inputs)
        return results if len(self.results) > 1 else results[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bundle":
        return self

    def _derived(self) -> GraphModule:
        """Return (*inputs, *gradients of differentiable results) -> gradients of trained inputs."""
        grads = [x for x, flows in zip(self.results, self.differentiable, strict=True) if flows]
        count = len(self.examples)

        def gradients(*tensors: Tensor) -> tuple[Tensor | None, ...]:
            inputs = [x.detach() for x in tensors[:count]]
            wanted = [inputs[place].requires_grad_() for place in self.trained]
            with torch.enable_grad():
                results = self.forward(*inputs)
            roots = [x for x, flows in zip(results, self.differentiable, strict=True) if flows]
            return torch.autograd.grad(roots, wanted, tensors[count:], allow_unused=True)

        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [_empty(x) for x in (*self.examples, *grads)]
            traced = make_fx(gradients)(*fakes)
        for node in traced.graph.nodes:
            if node.target is _aten.view.default:  # gradients may come in other strides
                node.target = _aten.reshape.default
            if node.target is _aten.detach.default:
                node.replace_all_uses_with(node.args[0])
        traced.graph.eliminate_dead_code()
        traced.recompile()
        return traced

    def compile(self, device: torch.device) -> None:
        """Compile both directions for a device, and run them once on tensors without values.

        Raises ConfigError where torch.compile cannot.
        """
        if self.compiled:
            return
        inputs = [_empty(x, device) for x in self.examples]
        grads = [
            _empty(x, device)
            for x, flows in zip(self.results, self.differentiable, strict=True)
            if flows
        ]
        try:
            forward = _compiled(self.forward, device)
            with torch.no_grad():
                forward(*inputs)
            if self.backward is not None:
                backward = _compiled(self.backward, device)
                with torch.no_grad():
                    backward(*inputs, *grads)
                self._backward = backward
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            reason = f"torch.compile failed here with {type(error).__name__}: {text}"
            remedy = "Install a C++ compiler (on GPUs also Triton), name it in CXX, or leave it out"
            raise ConfigError(FLAG, True, reason.rstrip("."), remedy) from error
        self._forward = forward
        self.compiled = True

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        code = self.forward if _is_fake(inputs) else self._forward
        return tuple(code(*inputs))

    def run_back(
        self, inputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        code = self.backward if _is_fake(inputs) else self._backward
        assert code is not None
        return tuple(code(*inputs, *grads))


class _AtOnce(Function):
    """Keeps the inputs of a bundle, and computes what is between again."""

    @staticmethod
    def forward(ctx, bundle, *inputs):
        ctx.bundle = bundle
        ctx.save_for_backward(*inputs)
        # compiled code is told apart by whether its arguments require gradients
        results = bundle.run([x.detach() for x in inputs])
        pairs = zip(results, bundle.differentiable, strict=True)
        ctx.mark_non_differentiable(*(x for x, flows in pairs if not flows))
        return results

    @staticmethod
    def backward(ctx, *grads):
        bundle = ctx.bundle
        flowing = [g for g, flows in zip(grads, bundle.differentiable, strict=True) if flows]
        inputs = [x.detach() for x in ctx.saved_tensors]
        found = dict(zip(bundle.trained, bundle.run_back(inputs, flowing), strict=True))
        return None, *(found.get(place) for place in range(len(inputs)))


def is_free(node: Node) -> bool:
    """Whether a node's value is its first argument in another shape, so that nothing is moved."""
    return is_view(node) and values(node)[0].dtype == values(operand(node))[0].dtype


def moved_bytes(graph: Graph, nodes: Sequence[Node] | None = None) -> int:
    """Return the bytes that the operations of a graph read and write, one by one; views none.

    nodes: those that count; None: all.
    """
    total = 0
    for node in graph.nodes if nodes is None else nodes:
        if node.op == "call_function" and not is_free(node):
            total += nbytes(node) + sum(map(nbytes, node.all_input_nodes))
    return total


def backward_operations(bundle: Bundle) -> list[Node]:
    """Return the nodes of a bundle's backward that do not repeat its forward."""
    if bundle.backward is None:
        return []
    reached: dict[Node, None] = {}
    arguments = bundle.backward.graph.find_nodes(op="placeholder")
    for node in bundle.backward.graph.nodes:
        late = node in arguments[len(bundle.examples) :]
        if late or node.op == "call_function" and any(x in reached for x in node.all_input_nodes):
            reached[node] = None
    return [node for node in reached if node.op == "call_function"]


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _empty(like: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or "cpu")


def _is_fake(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(x, FakeTensor) for x in tensors)


def _compiled(module: GraphModule, device: torch.device) -> Callable[..., tuple[Tensor, ...]]:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))

    def place(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = map_aggregate(node.args, place)
        node.kwargs = map_aggregate(node.kwargs, place)
    placed = GraphModule(module, graph)
    return torch.compile(placed, fullgraph=True, dynamic=False, options=dict(OPTIONS))
