"""Attributes of parameters that say how they are sharded, under Megatron-LM's names."""

import torch.distributed as dist
from torch import Tensor

from ..parallel_state import get_tensor_model_parallel_rank

_DEFAULTS: tuple[tuple[str, object], ...] = (
    ("expert_tp", False),
    ("is_qkv", False),
    ("tensor_model_parallel", False),
    ("partition_dim", -1),
    ("partition_stride", 1),
)


def param_is_not_tensor_parallel_duplicate(
    param: Tensor, tp_group: dist.ProcessGroup | None = None
) -> bool:
    """Whether a parameter counts on this rank: it is a shard, or this is the first of the ranks
    that all have it.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    rank = get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return rank == 0


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Note how a parameter is sharded, which must not be noted yet.

    is_parallel: whether it is.
    dim:         the dimension along which it is.
    stride:      number of parts, sharded each on its own, that lie one behind the other in it.
    """
    for name, _ in _DEFAULTS:
        assert not hasattr(tensor, name), f"{name} is set already"
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Note of a parameter that it is not sharded, unless something else is noted."""
    for name, value in _DEFAULTS:
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Note of one parameter what is noted of another."""
    for name, _ in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))
