"""What a node of a rewritten graph computes with, along each axis of the ranks of a layer."""

import operator
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from torch.fx import Node

from ...segment import LayerAxis
from .nodes import operand

AXES = (LayerAxis.TP, LayerAxis.CP)
LEVELS = (LayerAxis.INNER, LayerAxis.OUTER)  # of a hierarchy of ranks that divide sequences


class NodeKind(IntEnum):
    """What a node computes with: full values, parts of sequences, or shards of another dimension.

    FULL is false. Random numbers of shards, and the gradients that they pass back, differ between
    ranks; of parts every rank draws all random numbers, and uses its part.
    """

    FULL = 0
    PARTS = 1
    SHARDS = 2


def kind(node: Node, axis: LayerAxis) -> NodeKind:
    """Return what a node computes with along an axis; an item of a tuple, like the tuple."""
    if node.target is operator.getitem and axis not in node.meta:
        return kind(operand(node), axis)
    return node.meta.get(axis, NodeKind.FULL)


def kinds(node: Node) -> tuple[NodeKind, ...]:
    """Return what a node computes with along every axis."""
    return tuple(kind(node, axis) for axis in AXES)


def kinds_like(node: Node) -> Mapping[str, Any]:
    """Return the entries of meta that say what a node computes with, for another node."""
    return {axis: kind(node, axis) for axis in AXES}


def over(mark: Node) -> LayerAxis:
    """Return the axis of the ranks that a mark is for."""
    return mark.meta.get("over", LayerAxis.TP)


def is_mark_over(node: Node, mark: object, axis: LayerAxis) -> bool:
    """Whether a node is a mark for the ranks of an axis."""
    return node.target is mark and over(node) is axis
