"""Faster tracing: no generated code for graphs that never run, and only the model's line of each
node's call stack.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._traceback import CapturedTraceback

from megatron_merak.graph.capture.overriding import overriding

_NOT_OF_THE_MODEL = ("/torch/", "/unittest/", "/contextlib.py", "<")


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which would scan the many objects that a trace keeps again and
    again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def fast_tracing() -> Iterator[None]:
    """Make tracing faster, inside the context.

    Code is generated as in ``compiled_when_called``. The ``stack_trace`` of a node has only the
    line of the model that made it, without the lines above.
    """
    with ExitStack() as patches:
        patches.enter_context(compiled_when_called())
        patches.enter_context(overriding(CapturedTraceback, "summary", _model_lines))
        yield


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Let a graph module generate its code when it is first called, not whenever its graph changes,
    inside the context.
    """
    with overriding(GraphModule, "recompile", _recompile_when_called):
        yield


_recompile = GraphModule.recompile


def _recompile_when_called(module: GraphModule) -> None:
    """Replace ``GraphModule.recompile``. Each graph module has a class of its own, whose
    ``forward`` is replaced.
    """
    generator = module.graph._codegen
    if isinstance(generator, _PyTreeCodeGen):
        module._in_spec = generator.pytree_info.in_spec
        module._out_spec = generator.pytree_info.out_spec
    module._code = ""

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return type(self).forward(self, *args, **kwargs)

    type(module).forward = forward


def _model_lines(captured: CapturedTraceback) -> StackSummary:
    """Return the innermost line outside of torch, and the innermost ``forward`` around it.

    The tracer discards stacks without a ``forward``.
    """
    line: FrameSummary | None = None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            not any(part in code.co_filename for part in _NOT_OF_THE_MODEL)
            and code.co_filename != __file__
        ):
            summary = FrameSummary(
                code.co_filename, frame.f_lineno, code.co_name, lookup_line=False
            )
            if code.co_name == "forward":
                return StackSummary.from_list([summary] if line is None else [summary, line])
            line = line or summary
        frame = frame.f_back  # type: ignore[assignment]
    return StackSummary()
