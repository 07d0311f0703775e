"""What functions of a script read beside their arguments, and whether that has changed.

The code of a function names everything it can read: variables of its closure and module, and attributes. Functions that
it calls by such a name are examined too:

    FACTOR = 2                                  compute_loss reads  FACTOR, scale
    def scale(loss): return loss * FACTOR                           trainer.alpha, args.alpha, model.alpha,
    def compute_loss(self, ...):                                    model.config.alpha, settings.alpha
        return scale(...) * self.args.alpha
"""

import builtins
import logging
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
_OTHERWISE = ("training", "config")  # of a model: seen in its mode, and compared separately
_LARGEST = 10_000  # values in one picture
_WHO = (type, FunctionType, MethodType, ModuleType, logging.Logger)


def surroundings(trainer: Any) -> dict[str, Any]:
    """Return what the ``compute_loss`` and ``compute_loss_func`` of a trainer can read, by name."""
    values: dict[str, Any] = {}
    names: set[str] = set()
    modules: dict[str, ModuleType] = {}
    waiting: list[object] = [trainer.compute_loss, trainer.compute_loss_func]
    known: dict[int, object] = {}  # keeps objects alive, so that their ids stay unique
    while waiting:
        function = waiting.pop()
        if id(function) in known or _foreign(function):
            continue
        known[id(function)] = function
        for name, value in _reads(function):
            if isinstance(value, ModuleType):
                modules[name] = value
            elif isinstance(value, FunctionType | MethodType | partial):
                waiting.append(value)
            elif not isinstance(value, type):
                values[name] = value
        if isinstance(function, FunctionType | MethodType):
            names |= set(_names(function.__code__))
            for each in type(trainer).__mro__:  # methods, and what they call by super()
                waiting += [v for k, v in vars(each).items() if k in names and isinstance(v, FunctionType)]
    holders = {"args": trainer.args, "model": trainer.model, "model.config": getattr(trainer.model, "config", None)}
    for path, holder in holders.items():
        attributes = getattr(holder, "__dict__", {})
        shared = sorted(name for name in names & attributes.keys() if name not in _OTHERWISE)
        values |= {f"{path}.{name}": attributes[name] for name in shared}
    for each in reversed(type(trainer).__mro__):
        if not _foreign(each):
            attributes = {k: v for k, v in vars(each).items() if k in names and not callable(v)}
            values |= {f"{each.__name__}.{k}": v for k, v in attributes.items() if not hasattr(v, "__get__")}
    for path, module in modules.items():
        attributes = {name: v for name in sorted(names) if not callable(v := getattr(module, name, None))}
        values |= {f"{path}.{k}": v for k, v in attributes.items() if v is not None and not isinstance(v, ModuleType)}
    return values


def names_read(function: object) -> set[str]:
    """Return every name that a function may use, with the script's functions and methods that it calls."""
    read: set[str] = set()
    waiting = [function]
    known: list[Any] = []
    while waiting:
        each = waiting.pop()
        inner = getattr(each, "__func__", each)
        if any(inner is other for other in known) or _foreign(each):
            continue
        known.append(inner)
        values = [value for _, value in _reads(each)]
        waiting += [value for value in values if isinstance(value, FunctionType | MethodType | partial)]
        if isinstance(inner, FunctionType):
            names = sorted({*_names(inner.__code__)})
            owners = [x for x in (getattr(each, "__self__", None), *values) if not isinstance(x, _WHO)]
            kinds = [type(owner) for owner in owners if not _foreign(type(owner))]
            methods = [getattr(kind, name, None) for kind in kinds for name in names]
            methods = [method.fget if isinstance(method, property) else method for method in methods]
            waiting += [method for method in methods if isinstance(method, FunctionType)]
            read |= set(names)
    return read


def _foreign(thing: object) -> bool:
    """Whether code belongs to this package or an installed library, which does not change."""
    inner = getattr(thing, "__func__", thing)
    if isinstance(inner, partial):
        return False
    module = getattr(inner, "__module__", None) or ""
    code = getattr(inner, "__code__", None)
    return module.startswith("megatron_merak.") or (code is not None and code.co_filename.startswith(_LIBRARIES))


def _reads(function: object) -> Iterator[tuple[str, Any]]:
    """Return what a function, or a callable object, has beside its arguments."""
    if isinstance(function, partial):
        yield from (
            (f"argument {key}", value) for key, value in (*enumerate(function.args), *function.keywords.items())
        )
        yield "function", function.func
    elif isinstance(function, MethodType):
        yield from _reads(function.__func__)
        if not hasattr(function.__self__, "compute_loss"):
            yield from ((f"{type(function.__self__).__name__}.{k}", v) for k, v in _attributes(function.__self__))
    elif isinstance(function, FunctionType):
        name = function.__name__
        yield from (
            (f"default of {name}", value) for value in (function.__defaults__, function.__kwdefaults__) if value
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
    slots = [name for kind in type(value).__mro__ for name in (vars(kind).get("__of_slots_") or ())]
    of_slots = {name: getattr(value, name) for name in slots if isinstance(name, str) and hasattr(value, name)}
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
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, np.ndarray):
            return id(value), hash(value.tobytes()) if value.size <= _LARGEST else ()
        if isinstance(value, nn.Module):
            return id(value), [(id(each), each._version) for each in (*value.parameters(), *value.buffers())]
        self._left -= 1
        if id(value) in self._known or self._left < 0 or isinstance(value, _WHO):
            return id(value)
        self._known.add(id(value))
        if isinstance(value, Mapping):
            return id(value), len(value), {str(key): self.of(each) for key, each in self._some(value.items())}
        if isinstance(value, list | tuple | deque):
            return id(value), len(value), [self.of(each) for each in self._some(value)]
        if isinstance(value, set | frozenset):
            return id(value), len(value), hash(frozenset(map(id, value)))
        attributes = {name: self.of(each) for name, each in _attributes(value)}
        return id(value), attributes, repr(value) if isinstance(value, Iterator) else ""

    def _some(self, values: Iterable[Any]) -> list[Any]:
        return list(islice(values, max(self._left, 0)))
