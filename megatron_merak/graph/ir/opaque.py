"""Python code as single nodes of a graph: custom autograd Functions, whose gradient so stays their own."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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

_LIBRARY, _NAME = "megatron_merak", "custom_function"


class CustomFunction:
    """Python code as a callable of its tensors alone: what a node of a captured graph calls.

    rest: every argument of ``code``, None in place of tensors; places: where among them each tensor goes. A call
    returns the list of tensors in what the code returns, which must be of the ``shapes`` seen in the trace. random: it
    draws random numbers. shares: what it returns may share memory with the first tensor. flops: of its forward. kept:
    bytes that its backward needs besides its arguments, of code that cannot run on tensors without values.
    """

    def __init__(self, code: Callable[..., Any], title: tuple[str, str], rest: list[Any], arguments: TreeSpec):
        self.code, self.rest, self.arguments = code, rest, arguments
        self.places: tuple[int, ...] = ()
        self.shapes: tuple[tuple[torch.Size, torch.dtype], ...] = ()
        self.random, self.shares, self.flops = False, False, 0
        self.kept: int | None = None
        # What torch.fx calls it in a graph and in generated code.
        self.__module__, self.__name__ = title
        self.__qualname__ = self.__name__

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if self.kept is not None and any(isinstance(x, FakeTensor) for x in tensors):
            return list(_WithoutValues.apply(self.shapes, self.kept, *tensors))
        flat = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.arguments)
        made = [x for x in tree_leaves(self.code(*args, **kwargs)) if isinstance(x, Tensor)]
        if [x.shape for x in made] != [shape for shape, _ in self.shapes]:
            reason = f"it returned {[tuple(x.shape) for x in made]} instead of {[tuple(x) for x, _ in self.shapes]}"
            raise TraceError("opaque operation", self.__name__, reason, "Shapes in a captured model must be fixed")
        if self.kept is None or not torch.is_grad_enabled():
            return made
        anchors = [x for x in tensors if x.requires_grad]
        return [x if x.requires_grad or not anchors else _Attached.apply(x, *anchors) for x in made]

    def __deepcopy__(self, memo: dict[int, Any]) -> "CustomFunction":
        return self


class _Attached(Function):
    """A value that did not depend on ``anchors`` this time, but might have: no gradient comes from it."""

    @staticmethod
    def forward(ctx, x, *anchors):
        ctx.count = len(anchors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return None, *(None for _ in range(ctx.count))


class _WithoutValues(Function):
    """Takes the memory that code takes, and does nothing."""

    @staticmethod
    def forward(ctx, shapes, kept, *tensors):
        ctx.save_for_backward(torch.empty(kept, dtype=torch.uint8))
        ctx.like = tensors
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in shapes)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *(torch.empty_like(x) if x.requires_grad else None for x in ctx.like)


@dataclass(eq=False)
class Opaque:
    """What a trace keeps as single nodes, and what each returns, without values."""

    functions: list[CustomFunction] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)
    operator: Callable[..., list[Tensor]] | None = None

    def apply(self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put one node into the graph that is being traced; returns what the Function returns.

        Raises TraceError for a Function that reads or writes more than its arguments and results.
        """
        flat, arguments = tree_flatten((args, kwargs))
        name = f"{function.__module__}.{function.__qualname__}"
        if any(isinstance(x, nn.Module) and any(True for _ in x.parameters()) for x in flat):
            raise _refusal(name, "its parameters are in a module that is an argument")
        tensors = [x for x in flat if isinstance(x, Tensor)]
        with _plain_fake(tensors), Look(tensors) as look, torch.no_grad():
            outputs, context = forward_of(function, args, kwargs)
        shared = sharing(tensors, tree_leaves(outputs))
        why = look.why or ("it returns or changes memory of its arguments" if len(shared) > 1 or look.written else "")
        if why:
            raise _refusal(name, why)
        title = function.__module__, f"{function.__name__}_apply"
        custom = CustomFunction(partial(_apply, function), title, without_tensors(flat), arguments)
        custom.random, custom.flops = look.random, look.flops
        constant = {id(x) for x in getattr(context, "non_differentiable", ())}
        return self.put(custom, flat, outputs, shared, constant)

    def put(
        self, custom: CustomFunction, flat: list[Any], outputs: Any, shared: list[int], constant: Container[int] = ()
    ) -> Any:
        """Enter a node that calls ``custom`` and returns what is like ``outputs``, which share memory with the tensors
        numbered ``shared`` of ``flat``; no gradient comes from those whose ids are ``constant``."""
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        first = [places[i] for i in shared]
        places = first + [i for i in places if i not in first]
        results, returned = tree_flatten(outputs)
        custom.places, custom.shares = tuple(places), bool(shared)
        custom.shapes = tuple((x.shape, x.dtype) for x in results if isinstance(x, Tensor))
        self.functions.append(custom)
        self.results.append([x for x in results if isinstance(x, Tensor)])
        assert self.operator is not None, "used outside of its context"
        made = iter(self.operator(len(self.functions) - 1, [flat[i] for i in places]))
        return tree_unflatten([_next(made, x, constant) if isinstance(x, Tensor) else x for x in results], returned)

    def settle(self, module: nn.Module) -> None:
        """Let the nodes of a traced graph call the code, and the operator no more."""
        graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
        for node in [node for graph in graphs for node in graph.nodes]:
            if getattr(node.target, "namespace", "") == _LIBRARY and node.target._schema.name.endswith(_NAME):
                custom = self.functions[node.args[0]]
                node.target, node.args = custom, tuple(node.args[1])
                node._rename(custom.__name__)


