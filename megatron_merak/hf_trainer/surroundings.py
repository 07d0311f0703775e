"""What functions of a script read beside their arguments, and whether that has changed.

The code of a function names everything it can read: variables of its closure and module, and attributes. Functions that
it calls by such a name are examined too:

    FACTOR = 2                                  compute_loss reads  FACTOR, scale
    def scale(loss): return loss * FACTOR                           trainer.alpha, args.alpha, model.alpha,
    def compute_loss(self, ...):                                    model.config.alpha, settings.alpha
        return scale(...) * self.args.alpha

Why not trace again and compare the graphs: a callback may change a value between any two steps, and
a trace takes 0.3 seconds of CPU for a Llama of 2 layers, 2 seconds for one of 1 billion parameters;
this look takes a third of a millisecond. A list of losses that grows is in no graph. Each look is
there for a case:

    names in code   globals and closures: Python tells nobody that they are read
    what they call  self.scale() or helpers.scale(), whose code reads a global, or a class's attribute
    absent ones     getattr(args, "alpha", 1.0), and args.alpha is set later
    contents        a value changed in place: FACTORS["loss"] = 2, next(COUNTER), RECENT.append(1)
"""

import builtins
import logging
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from io import TextIOBase
from itertools import islice
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..stages.guard import GUARDED
from ..stages.withheld import version

PACKAGE = "megatron_merak."
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, PurePath)
# What Python has compiled in, such as os and posixpath, is no file.
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<frozen ")
# Of a model: seen in its mode, compared separately, not the script's.
_OTHERWISE = ("training", "config", *GUARDED)
_CALLED = ("__call__", "forward")  # without being named
_ABSENT = "(absent)"
_LARGEST = 10_000  # values in one picture
_WHO = (type, FunctionType, MethodType, ModuleType, logging.Logger)


@dataclass(frozen=True)
class Surroundings:
    """What functions can read beside their arguments.

    values: by name.
    names:  everything that the code of the functions, and of those that they call, names.
    """

    values: dict[str, Any]
    names: Collection[str]


def surroundings(
    functions: Iterable[object], holders: Mapping[str, object], owner: object = None
) -> Surroundings:
    """Return what ``functions`` can read.

    holders: objects of whose attributes only those count that the code names.
    owner:   an object whose methods call each other, and whose attributes are compared elsewhere.
    """
    values: dict[str, Any] = {}
    names: dict[str, None] = {}
    modules: dict[str, ModuleType] = {}
    kinds = _kinds(owner)  # classes of objects that are read, and classes that are
    waiting = list(functions)
    known: dict[int, object] = {}  # keeps objects alive, so that their ids stay unique
    while waiting:
        function = waiting.pop()
        if id(function) in known or _foreign(function):
            continue
        known[id(function)] = function
        kinds |= _kinds(function) | _kinds(getattr(function, "__self__", None))
        if isinstance(function, FunctionType | MethodType):
            names.update(dict.fromkeys(_names(function.__code__)))
        for name, value in _reads(function, owner):
            if isinstance(value, ModuleType):
                modules[name] = value
            elif isinstance(value, FunctionType | MethodType | partial):
                waiting.append(value)
            else:
                kinds |= _kinds(value)
                if not isinstance(value, type):
                    values[name] = value
        for space in map(vars, (*kinds, *modules.values())):
            waiting += _functions(space, (*names, *_CALLED))
    for kind in kinds:
        values = _plain(kind.__name__, vars(kind), names) | values
    for path, module in modules.items():
        values |= _plain(path, {k: getattr(module, k) for k in names if hasattr(module, k)}, names)
    for path, holder in holders.items():
        attributes = getattr(holder, "__dict__", {})
        values |= {f"{path}.{k}": attributes.get(k, _ABSENT) for k in names if k not in _OTHERWISE}
    return Surroundings(values, names)


def _kinds(value: object) -> dict[type, None]:
    """Return the classes whose methods and attributes can be read of a class or of an object, by
    name.
    """
    if isinstance(value, (*_PLAIN, FunctionType, MethodType, ModuleType, logging.Logger)):
        return {}
    kind = value if isinstance(value, type) else type(value)
    return {each: None for each in kind.__mro__ if not _foreign(each)}


def _functions(space: Mapping[str, Any], names: Collection[str]) -> list[FunctionType]:
    """Return the functions and properties of a class or module that have these names."""
    found = [space[name] for name in names if name in space]
    return [each for each in map(_code_of, found) if isinstance(each, FunctionType)]


