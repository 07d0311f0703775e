"""Cross entropy of logits whose classes are divided over tensor-parallel ranks."""

import torch.distributed as dist
from torch import Tensor

from ... import tensor_parallel as plain
from .utils import group_of


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Loss per token, fp32 [s, b], of this rank's logits [s, b, V / n] and target int64 [s, b].

    label_smoothing: the part of a target that all other classes share. Megatron-LM's own function
                     spreads it over the classes of each rank alone where there are several ranks,
                     so that these differ; here it is spread over all classes on any number.
    """
    group = group_of(tp_group)
    return plain.vocab_parallel_cross_entropy(vocab_parallel_logits, target, group, label_smoothing)
