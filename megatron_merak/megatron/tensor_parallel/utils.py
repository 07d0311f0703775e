"""Tensors in equal pieces."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError, LaunchError
from ...tensor_parallel.sequence import gather_single
from ..parallel_state import (
    get_expert_tensor_parallel_group,
    get_tensor_model_parallel_group,
    is_initialized,
)


def group_of(group: dist.ProcessGroup | None, is_expert: bool = False) -> dist.ProcessGroup:
    """Return a group, or the tensor-parallel one of this rank where none is given. Raises
    LaunchError where there is none.
    """
    if group is None and is_initialized():
        name = get_expert_tensor_parallel_group if is_expert else get_tensor_model_parallel_group
        group = name()
    if group is None:
        reason = "no group is given, and those of this process are not initialised"
        remedy = "Give one, or call parallel_state.initialize_model_parallel first"
        raise LaunchError("tensor-parallel group", "(none)", reason, remedy)
    return group


def divided(what: str, extent: int, parts: int) -> int:
    """Return extent / parts. Raises ConfigError for a remainder."""
    if extent % parts:
        reason = f"it does not divide by {parts} ranks"
        raise ConfigError(what, extent, reason, f"Use a multiple of {parts}")
    return extent // parts


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split the last dimension of a tensor into equal parts, views unless they are to be
    contiguous.
    """
    size = divided("last dimension", tensor.shape[-1], num_partitions)
    parts = tensor.split(size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's part [k / n] of a tensor's k elements, in their order.

    new_buffer: whether it is a copy instead of a view.
    """
    group = group_of(tp_group)
    size = tensor.numel() // group.size()
    part = tensor.view(-1).narrow(0, size * group.rank(), size)
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: dist.ProcessGroup | None = None) -> Tensor:
    """All ranks' parts [k / n], one behind the other: [k]."""
    group = group_of(tp_group)
    whole = tensor.detach().new_empty(tensor.numel() * group.size())
    gather_single(whole, tensor.detach().contiguous(), group=group)
    return whole


class VocabUtility:
    """The range of a vocabulary that a rank has, from its first id to behind its last."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Of ranks that have ``per_partition_vocab_size`` ids each."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Of ``world_size`` ranks that divide ``global_vocab_size`` ids."""
        size = divided("vocabulary size", global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)
