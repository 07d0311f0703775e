"""Tracing at half the cost: no code for graphs that nobody runs, and of every node's call stack only the line."""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest import mock

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._traceback import CapturedTraceback

_INSIDE = ("/torch/", "/unittest/", "/contextlib.py", "<")


@contextmanager
def quick() -> Iterator[None]:
    """Inside, what is made and kept is not looked through for garbage again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def swift() -> Iterator[None]:
    """Inside, a graph module writes its code when it is first called, where torch writes it whenever its graph changes,
    and a node's ``stack_trace`` names the line of the model that made it instead of all the lines above."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(GraphModule, "recompile", _recompile_when_called))
        patches.enter_context(mock.patch.object(CapturedTraceback, "summary", _line_of_the_model))
        yield


_recompile = GraphModule.recompile


def _recompile_when_called(module: GraphModule) -> None:
    """A graph module's class is its own, so that its ``forward`` can be replaced."""
    generator = module.graph._codegen
    if isinstance(generator, _PyTreeCodeGen):
        module._in_spec, module._out_spec = generator.pytree_info.in_spec, generator.pytree_info.out_spec
    module._code = ""

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return type(self).forward(self, *args, **kwargs)

    type(module).forward = forward  # type: ignore[method-assign]


def _line_of_the_model(captured: CapturedTraceback) -> StackSummary:
    """The innermost line outside of torch, and the innermost ``forward`` around it, without which a tracer discards
    the stack."""
    line: FrameSummary | None = None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not any(part in code.co_filename for part in _INSIDE) and code.co_filename != __file__:
            here = FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False)
            if code.co_name == "forward":
                return StackSummary.from_list([here] if line is None else [here, line])
            line = line or here
        frame = frame.f_back  # type: ignore[assignment]
    return StackSummary()