def _code_of(member: Any) -> Any:
    """Return the function of a property, a static method or a class method; any other member as it
    is.
    """
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def _plain(path: str, attributes: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the attributes of a class or module that have these names and are no code."""
    found = {name: attributes[name] for name in names if name in attributes}
    return {
        f"{path}.{name}": value
        for name, value in found.items()
        if not (callable(value) or hasattr(value, "__get__") or isinstance(value, ModuleType))
    }


def _foreign(thing: object) -> bool:
    """Whether code belongs to this package or an installed library, which does not change."""
    inner = getattr(thing, "__func__", thing)
    if isinstance(inner, partial):
        return False
    module = getattr(inner, "__module__", None) or ""
    code = getattr(inner, "__code__", None)
    return module.startswith(PACKAGE) or (
        code is not None and code.co_filename.startswith(_LIBRARIES)
    )


def _reads(function: object, owner: object) -> Iterator[tuple[str, Any]]:
    """Return what a function, or a callable object, has beside its arguments."""
    if isinstance(function, partial):
        yield from (
            (f"argument {key}", value)
            for key, value in (*enumerate(function.args), *function.keywords.items())
        )
        yield "function", function.func
    elif isinstance(function, MethodType):
        yield from _reads(function.__func__, owner)
        if function.__self__ is not owner:
            yield from (
                (f"{type(function.__self__).__name__}.{k}", v)
                for k, v in _attributes(function.__self__)
            )
    elif isinstance(function, FunctionType):
        name = function.__name__
        yield from (
            (f"default of {name}", value)
            for value in (function.__defaults__, function.__kwdefaults__)
            if value
        )
        yield from ((f"{name}.{k}", v) for k, v in vars(function).items())
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((k, cell.cell_contents) for k, cell in cells if k != "__class__")
        for k in _names(function.__code__):
            if k in function.__globals__ and not hasattr(builtins, k):
                yield k, function.__globals__[k]
    elif callable(function) and not isinstance(function, type):
        yield from ((f"{type(function).__name__}.{k}", v) for k, v in _attributes(function))
        if isinstance(call := getattr(type(function), "__call__", None), FunctionType):  # noqa: B004
            yield "__call__", call


def _names(code: CodeType) -> Iterator[str]:
    """Return the names that code uses, including constants for ``getattr``."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _attributes(value: object) -> Iterable[tuple[str, Any]]:
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in declared for name in ((names,) if isinstance(names, str) else names)]
    slots = [name for name in slots if name != "__weakref__"]  # which says who holds the object
    of_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return (of_slots | getattr(value, "__dict__", {})).items()


class Picture:
    """Fingerprints of values: plain values themselves, else their identity and contents.

    Of large values, and of those seen before, only the identity counts.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._left = _LARGEST

    def of(self, value: object) -> Any:
        if isinstance(value, _PLAIN):
            return value if value == value else "nan"
        if isinstance(value, TextIOBase):
            return ""  # it is written to; and who silences a library puts another in its place
        if isinstance(value, Tensor):
            return id(value), version(value)
        if isinstance(value, np.ndarray):
            return id(value), hash(value.tobytes()) if value.size <= _LARGEST else ()
        if isinstance(value, nn.Module):
            tensors = [
                (id(each), version(each)) for each in (*value.parameters(), *value.buffers())
            ]
            if tensors:
                return id(value), tensors
        self._left -= 1
        if id(value) in self._known or self._left < 0 or isinstance(value, _WHO):
            return id(value)
        self._known.add(id(value))
        if isinstance(value, Mapping):
            return (
                id(value),
                len(value),
                {str(key): self.of(each) for key, each in self._some(value.items())},
            )
        if isinstance(value, list | tuple | deque):
            return id(value), len(value), [self.of(each) for each in self._some(value)]
        if isinstance(value, set | frozenset):
            return id(value), len(value), hash(frozenset(map(id, value)))
        mode = "training" if isinstance(value, nn.Module) else None
        attributes = {name: self.of(each) for name, each in _attributes(value) if name != mode}
        return id(value), attributes, repr(value) if isinstance(value, Iterator) else ""

    def _some(self, values: Iterable[Any]) -> list[Any]:
        return list(islice(values, max(self._left, 0)))
