"""Python code as single nodes of a graph, such as custom autograd Functions, which so keep their
own backward.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from megatron_merak.errors import TraceError

_LIBRARY = "megatron_merak"
_NAME = "custom_function"


class CustomFunction:
    """Python code as a function of tensors alone, which a node of a captured graph calls.

    A call returns the list of the tensors that ``code`` returns.

    constants:     the flattened arguments of ``code``, with None in place of tensors.
    spec:          the tree that they are flattened from.
    positions:     for each tensor argument, its index in ``constants``.
    shapes:        shape and dtype of each tensor returned, as in the trace; every call must return
                   the same shapes.
    random:        whether it draws random numbers.
    aliases_input: whether its results may share memory with the first tensor argument.
    flops:         FLOPs of its forward.
    saved_bytes:   for code whose forward or backward cannot run on fake tensors, the bytes that its
                   backward needs besides its arguments; None for other code.
    """

    def __init__(
        self, code: Callable[..., Any], title: tuple[str, str], constants: list[Any], spec: TreeSpec
    ):
        self.code = code
        self.constants = constants
        self.spec = spec
        self.positions: tuple[int, ...] = ()
        self.shapes: tuple[tuple[torch.Size, torch.dtype], ...] = ()
        self.random = False
        self.aliases_input = False
        self.flops = 0
        self.saved_bytes: int | None = None
        # The name that torch.fx uses in a graph and in generated code.
        self.__module__, self.__name__ = title
        self.__qualname__ = self.__name__

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if self.saved_bytes is not None and any(isinstance(x, FakeTensor) for x in tensors):
            return list(_WithoutValues.apply(self.shapes, self.saved_bytes, *tensors))
        flat = list(self.constants)
        for position, tensor in zip(self.positions, tensors, strict=True):
            flat[position] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        tensors_out = [x for x in tree_leaves(self.code(*args, **kwargs)) if isinstance(x, Tensor)]
        if [x.shape for x in tensors_out] != [shape for shape, _ in self.shapes]:
            actual = [tuple(x.shape) for x in tensors_out]
            expected = [tuple(x) for x, _ in self.shapes]
            reason = f"it returned {actual} instead of {expected}"
            raise TraceError(
                "opaque operation",
                self.__name__,
                reason,
                "Shapes in a captured model must be fixed",
            )
        if self.saved_bytes is None or not torch.is_grad_enabled():
            return tensors_out
        anchors = [x for x in tensors if x.requires_grad]
        return [
            x if x.requires_grad or not anchors else _Attached.apply(x, *anchors)
            for x in tensors_out
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> "CustomFunction":
        return self


class _Attached(Function):
    """Makes a value require grad that depends on ``anchors`` in other calls but not in this one;
    passes no gradient.
    """

    @staticmethod
    def forward(ctx, x, *anchors):
        ctx.count = len(anchors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return None, *(None for _ in range(ctx.count))


class _WithoutValues(Function):
    """Allocates the memory that the code would, without computing anything."""

    @staticmethod
    def forward(ctx, shapes, saved_bytes, *tensors):
        ctx.save_for_backward(torch.empty(saved_bytes, dtype=torch.uint8))
        ctx.like = tensors
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *(torch.empty_like(x) if x.requires_grad else None for x in ctx.like)


@dataclass(eq=False)
class Opaque:
    """The calls that a trace keeps as single nodes.

    context:   of the trace, at whose end the operator that stands for the calls goes away.
    functions: the function of each node.
    results:   for each, the tensors that it returns, without values.
    """

    context: ExitStack
    functions: list[CustomFunction] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)

    @cached_property
    def _operator(self) -> Callable[..., list[Tensor]]:
        """The operator that stands for the calls in the trace, defined at the first one: few models
        have any, and torch searches all loaded modules for the source of a definition.
        """
        library = self.context.enter_context(torch.library._scoped_library(_LIBRARY, "FRAGMENT"))
        library.define(f"{_NAME}(int index, Tensor[] tensors) -> Tensor[]")

        def fake(index: int, tensors: list[Tensor]) -> list[Tensor]:
            return [torch.empty_like(x) for x in self.results[index]]

        torch.library.register_fake(f"{_LIBRARY}::{_NAME}", fake, lib=library)
        return getattr(torch.ops, _LIBRARY).custom_function.default

    def apply(self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add one node to the graph that is being traced; return what the Function returns.

        Raises TraceError for a Function that reads or writes more than its arguments and results.
        """
        flat, spec = tree_flatten((args, kwargs))
        name = f"{function.__module__}.{function.__qualname__}"
        if any(isinstance(x, nn.Module) and any(True for _ in x.parameters()) for x in flat):
            raise _refusal(name, "its parameters are in a module that is an argument")
        tensors = [x for x in flat if isinstance(x, Tensor)]
        with _untraced(tensors), SideEffects(tensors) as effects, torch.no_grad():
            outputs, context = forward_of(function, args, kwargs)
        shared = sharing(tensors, tree_leaves(outputs))
        why = effects.why
        if not why and (len(shared) > 1 or effects.written):
            why = "it returns or changes memory of its arguments"
        if why:
            raise _refusal(name, why)
        title = function.__module__, f"{function.__name__}_apply"
        custom = CustomFunction(partial(_apply, function), title, without_tensors(flat), spec)
        custom.random = effects.random
        custom.flops = effects.flops
        with _untraced(tensors), torch.no_grad():
            custom.saved_bytes = _saved_if_values_are_needed(function, context, tensors, outputs)
        constant = {id(x) for x in getattr(context, "non_differentiable", ())}
        return self.put(custom, flat, outputs, shared, constant)

    def put(
        self,
        custom: CustomFunction,
        flat: list[Any],
        outputs: Any,
        shared: list[int],
        constant: Container[int] = (),
    ) -> Any:
        """Add a node that calls ``custom``; return values like ``outputs``.

        flat:     the flattened arguments.
        shared:   which of the tensors in ``flat`` the outputs share memory with, by number.
        constant: ids of the outputs that take no gradient.
        """
        positions = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        first = [positions[i] for i in shared]
        positions = first + [i for i in positions if i not in first]
        results, spec = tree_flatten(outputs)
        custom.positions = tuple(positions)
        custom.aliases_input = bool(shared)
        custom.shapes = tuple((x.shape, x.dtype) for x in results if isinstance(x, Tensor))
        self.functions.append(custom)
        self.results.append([x for x in results if isinstance(x, Tensor)])
        returned = iter(self._operator(len(self.functions) - 1, [flat[i] for i in positions]))
        values = [
            _next_result(returned, x, constant) if isinstance(x, Tensor) else x for x in results
        ]
        return tree_unflatten(values, spec)

    def settle(self, module: nn.Module) -> None:
        """Make the nodes of a traced graph call their functions instead of the operator."""
        graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
        for node in [node for graph in graphs for node in graph.nodes]:
            if getattr(
                node.target, "namespace", ""
            ) == _LIBRARY and node.target._schema.name.endswith(_NAME):
                custom = self.functions[node.args[0]]
                node.target, node.args = custom, tuple(node.args[1])
                node._rename(custom.__name__)


