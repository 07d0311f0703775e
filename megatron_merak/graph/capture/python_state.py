"""Python values that a forward writes and a graph would keep as they were: seen by comparing them before and after.

A value that is the same after a second forward, and leaves the graph as it is, is a cache. Any other is refused.
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
_DEPTH, _LONGEST, _FEW = 4, 256, 64
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LIBRARIES = ("torch", "transformers", "megatron_merak", "builtins", "peft")
Place = tuple[str, str]  # (a module's name, or "class C" or "file F"), attribute


@dataclass
class Written:
    """What the forward of ``model`` did. before, after: place -> the value, told so that two of them can be compared.
    values: of the places that changed, as they were left. owners: place -> the object that has it.
    """

    model: nn.Module
    before: dict[Place, Any] = field(default_factory=dict)
    after: dict[Place, Any] = field(default_factory=dict)
    values: dict[Place, Any] = field(default_factory=dict)
    owners: dict[Place, Any] = field(default_factory=dict)

    @property
    def changed(self) -> list[Place]:
        return [place for place, told in self.after.items() if self.before.get(place, "(absent)") != told]

    def differing(self, other: "Written") -> list[Place]:
        """Those of this one's changes that another forward left otherwise."""
        return [place for place in other.changed if self.after.get(place) != other.after[place]]

    def replay(self) -> nn.Module:
        """``model`` as its forward left it, of which the exporter keeps nothing; tensors are new ones."""
        model = self.model
        modules = dict(model.named_modules())
        mode = next((p.fake_mode for p in model.parameters()), None)  # type: ignore[attr-defined]
        vars(model)["forward"] = model.forward.__wrapped__

        def fresh(tensor: Tensor) -> Tensor:
            with mode or nullcontext():
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        for (name, key), value in self.values.items():
            if name in modules:
                vars(modules[name])[key] = tree_map_only(Tensor, fresh, value)
        return model

    def restore(self) -> None:
        """Give classes and files back the plain values that they had."""
        for place in self.changed:
            owner, told = self.owners[place], self.before.get(place)
            if not isinstance(owner, nn.Module) and isinstance(told, _PLAIN):
                setattr(owner, place[1], told)


def record(model: nn.Module) -> Written:
    """Let ``model``'s forward tell what it writes: its modules' attributes, and plain globals and class attributes of
    the files that define them.
    """
    written, forward, owners = Written(model), model.forward, list(_owners(model))

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not written.before:
            written.before = {place: told for place, _, told, _ in _tell(owners)}
        result = forward(*args, **kwargs)
        found = list(_tell(owners))
        written.after = {place: told for place, _, told, _ in found}
        changed = frozenset(written.changed)
        written.values = {place: value for place, value, _, _ in found if place in changed}
        written.owners = {place: owner for place, _, _, owner in found if place in changed}
        return result

    model.forward = recorded  # type: ignore[method-assign]
    return written


def refuse(model: nn.Module, first: Written, trace: Callable, program: ExportedProgram) -> None:
    """Raises TraceError if what the forward of ``model`` wrote in ``first`` may change its next one.

    trace: (what was written before, whether to return written tensors) -> (program, Written), a trace of a new twin.
    program: what the first trace gave.
    """
    try:
        changed = first.changed
        if not changed:
            return
        again, second = trace(first, False)
        moving = first.differing(second)
        if not moving and _text(again) == _text(program):
            return
    except TraceError:
        raise
    except Exception as error:  # the exporter's, for a state that it cannot begin from
        moving, reason = [], f"a second forward after it raises {type(error).__name__}"
    else:
        told = (f"{_short(first.after[p])} after one forward and {_short(second.after[p])} after two" for p in moving)
        reason = next(told, "the next forward computes something else")
    finally:
        first.restore()
    held = [p for p in changed if any(isinstance(leaf, Tensor) for leaf in tree_leaves(first.values[p]))]
    if held and not moving and _constant(trace(None, True)[0]):
        return
    name, key = (moving or changed)[0]
    kind, _, rest = name.rpartition(" ")
    what = ".".join(part for part in ("" if kind else type(model).__name__, rest, key) if part)
    where = _line(first.owners[(moving or changed)[0]], key)
    reason = f"its forward writes this{where}, and a captured graph would keep the first value: {reason}"
    raise TraceError("Python value", what, reason, "Make it a buffer or an entry of the batch, or do without it")


def keep_config(model: nn.Module, written: Written) -> None:
    """Write into the config of ``model`` what its forward wrote into a twin's, such as ``problem_type``."""
    place = ("", "config")
    if place not in written.changed or place not in written.before:
        return
    before, after = (dict(told[place][1]) for told in (written.before, written.after))
    for key, told in after.items():
        if isinstance(told, _PLAIN) and before.get(key, "(absent)") != told:
            setattr(model.config, key, getattr(written.values[place], key))


