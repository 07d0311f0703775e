"""Which gathered values are not kept for the backward: linear layers gather them again."""

from collections.abc import Container

from torch.fx import Node

from ... import ops
from ..ir.kinds import is_mark_over, over
from ..ir.marks import all_gather, copy_in
from ..ir.nodes import is_op, operand
from ..ir.operators import facts
from .emit import call_with_sink
from .flow import Flow

_GATHER_AGAIN = (ops.linear, ops.linears, ops.joined_linear)


def is_regathered(flow: Flow, copy: Node, segment: Container[Node]) -> bool:
    """Whether only linear layers of one segment read a gathered value, some for a weight gradient.

    copy:    the ``copy_in`` of an ``all_gather``.
    segment: the nodes of the segment that it enters.
    """
    if copy.target is not copy_in or not is_mark_over(operand(copy), all_gather, over(copy)):
        return False
    if not flow.differentiable[operand(copy)]:
        return False
    needs = [_need(flow, copy, user, segment) for user in copy.users]
    return None not in needs and True in needs


def _need(flow: Flow, x: Node, user: Node, segment: Container[Node]) -> bool | None:
    """Return whether a reader needs the value for a weight gradient; None if it may keep it."""
    if user not in segment:
        return None
    if facts(user).reshapes and user.args[0] is x:
        needs = [_need(flow, user, reader, segment) for reader in user.users]
        return None if None in needs else True in needs
    call = call_with_sink(flow, user)
    if call is not None:
        return True if call.operation in _GATHER_AGAIN and call.args[0] is x else None
    weights = [other for other in user.all_input_nodes if other is not x]
    frozen = not any(map(flow.trains, weights))
    return False if frozen and is_op(user, "linear", "addmm", "mm") else None