def without_tensors(flat: list[Any]) -> list[Any]:
    return [None if isinstance(x, Tensor) else x for x in flat]


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Looks ``apply`` up when it is called: during a trace it is another one."""
    return function.apply(*args, **kwargs)


@contextmanager
def keep_functions() -> Iterator[Opaque]:
    """Inside, an operator stands for custom Functions while they are traced."""
    opaque = Opaque()

    def fake(index: int, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.empty_like(x) for x in opaque.results[index]]

    with torch.library._scoped_library(_LIBRARY, "FRAGMENT") as library:
        library.define(f"{_NAME}(int index, Tensor[] tensors) -> Tensor[]")
        torch.library.register_fake(f"{_LIBRARY}::{_NAME}", fake, lib=library)
        opaque.operator = getattr(torch.ops, _LIBRARY).custom_function.default
        yield opaque


def forward_of(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, FunctionCtx]:
    """What the Function's forward returns, by operations that autograd may see, and its context."""
    ctx = FunctionCtx()
    if function.setup_context is not Function.setup_context:
        outputs = function.forward(*args, **kwargs)
        function.setup_context(ctx, args, outputs)
        return outputs, ctx
    ctx.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)  # type: ignore[attr-defined]
    return function.forward(ctx, *args, **kwargs), ctx


class Look(TorchDispatchMode):
    """What code does besides computing its results from its arguments."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.known = {id(x): x for x in given}
        self.inputs = frozenset(self.known)
        self.random = self.written = False
        self.flops = 0
        self.why = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs or {})):
            if isinstance(x, FakeTensor) and id(x) not in self.known:
                self.why = "it reads a parameter, or a value of the model, that is no argument of it"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= any(id(x) in self.inputs for x in tree_leaves(value))
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        self.known.update((id(x), x) for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


@contextmanager
def _plain_fake(tensors: list[Tensor]) -> Iterator[None]:
    """Nothing is recorded; fake tensors stay fake."""
    mode = next((x.fake_mode for x in tensors if isinstance(x, FakeTensor)), None)
    with _disable_current_modes():
        if mode is None:
            yield
        else:
            with mode:
                yield


def sharing(tensors: list[Tensor], results: list[Any]) -> list[int]:
    """Which of ``tensors`` the results share memory with."""
    memory = {x.untyped_storage()._cdata for x in results if isinstance(x, Tensor)}
    return [i for i, x in enumerate(tensors) if x.untyped_storage()._cdata in memory]


def _next(made: Iterator[Tensor], like: Tensor, constant: Container[int]) -> Tensor:
    value = next(made)
    return value.detach() if id(like) in constant else value


def _refusal(name: str, why: str) -> TraceError:
    remedy = "Pass it tensors and let it return new ones, or replace it by operations that differentiate the same way"
    return TraceError("autograd.Function", name, f"its backward would be lost in a graph: {why}", remedy)
