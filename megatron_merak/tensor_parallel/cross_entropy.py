"""Softmax cross entropy over logits whose classes are split over the tensor-parallel ranks.

Each rank passes over its logits once, for a few statistics per row; one exchange hands them to all
ranks, and each computes the loss from them. So the same code serves the stand-alone function and a
segment list whose edge is the exchange.
"""

from torch import Tensor

from .. import ops
from .mappings import Group, group_rank, stack_over_tensor_model_parallel_region


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Group = None, label_smoothing: float = 0.0
) -> Tensor:
    """Loss per token, fp32 [...], of this rank's logits [..., V / n] and target int64 [...] in 0 ..
    V - 1.

    Equal to ``torch.nn.functional.cross_entropy(reduction='none')`` but for label smoothing, which
    spreads over the other V - 1 classes as Megatron-LM documents it. Classes at -inf (a padded
    vocabulary) do not exist: V leaves them out.
    """
    start = logits.shape[-1] * group_rank(group)
    stats = ops.cross_entropy_stats(logits, target, start, smoothing=label_smoothing > 0)
    return ops.loss_of_stats(stack_over_tensor_model_parallel_region(stats, group), label_smoothing)
