"""Functions that a script has set on a model, for a copy of the model.

    original = model.forward
    model.forward = lambda **batch: scaled(original(**batch))     original is a method of the model, not of its copy

``copy.deepcopy`` returns functions as they are, so those of a copy would still call the model.
"""

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def rebind_functions(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let the functions that are attributes of the modules of a copy call the copy in place of the
    model.

    model:  the copy.
    copies: by the id of an object, its copy: what ``copy.deepcopy`` has as memo.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType | MethodType):
                vars(module)[name] = _rebound(value, copies, {})


def _rebound(value: Any, copies: Mapping[int, Any], done: dict[int, Any]) -> Any:
    """Return ``value`` with the copies of what it refers to; itself if it refers to none.

    done: by id, what was rebound before or is being rebound, since functions may refer to
          themselves.
    """
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        owner = _rebound(value.__self__, copies, done)
        function = _rebound(value.__func__, copies, done)
        return (
            value
            if owner is value.__self__ and function is value.__func__
            else MethodType(function, owner)
        )
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    done[id(value)] = value
    cells = [_rebound_cell(cell, copies, done) for cell in value.__closure__]
    if all(one is other for one, other in zip(cells, value.__closure__, strict=True)):
        return value
    rebound = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    rebound.__kwdefaults__ = value.__kwdefaults__
    vars(rebound).update(vars(value))
    done[id(value)] = rebound
    return rebound


def _rebound_cell(cell: CellType, copies: Mapping[int, Any], done: dict[int, Any]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # it is empty
        return cell
    rebound = _rebound(value, copies, done)
    return cell if rebound is value else CellType(rebound)
