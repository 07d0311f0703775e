"""Readable names of units, from the modules that their nodes were traced in."""

import re
from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

from torch.fx import Node

from .operators import facts, flops

ModulePath = tuple[str, ...]


def module_path(node: Node) -> ModulePath:
    """Return the attribute path of the module that a node was traced in; () for the model itself or
    if unknown.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ()
    name = list(stack.values())[-1][0].removeprefix("L['self']").lstrip(".")
    return tuple(re.sub(r"@\d+", "", name).split(".")) if name else ()


def layer_of(node: Node) -> str:
    """Return a key of the innermost repeated module (named by a number), and of the call of it,
    that has a node.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return next(
        (key for key, (name, _) in reversed(stack.items()) if name.rpartition(".")[2].isdigit()), ""
    )


def unit_names(units: Sequence[Sequence[Node]]) -> tuple[str, ...]:
    """Return one name per unit: the innermost module that contains its main work
    ("model.layers.3.self_attn").

    If other units do work of that module too, the submodules that this unit runs are added
    ("layer.3.fc1+fc2"). Units of one module that runs several times are numbered
    ("shared.attention#2").
    """
    common_paths = []
    children = []
    for paths in map(_main_paths, units):
        common = tuple(commonprefix(paths))
        common_paths.append(common)
        children.append(
            tuple(dict.fromkeys(path[len(common)] for path in paths if len(path) > len(common)))
        )
    distinct = dict.fromkeys(zip(common_paths, children, strict=True))
    units_in = Counter(common[:depth] for common, _ in distinct for depth in range(len(common) + 1))
    names = []
    for common, names_below in zip(common_paths, children, strict=True):
        name = ".".join(common)
        if names_below and units_in[common] > 1:
            suffix = (
                "+".join(names_below)
                if len(names_below) <= 3
                else f"{names_below[0]}..{names_below[-1]}"
            )
            name = f"{name}.{suffix}" if name else suffix
        names.append(name or "model")
    names[-1:] = ["loss" if name == "model" else name for name in names[-1:]]
    return _numbered(names)


def _main_paths(unit: Sequence[Node]) -> list[ModulePath]:
    """Return the module paths of a unit's matrix products; without any, of its embeddings, else of
    all nodes.
    """
    for nodes in (
        [node for node in unit if flops(node)],
        [node for node in unit if facts(node).looks_up],
        list(unit),
    ):
        if paths := [module_path(node) for node in nodes]:
            return paths
    return [()]


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    total = Counter(names)
    count = Counter[str]()
    unique = []
    for name in names:
        count[name] += 1
        unique.append(f"{name}#{count[name]}" if total[name] > 1 else name)
    return tuple(unique)


def place(node: Node) -> str:
    """Return the name of the module that a node was traced in, such as
    "model.layers.0.self_attn".
    """
    return ".".join(module_path(node)) or "the model"
