"""Softmax cross entropy over logits whose classes are split over the tensor-parallel ranks.

Three steps with a collective between each two: the maximum (max), the sums per row (sum), the loss. So the same code
serves the stand-alone function and a segment list whose edges are the collectives.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .mappings import Group, group_rank, group_size, reduce_from_tensor_model_parallel_region


def local_max(logits: Tensor) -> Tensor:
    """logits [..., v] -> fp32 [...]: the largest of this rank's classes; to be reduced by max."""
    return logits.detach().amax(-1).float()


class _LocalTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, maximum, target, start, smoothing):
        exponents = torch.sub(logits, maximum.unsqueeze(-1))
        local = target - start
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill_(outside, 0).unsqueeze(-1)
        chosen = exponents.gather(-1, local).squeeze(-1).masked_fill_(outside, 0.0)
        masked = exponents == -torch.inf if smoothing else None
        extra = [exponents.masked_fill(masked, 0.0).sum(-1), masked.logical_not().sum(-1)] if smoothing else []
        exponents.exp_()
        ctx.save_for_backward(exponents, local, outside, masked)
        ctx.dtype, ctx.consumed = logits.dtype, False
        return torch.stack([exponents.sum(-1), chosen, *extra])

    @staticmethod
    def backward(ctx, grad):
        exponents, local, outside, masked = ctx.saved_tensors
        if ctx.consumed:
            raise RuntimeError("vocab_parallel_cross_entropy turns what it saved into the gradient: one backward only")
        ctx.consumed = True
        grad_logits = exponents.mul_(grad[0].unsqueeze(-1))
        grad_logits.scatter_add_(-1, local, grad[1].masked_fill(outside, 0.0).unsqueeze(-1))
        if masked is not None:
            grad_logits.add_(grad[2].unsqueeze(-1)).masked_fill_(masked, 0.0)
        return grad_logits.to(ctx.dtype), None, None, None, None


def local_terms(logits: Tensor, maximum: Tensor, target: Tensor, start: int, smoothing: bool = False) -> Tensor:
    """This rank's part of each row's sums, to be reduced by sum.

    logits [..., v] are classes start .. start + v; masked classes hold -inf. maximum fp32 [...] over all ranks, target
    int64 [...]. Returns fp32 [2, ...]: sum of exp(x - max) and the target's x - max; with ``smoothing`` [4, ...]: also
    the sum of x - max over the classes that are not masked, and their number. The backward may run once: it turns the
    saved exponentials into the gradient in place.
    """
    return _LocalTerms.apply(logits, maximum, target, start, smoothing)


def loss_from_terms(terms: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """fp32 [2 or 4, ...] summed over ranks -> loss [...]; smoothing spreads over the other unmasked classes."""
    log_sum = terms[0].log()
    loss = log_sum - terms[1]
    if label_smoothing > 0:
        others = terms[3] - 1
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - (terms[2] - terms[1]) / others)
    return loss


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Group = None, label_smoothing: float = 0.0
) -> Tensor:
    """Loss per token, fp32 [...], of this rank's logits [..., V / n] and target int64 [...] in 0 .. V - 1.

    Equal to ``torch.nn.functional.cross_entropy(reduction='none')`` but for label smoothing, which spreads over the
    other V - 1 classes as Megatron-LM documents it. Classes at -inf (a padded vocabulary) do not exist: V leaves them
    out.
    """
    maximum = local_max(logits)
    if group_size(group) > 1:
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    start = logits.shape[-1] * group_rank(group)
    terms = local_terms(logits, maximum, target, start, label_smoothing > 0)
    terms = reduce_from_tensor_model_parallel_region(terms, group)
    return loss_from_terms(terms, label_smoothing)