def without_tensors(flat: list[Any]) -> list[Any]:
    return [None if isinstance(x, Tensor) else x for x in flat]


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Call ``function.apply``, looked up at each call because it is patched during a trace."""
    return function.apply(*args, **kwargs)


@contextmanager
def keep_functions() -> Iterator[Opaque]:
    """Keep custom Functions as nodes for the duration of a trace."""
    with ExitStack() as context:
        yield Opaque(context)


def forward_of(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, FunctionCtx]:
    """Run the Function's forward with its operations visible to autograd; return its outputs and
    its context.
    """
    ctx = FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)  # type: ignore[attr-defined]
    if function.setup_context is not Function.setup_context:
        outputs = function.forward(*args, **kwargs)
        function.setup_context(ctx, args, outputs)
        return outputs, ctx
    return function.forward(ctx, *args, **kwargs), ctx


def _saved_if_values_are_needed(
    function: type[Function], context: FunctionCtx, inputs: list[Tensor], outputs: Any
) -> int | None:
    """Return the bytes that a Function saves besides its inputs if its backward does not run on
    fake tensors, because it is computed with numpy for instance; None if it runs.
    """
    backward = function.backward if function.vjp is Function.vjp else function.vjp
    returned = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.empty_like(x) if isinstance(x, Tensor) else None for x in returned]
    kept = [x for x in tree_leaves(list(vars(context).values())) if isinstance(x, Tensor)]
    context.saved_tensors = getattr(context, "to_save", ())  # type: ignore[attr-defined]
    try:
        backward(context, *grads)
    except Exception:
        own = {x.untyped_storage()._cdata for x in inputs}
        saved = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept}
        return sum(size for storage, size in saved.items() if storage not in own)
    return None


class SideEffects(TorchDispatchMode):
    """Records what code does besides computing its results from its arguments.

    written: it writes to an argument in place. why: it reads a tensor that is neither an argument
             nor its own.
    tensors: its arguments and all that it computes, by id.
    """

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.tensors = {id(x): x for x in inputs}
        self.inputs = frozenset(self.tensors)
        self.random = self.written = False
        self.flops = 0
        self.why = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs or {})):
            if isinstance(x, FakeTensor) and id(x) not in self.tensors:
                self.why = (
                    "it reads a parameter, or a value of the model, that is not one of "
                    "its arguments"
                )
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= any(id(x) in self.inputs for x in tree_leaves(value))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](
                *args, **(kwargs or {}), out_val=result
            )
        self.tensors.update((id(x), x) for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


@contextmanager
def _untraced(tensors: list[Tensor]) -> Iterator[None]:
    """Run code without recording it in the trace; fake tensors stay fake."""
    mode = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
    with _disable_current_modes():
        if mode is None:
            yield
        else:
            with mode:
                yield


def sharing(tensors: list[Tensor], results: list[Any]) -> list[int]:
    """Return which of ``tensors``, by number, the results share memory with."""
    memory = {x.untyped_storage()._cdata for x in results if isinstance(x, Tensor)}
    return [i for i, x in enumerate(tensors) if x.untyped_storage()._cdata in memory]


def _next_result(tensors: Iterator[Tensor], like: Tensor, constant: Container[int]) -> Tensor:
    value = next(tensors)
    return value.detach() if id(like) in constant else value


def _refusal(name: str, why: str) -> TraceError:
    remedy = (
        "Pass it tensors and let it return new ones, or replace it by operations that "
        "differentiate the same way"
    )
    return TraceError(
        "autograd.Function", name, f"its backward would be lost in a graph: {why}", remedy
    )
