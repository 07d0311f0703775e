"""Which gathered values are not kept for the backward: linear layers and attention, as its keys and
values, gather them again.
"""

from collections.abc import Callable, Container, Iterator
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from ... import ops
from ..ir.kinds import is_mark_over, over
from ..ir.marks import all_gather, copy_in
from ..ir.nodes import is_op, operand
from ..ir.operators import facts
from ..sharding import local
from .emit import call_with_sink
from .flow import Flow

_GATHER_AGAIN = (
    ops.linear,
    ops.linears,
    ops.joined_linear,
    ops.adapted_linear,
    ops.adapted_linears,
    ops.fp8_linear,
    ops.fp8_linears,
)
_ADAPTED = (ops.adapted_linear, ops.adapted_linears)
# of frozen weights
_KEEP_NO_INPUT = "linear addmm mm linears joined_linear fp8_linear fp8_linears".split()
# what moves all values of its first argument into new memory -> the same, with a sink
_MOVES = MappingProxyType({local.by_position: local.by_position_unkept})


def is_regathered(flow: Flow, copy: Node, segment: Container[Node]) -> bool:
    """Whether only linear layers and attention of one segment read a gathered value, some for their
    backward.

    copy:    the ``copy_in`` of an ``all_gather``.
    segment: the nodes of the segment that it enters.
    """
    if copy.target is not copy_in or not is_mark_over(operand(copy), all_gather, over(copy)):
        return False
    if not flow.differentiable[operand(copy)]:
        return False
    needs = [_need(flow, copy, user, segment) for user in copy.users]
    return None not in needs and True in needs


def without_gathered(copy: Node) -> dict[Node, Callable[..., Any]]:
    """Return what is called, with a sink, by nodes that read a value which is gathered again; those
    of linear layers are not among them.
    """
    calls = _MOVES | ops.UNKEPT
    return {node: calls[node.target] for node in _readers(copy) if node.target in calls}


def _readers(x: Node) -> Iterator[Node]:
    """Yield what reads a value, or another view of it."""
    for user in x.users:
        yield user
        if _keeps_values(user):
            yield from _readers(user)


def _keeps_values(node: Node) -> bool:
    """Whether a node returns all values of its first argument, and no others."""
    return is_op(node, "view", "reshape", "transpose", "unsqueeze") or node.target in _MOVES


def _need(flow: Flow, x: Node, user: Node, segment: Container[Node]) -> bool | None:
    """Return whether a reader needs the value for its backward; None if it may keep it."""
    if user not in segment:
        return None
    if facts(user).reshapes and user.args[0] is x:
        needs = [_need(flow, user, reader, segment) for reader in user.users]
        return None if None in needs else True in needs
    if _is_attended(flow, x, user, segment):
        return True
    call = call_with_sink(flow, user)
    if call is not None and call.operation in _ADAPTED and call.args[3]:
        return None if x in call.args[3] else False  # of the input only A would take a gradient
    if call is not None:
        return True if call.operation in _GATHER_AGAIN and call.args[0] is x else None
    weights = [other for other in user.all_input_nodes if other is not x]
    frozen = not any(map(flow.trains, weights))
    return False if frozen and is_op(user, *_KEEP_NO_INPUT) else None


def _is_attended(flow: Flow, x: Node, user: Node, segment: Container[Node]) -> bool:
    """Whether a value is read as keys or values of attention only, perhaps through other views."""
    if user not in segment or user in flow.written:
        return False
    if user.target in ops.UNKEPT:
        return x in user.args[1:3] and x not in (user.args[0], *user.args[3:])
    if not _keeps_values(user) or is_op(user, "view", "reshape") and facts(x).transposes:
        return False  # the latter may copy
    return bool(user.users) and all(
        _is_attended(flow, user, reader, segment) for reader in user.users
    )
