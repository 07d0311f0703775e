"""Detects Python state that a forward changes, which a graph would not, by snapshots before and
after a trace.

State that a second forward leaves as it is, and that does not change the graph, is a cache. Any
other is refused.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_merak.errors import TraceError

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OPAQUE = (nn.Module, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_DEPTH = 4
_MAX_ITEMS = 256
_MAX_ELEMENTS = 64
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LIBRARIES = ("torch", "transformers", "megatron_merak", "builtins", "peft")
AttributeKey = tuple[str, str]  # (a module's name, or "class C" or "file F"), attribute


@dataclass
class StateChanges:
    """The Python attributes that the forward of ``model`` changed.

    before, after: attribute -> a snapshot of its value that can be compared.
    values:        attribute -> its value after the forward, of those that changed.
    owners:        attribute -> the object that has it, of those that changed.
    """

    model: nn.Module
    before: dict[AttributeKey, Any] = field(default_factory=dict)
    after: dict[AttributeKey, Any] = field(default_factory=dict)
    values: dict[AttributeKey, Any] = field(default_factory=dict)
    owners: dict[AttributeKey, Any] = field(default_factory=dict)

    @property
    def changed(self) -> list[AttributeKey]:
        before = self.before
        return [
            name
            for name, snapshot in self.after.items()
            if before.get(name, "(absent)") != snapshot
        ]

    def differing(self, other: "StateChanges") -> list[AttributeKey]:
        """Return the attributes that another forward changed to other values than this one."""
        return [
            attribute
            for attribute in other.changed
            if self.after.get(attribute) != other.after[attribute]
        ]

    def replay(self) -> nn.Module:
        """Return ``model`` as its forward left it, with new tensors; the exporter undoes such
        changes.
        """
        model = self.model
        modules = dict(model.named_modules())
        mode = next((p.fake_mode for p in model.parameters()), None)  # type: ignore[attr-defined]
        # without `recorded`, which would write into the changes that it begins from
        model.__dict__["forward"] = getattr(model.forward, "__wrapped__")  # noqa: B009

        def fresh(tensor: Tensor) -> Tensor:
            with mode or nullcontext():
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        for (name, key), value in self.values.items():
            if name in modules:
                modules[name].__dict__[key] = tree_map_only(Tensor, fresh, value)
        return model

    def restore(self) -> None:
        """Restore the plain values of class attributes and globals."""
        for attribute in self.changed:
            owner = self.owners[attribute]
            snapshot = self.before.get(attribute)
            if not isinstance(owner, nn.Module) and isinstance(snapshot, _PLAIN):
                setattr(owner, attribute[1], snapshot)


def record_changes(model: nn.Module) -> StateChanges:
    """Make the forward of ``model`` record what it changes.

    That is attributes of its modules, and plain globals and class attributes in the files that
    define these.
    """
    changes = StateChanges(model)
    forward = model.forward
    owners = list(_owners(model))

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not changes.before:
            changes.before = {
                attribute: snapshot for attribute, _, snapshot, _ in _snapshots(owners)
            }
        result = forward(*args, **kwargs)
        snapshots = list(_snapshots(owners))
        changes.after = {attribute: snapshot for attribute, _, snapshot, _ in snapshots}
        changed = frozenset(changes.changed)
        changes.values = {
            attribute: value for attribute, value, _, _ in snapshots if attribute in changed
        }
        changes.owners = {
            attribute: owner for attribute, _, _, owner in snapshots if attribute in changed
        }
        return result

    model.forward = recorded
    return changes


def refuse_changes(
    model: nn.Module, first: StateChanges, trace: Callable, program: ExportedProgram
) -> None:
    """Raise TraceError if what the forward of ``model`` changed in ``first`` may affect its next
    forward.

    trace:   function (changes to begin from, whether to return changed tensors) -> (program,
             StateChanges) that traces a new fake model.
    program: the program of the first trace.
    """
    try:
        changed = first.changed
        if not changed:
            return
        second_program, second = trace(first, False)
        unstable = first.differing(second)
        if not unstable and _normalized(second_program) == _normalized(program):
            return
    except TraceError:
        raise
    except Exception as error:  # the exporter fails for a state that it cannot begin from
        unstable = []
        reason = f"a second forward after it raises {type(error).__name__}"
    else:
        pairs = ((_shortened(first.after[p]), _shortened(second.after[p])) for p in unstable)
        reasons = (f"{once} after one forward and {twice} after two" for once, twice in pairs)
        reason = next(reasons, "the next forward computes something else")
    finally:
        first.restore()
    with_tensors = [
        p for p in changed if any(isinstance(leaf, Tensor) for leaf in tree_leaves(first.values[p]))
    ]
    if with_tensors and not unstable and _is_constant(trace(None, True)[0]):
        return
    name, key = (unstable or changed)[0]
    kind, _, module = name.rpartition(" ")
    what = ".".join(part for part in ("" if kind else type(model).__name__, module, key) if part)
    where = _assignment_line(first.owners[(unstable or changed)[0]], key)
    reason = (
        f"its forward writes this{where}, and a captured graph would keep the first value: {reason}"
    )
    raise TraceError(
        "Python value", what, reason, "Make it a buffer or an entry of the batch, or do without it"
    )


def keep_config(model: nn.Module, changes: StateChanges) -> None:
    """Copy what the forward wrote into the fake model's config, such as ``problem_type``, to that
    of ``model``.
    """
    attribute = ("", "config")
    if attribute not in changes.changed or attribute not in changes.before:
        return
    before, after = (dict(snapshot[attribute][1]) for snapshot in (changes.before, changes.after))
    for key, snapshot in after.items():
        if isinstance(snapshot, _PLAIN) and before.get(key, "(absent)") != snapshot:
            setattr(model.config, key, getattr(changes.values[attribute], key))


def return_changed_tensors(model: nn.Module, changes: StateChanges) -> None:
    """Make the forward of ``model`` return the tensors in ``changes``, and nothing else."""
    forward = model.forward

    @functools.wraps(forward)
    def changed_tensors(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return tuple(
            leaf for leaf in tree_leaves(list(changes.values.values())) if isinstance(leaf, Tensor)
        )

    model.forward = changed_tensors


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_modules()
    kinds = {
        type(m): None for m in model.modules() if type(m).__module__.split(".")[0] not in _LIBRARIES
    }
    for kind in kinds:
        yield f"class {kind.__name__}", kind
    for file in {kind.__module__: None for kind in kinds}:
        if file in sys.modules:
            yield f"file {file}", sys.modules[file]


def snapshot_modules(model: nn.Module) -> Iterator[tuple[AttributeKey, Any]]:
    """Yield a comparable snapshot of each Python attribute of the modules of ``model``.

    Functions are compared by identity, small tensors by value.
    """
    for attribute, value, snapshot, _ in _snapshots([*model.named_modules()]):
        if isinstance(value, FunctionType | BuiltinFunctionType):
            yield attribute, (getattr(value, "__qualname__", ""), id(value))
        elif (
            isinstance(value, Tensor)
            and value.numel() <= _MAX_ELEMENTS
            and type(value) in (Tensor, nn.Parameter)
        ):
            yield attribute, (snapshot, repr(value.tolist()))
        else:
            yield attribute, snapshot


def _snapshots(owners: list[tuple[str, Any]]) -> Iterator[tuple[AttributeKey, Any, Any, Any]]:
    """Yield (attribute, value, snapshot, owner)."""
    visited: set[int] = set()
    for name, owner in owners:
        is_module = isinstance(owner, nn.Module)
        for key, value in list(vars(owner).items()):
            if (is_module and (key in _OF_TORCH or key == "forward")) or key.startswith("__"):
                continue
            if is_module or isinstance(value, _PLAIN):
                yield (name, key), value, _snapshot(value, visited, _DEPTH), owner


def _snapshot(value: Any, visited: set[int], depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, float) else value  # nan is not equal to itself
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, _OPAQUE) or depth == 0 or id(value) in visited:
        return type(value).__name__
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    visited.add(id(value))
    if isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return (
            type(value).__name__,
            len(value),
            [(str(k), _snapshot(v, visited, depth - 1)) for k, v in items],
        )
    if isinstance(value, list | tuple | set | frozenset):
        members = sorted(map(repr, value)) if isinstance(value, set | frozenset) else list(value)
        return (
            type(value).__name__,
            len(value),
            [_snapshot(v, visited, depth - 1) for v in members[-_MAX_ITEMS:]],
        )
    if hasattr(value, "__dict__"):
        return type(value).__name__, [
            (k, _snapshot(v, visited, depth - 1)) for k, v in list(vars(value).items())
        ]
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text[:1000]


def _normalized(program: ExportedProgram) -> str:
    """Return the live code of a program as text that does not depend on node names."""
    graph = program.graph
    live = _with_dependencies([node for node in graph.nodes if node.op == "output"])
    for node in graph.nodes:
        if node not in live and _writes(node) and node.args[0] in live:
            live |= _with_dependencies([node])
    number = {
        node: f"%{index}" for index, node in enumerate(node for node in graph.nodes if node in live)
    }
    constants = {
        k: v.tolist()
        for k, v in program.constants.items()
        if isinstance(v, Tensor) and v.numel() < 64
    }
    lines = [f"{n.op} {n.target} {map_arg((n.args, n.kwargs), number.get)}" for n in number]
    return _ADDRESS.sub("", "\n".join([*lines, repr(constants)]))


def _writes(node: Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False)) and bool(
        node.args
    )


def _with_dependencies(nodes: list[Node]) -> set[Node]:
    """Return the nodes and all that they depend on."""
    reached = set(nodes)
    pending = list(nodes)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in reached:
                reached.add(node)
                pending.append(node)
    return reached


def _is_constant(program: ExportedProgram) -> bool:
    """Whether what a program returns depends on neither parameters nor inputs."""
    signature = program.graph_signature
    values = {*signature.inputs_to_parameters, *signature.user_inputs}
    reached = _with_dependencies([node for node in program.graph.nodes if node.op == "output"])
    return not any(node.op == "placeholder" and node.name in values for node in reached)


def _shortened(snapshot: Any) -> str:
    text = repr(snapshot)
    return text if len(text) < 60 else text[:57] + "..."


def _assignment_line(owner: Any, key: str) -> str:
    """Return where the source of ``owner`` assigns to ``key``, "" if that cannot be found."""
    name = rf"\b{re.escape(key)}\b"
    assigned = rf"{name}\s*(\[.*\]\s*|\.\w+\s*)?([-+*/|&%]|//)?=[^=]"
    pattern = re.compile(rf"{assigned}|{name}.*\.(append|add|update)\(|next\(.*{name}")
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    for each in getattr(kind, "__mro__", (kind,)):
        try:
            lines, first = inspect.getsourcelines(each)
            file = inspect.getsourcefile(each)
        except (OSError, TypeError):
            continue
        matches = [n for n, line in enumerate(lines) if pattern.search(line)]
        outside_init = [n for n in matches if "__init__" not in _function(lines, n)]
        if outside_init:
            return (
                f" ({file}:{max(first, 1) + outside_init[-1]}: {lines[outside_init[-1]].strip()})"
            )
    return ""


def _function(lines: list[str], number: int) -> str:
    return next(
        (line for line in reversed(lines[: number + 1]) if line.lstrip().startswith("def ")), ""
    )