def with_written_tensors(model: nn.Module, written: Written) -> None:
    """Let the forward of ``model`` return the tensors that ``written`` is told of, and nothing else."""
    forward = model.forward

    @functools.wraps(forward)
    def returned(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return tuple(leaf for leaf in tree_leaves(list(written.values.values())) if isinstance(leaf, Tensor))

    model.forward = returned  # type: ignore[method-assign]


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_modules()
    kinds = {type(m): None for m in model.modules() if type(m).__module__.split(".")[0] not in _LIBRARIES}
    for kind in kinds:
        yield f"class {kind.__name__}", kind
    for file in {kind.__module__: None for kind in kinds}:
        if file in sys.modules:
            yield f"file {file}", sys.modules[file]


def tell_modules(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Each Python attribute of the modules of ``model``, told so that it can be compared later. Functions are told by
    their identity, small tensors by their values.
    """
    for place, value, told, _ in _tell([*model.named_modules()]):
        if isinstance(value, FunctionType | BuiltinFunctionType):
            yield place, (getattr(value, "__qualname__", ""), id(value))
        elif isinstance(value, Tensor) and value.numel() <= _FEW and type(value) in (Tensor, nn.Parameter):
            yield place, (told, repr(value.tolist()))
        else:
            yield place, told


def _tell(owners: list[tuple[str, Any]]) -> Iterator[tuple[Place, Any, Any, Any]]:
    """(place, value, the value told, owner)."""
    seen: set[int] = set()
    for name, owner in owners:
        whole = isinstance(owner, nn.Module)
        for key, value in list(vars(owner).items()):
            if (whole and (key in _OF_TORCH or key == "forward")) or key.startswith("__"):
                continue
            if whole or isinstance(value, _PLAIN):
                yield (name, key), value, _told(value, seen, _DEPTH), owner


def _told(value: Any, seen: set[int], depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, float) else value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, _OPAQUE) or depth == 0 or id(value) in seen:
        return type(value).__name__
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    seen.add(id(value))
    if isinstance(value, Mapping):
        items = list(value.items())[:_LONGEST]
        return type(value).__name__, len(value), [(str(k), _told(v, seen, depth - 1)) for k, v in items]
    if isinstance(value, list | tuple | set | frozenset):
        members = sorted(map(repr, value)) if isinstance(value, set | frozenset) else list(value)
        return type(value).__name__, len(value), [_told(v, seen, depth - 1) for v in members[-_LONGEST:]]
    if hasattr(value, "__dict__"):
        return type(value).__name__, [(k, _told(v, seen, depth - 1)) for k, v in list(vars(value).items())]
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text[:1000]


def _text(program: ExportedProgram) -> str:
    """What the program computes, by whatever names, without what nothing reads."""
    graph = program.graph
    kept = _above([node for node in graph.nodes if node.op == "output"])
    for node in graph.nodes:
        if node not in kept and _writes(node) and node.args[0] in kept:
            kept |= _above([node])
    number = {node: f"%{place}" for place, node in enumerate(node for node in graph.nodes if node in kept)}
    constants = {k: v.tolist() for k, v in program.constants.items() if isinstance(v, Tensor) and v.numel() < 64}
    lines = [f"{n.op} {n.target} {map_arg((n.args, n.kwargs), number.get)}" for n in number]
    return _ADDRESS.sub("", "\n".join([*lines, repr(constants)]))


def _writes(node: Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False)) and bool(node.args)


def _above(nodes: list[Node]) -> set[Node]:
    """The nodes and all that they depend on."""
    reached, left = set(nodes), list(nodes)
    while left:
        for node in left.pop().all_input_nodes:
            if node not in reached:
                reached.add(node)
                left.append(node)
    return reached


def _constant(program: ExportedProgram) -> bool:
    """Whether what the program returns depends on neither parameters nor inputs."""
    signature = program.graph_signature
    values = {*signature.inputs_to_parameters, *signature.user_inputs}
    reached = _above([node for node in program.graph.nodes if node.op == "output"])
    return not any(node.op == "placeholder" and node.name in values for node in reached)


def _short(told: Any) -> str:
    text = repr(told)
    return text if len(text) < 60 else text[:57] + "..."


def _line(owner: Any, key: str) -> str:
    """Where the source of ``owner`` assigns to ``key``, as far as that can be found."""
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
        places = [n for n, line in enumerate(lines) if pattern.search(line)]
        outside = [n for n in places if "__init__" not in _function(lines, n)]
        if outside:
            return f" ({file}:{max(first, 1) + outside[-1]}: {lines[outside[-1]].strip()})"
    return ""


def _function(lines: list[str], number: int) -> str:
    return next((line for line in reversed(lines[: number + 1]) if line.lstrip().startswith("def ")), "")
