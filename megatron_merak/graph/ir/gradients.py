"""Which operations pass a gradient back: one definition for capture, sharding and lowering."""

import torch
from torch import Tensor
from torch.fx import Node

from .operators import facts


def passes_gradient(node: Node) -> bool:
    """Whether a gradient of a node's result flows back to its differentiable inputs."""
    if facts(node).stops_gradient:
        return False
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
        return False
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
