"""Readable names of units, from the modules whose work they do."""

import re
from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

from torch.fx import Node

from .nodes import EMBEDDINGS, flops, is_op

Path = tuple[str, ...]


def module_path(node: Node) -> Path:
    """The attributes that lead to the module that a node was traced in; () for the model itself or unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ()
    name = list(stack.values())[-1][0].removeprefix("L['self']").lstrip(".")
    return tuple(re.sub(r"@\d+", "", name).split(".")) if name else ()


def layer_of(node: Node) -> str:
    """The innermost of the repeated modules, named by numbers, that a node was traced in, and which call of it."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((key for key, (name, _) in reversed(stack.items()) if name.rpartition(".")[2].isdigit()), "")


def unit_names(units: Sequence[Sequence[Node]]) -> tuple[str, ...]:
    """One name per unit: the innermost module that does all its heavy work ("model.layers.3.self_attn").

    Where that module does work of other units too, the parts of it that this unit runs are added ("layer.3.fc1+fc2").
    Units of one module that runs several times are numbered ("shared.attention#2").
    """
    homes, parts = [], []
    for paths in map(_work, units):
        home = tuple(commonprefix(paths))
        homes.append(home)
        parts.append(tuple(dict.fromkeys(path[len(home)] for path in paths if len(path) > len(home))))
    distinct = dict.fromkeys(zip(homes, parts, strict=True))
    tenants = Counter(home[:depth] for home, _ in distinct for depth in range(len(home) + 1))
    names = []
    for home, rooms in zip(homes, parts, strict=True):
        name = ".".join(home)
        if rooms and tenants[home] > 1:
            chosen = "+".join(rooms) if len(rooms) <= 3 else f"{rooms[0]}..{rooms[-1]}"
            name = f"{name}.{chosen}" if name else chosen
        names.append(name or "model")
    names[-1:] = ["loss" if name == "model" else name for name in names[-1:]]
    return _numbered(names)


def _work(unit: Sequence[Node]) -> list[Path]:
    """Where the products of a unit are, else its embeddings, else any of its nodes."""
    for chosen in (
        [node for node in unit if flops(node)],
        [node for node in unit if is_op(node, *EMBEDDINGS)],
        list(unit),
    ):
        if paths := [module_path(node) for node in chosen]:
            return paths
    return [()]


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    total, seen, unique = Counter(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        unique.append(f"{name}#{seen[name]}" if total[name] > 1 else name)
    return tuple(unique)


def place(node: Node) -> str:
    """The module that a node belongs to: "model.layers.0.self_attn"."""
    return ".".join(module_path(node)) or "the model"
