"""Custom autograd Functions as single nodes of a graph, so that their gradient stays their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from megatron_merak.errors import TraceError

_LIBRARY, _NAME = "megatron_merak", "custom_function"


class CustomFunction:
    """``function.apply`` as a callable of its tensors alone: what a node of a captured graph calls.

    rest: every argument, None in place of tensors; places: where among them each tensor goes. A call returns the
    list of tensors in what the Function returns. random: its forward draws random numbers. shares: what it returns may
    share memory with the first tensor.
    """

    def __init__(self, function: type[Function], rest: list[Any], places: tuple[int, ...], arguments: TreeSpec):
        self.function, self.rest, self.places, self.arguments = function, rest, places, arguments
        self.random = self.shares = False
        # What torch.fx calls it in a graph and in generated code.
        self.__name__ = self.__qualname__ = f"{function.__name__}_apply"
        self.__module__ = function.__module__

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self.filled(tensors)
        return [x for x in tree_leaves(self.function.apply(*args, **kwargs)) if isinstance(x, Tensor)]

    def filled(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of ``apply``."""
        flat = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        return tree_unflatten(flat, self.arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CustomFunction":
        return self


@dataclass(eq=False)
class Opaque:
    """The custom Functions that a trace keeps as they are, and what each returns, without values."""

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
        places = tuple(i for i, x in enumerate(flat) if isinstance(x, Tensor))
        tensors = [flat[i] for i in places]
        with _plain_fake(tensors):
            outputs, look, ctx = _look(function, args, kwargs, tensors)
        if look.why:
            raise _refusal(name, look.why)
        results, returned = tree_flatten(outputs)
        shared = _shared(tensors, results)
        if len(shared) > 1 or look.written:
            raise _refusal(name, "it returns or changes memory of its arguments")
        order = sorted(range(len(places)), key=lambda i: i not in shared)
        rest = [None if isinstance(x, Tensor) else x for x in flat]
        custom = CustomFunction(function, rest, tuple(places[i] for i in order), arguments)
        custom.random, custom.shares = look.random, bool(shared)
        self.functions.append(custom)
        self.results.append([x for x in results if isinstance(x, Tensor)])
        assert self.operator is not None, "used outside of its context"
        made = iter(self.operator(len(self.functions) - 1, [tensors[i] for i in order]))
        constant = {id(x) for x in getattr(ctx, "non_differentiable", ())}
        return tree_unflatten([_next(made, x, constant) if isinstance(x, Tensor) else x for x in results], returned)

    def settle(self, module: nn.Module) -> None:
        """Let the nodes of a traced graph call the Functions, and the operator no more."""
        graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
        for node in [node for graph in graphs for node in graph.nodes]:
            if getattr(node.target, "namespace", "") == _LIBRARY and node.target._schema.name.endswith(_NAME):
                custom = self.functions[node.args[0]]
                node.target, node.args = custom, tuple(node.args[1])
                node._rename(custom.__name__)


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


class _Look(TorchDispatchMode):
    """What a forward does besides computing its results from its arguments."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.known = {id(x): x for x in given}
        self.inputs = frozenset(self.known)
        self.random = self.written = False
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
        self.known.update((id(x), x) for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


def _look(
    function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[Any, _Look, FunctionCtx]:
    with _Look(tensors) as look, torch.no_grad():
        outputs, ctx = forward_of(function, args, kwargs)
    return outputs, look, ctx


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


def _shared(tensors: list[Tensor], results: list[Any]) -> list[int]:
    """Which of ``tensors`` the results share memory with."""
    memory = {x.untyped_storage()._cdata for x in results if isinstance(x, Tensor)}
    return [i for i, x in enumerate(tensors) if x.untyped_storage()._cdata in memory]


def _next(made: Iterator[Tensor], like: Tensor, constant: set[int]) -> Tensor:
    value = next(made)
    return value.detach() if id(like) in constant else value


def _refusal(name: str, why: str) -> TraceError:
    remedy = "Pass it tensors and let it return new ones, or replace it by operations that differentiate the same way"
    return TraceError("autograd.Function", name, f"its backward would be lost in a graph: {why}", remedy)
