"""Where a program is: in a micro-batch or not, and by which line of the product or of the model."""

import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from torch.fx import GraphModule, Node

import megatron_merak
from megatron_merak.graph.lowering import emit

_ROOT = Path(megatron_merak.__file__).resolve().parent.parent
_HERE = str(Path(__file__).resolve().parent / "device.py"), str(Path(__file__).resolve())
_TORCH = str(Path(torch.__file__).resolve().parent)
_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")


def _frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, file: str, function: str = "") -> bool:
    return frame.f_code.co_filename.endswith(file) and function in ("", frame.f_code.co_name)


def inside_micro_batch() -> bool:
    """Whether an executor walks its schedule."""
    return any(_is_in(frame, "runtime/executor.py", "run") for frame in _frames())


def at_work() -> bool:
    """Whether it walks its schedule and does not capture, or look at the batch for the right
    capture.
    """
    for frame in _frames():
        if _is_in(frame, "stages/blueprint.py"):
            return False
        if _is_in(frame, "runtime/executor.py", "run"):
            return True
    return False


class GeneratedCode:
    """Finds the line of the model that a line of a program, as it was emitted from a graph, stands
    for.
    """

    def __init__(self):
        self._modules: dict[str, GraphModule] = {}

    def patches(self):
        original = emit.Emitter.add

        def add(emitter: emit.Emitter, node: Node) -> None:
            original(emitter, node)
            emitter._emitted[node].meta["stack_trace"] = node.meta.get("stack_trace", "")

        def module(*arguments) -> GraphModule:
            made = GraphModule(*arguments)
            self._modules[made.forward.__code__.co_filename] = made
            return made

        yield mock.patch.object(emit.Emitter, "add", add)
        yield mock.patch.object(emit, "GraphModule", module)

    def line(self, file: str, number: int) -> str:
        """The model's line; empty for a file that is none of these."""
        if file not in self._modules:
            return ""
        text = linecache.getline(file, number)
        found, nodes = (
            _ASSIGNED.match(text),
            {node.name: node for node in self._modules[file].graph.nodes},
        )
        trace = nodes[found[1]].meta.get("stack_trace", "") if found and found[1] in nodes else ""
        lines = _LINE.findall(trace or "")
        return _told(*lines[-1]) if lines else f"the program: {text.strip()}"


def place(code: GeneratedCode) -> str:
    """The innermost line of the model or of the product; of the forward for a node of a
    backward.
    """
    line = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file in _HERE or file.startswith(_TORCH):
            continue
        line = code.line(file, frame.f_lineno) or _own(file, frame.f_lineno, frame.f_code.co_name)
        if line:
            break
    node = torch._C._current_autograd_node()
    if node is None:
        return line
    trace = "".join(node.metadata.get("traceback_", []))
    forward = [
        found
        for file, number, *_ in _LINE.findall(trace)
        if (found := code.line(file, int(number)))
    ]
    return f"{line}, {node.name()}" + (f" of {forward[-1]}" if forward else "")


def _own(file: str, number: int, function: str) -> str:
    inside = file.startswith(str(_ROOT)) and "<" not in file
    return _told(file, number, function, linecache.getline(file, number).strip()) if inside else ""


def _told(file: str, number: int | str, function: str, text: str) -> str:
    path = Path(file)
    path = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{path}:{number} in {function}: {text.strip()}"
