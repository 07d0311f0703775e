"""A linear layer whose collectives travel while it computes the gradient of its weight.

Shoeybi et al., "Megatron-LM", 2019; with sequences divided, Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError
from ...runtime.weights import Gradient
from ...tensor_parallel.sequence import gather_single, reduce_scatter_single
from .mappings import gather_from_sequence_parallel_region
from .utils import group_of


@dataclass(frozen=True)
class _How:
    """How a layer computes its gradients.

    fused:      whether the weight's is added to its ``main_grad``.
    reduced:    whether the input's is summed over the group.
    sequence:   whether the input is this rank's part of the sequence.
    group:      the tensor-parallel ranks; None where there is no collective.
    deferred:   takes the gradients of outputs instead of computing the weight's; None: none.
    limit:      most that it takes; 0: all.
    """

    fused: bool
    reduced: bool
    sequence: bool
    group: dist.ProcessGroup | None
    deferred: list[Tensor] | None = None
    limit: int = 0

    def defers(self) -> bool:
        return self.deferred is not None and not 0 < self.limit <= len(self.deferred)


class _OverlappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, how):
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        ctx.how = how
        whole = input
        if how.sequence:
            whole, _ = _gather(input, how.group)
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        how = ctx.how
        defers = how.defers()
        if defers:
            how.deferred.append(grad_output)
        whole = input
        if how.sequence and not defers:
            whole, gathered = _gather(input, how.group, waited=False)
        grad_input = grad_output.matmul(weight)
        work = None
        if how.reduced:
            work = dist.all_reduce(grad_input, group=how.group, async_op=True)
        if how.sequence:
            if not defers:
                gathered.wait()
            part = torch.empty_like(input, memory_format=torch.contiguous_format)
            whole_grad = grad_input.contiguous()
            work = reduce_scatter_single(part, whole_grad, group=how.group, async_op=True)
            grad_input = part
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_weight = None
        if not defers:
            grad_weight = _weight_gradient(weight, rows, whole.reshape(-1, whole.shape[-1]), how)
        grad_bias = rows.sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None


def _gather(part: Tensor, group: dist.ProcessGroup, waited: bool = True):
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    work = gather_single(whole, part.contiguous(), group=group, async_op=True)
    if waited:
        work.wait()
    return whole, work


def _weight_gradient(weight: Tensor, grads: Tensor, inputs: Tensor, how: _How) -> Tensor | None:
    """Return grads [t, o]^T @ inputs [t, i]; None where it was added to ``main_grad``."""
    if not how.fused:
        return grads.t().matmul(inputs)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        reason = "the weight has no main_grad"
        remedy = "Set it before the backward, or leave gradient_accumulation_fusion out"
        raise ConfigError("gradient_accumulation_fusion", True, reason, remedy)
    Gradient(main_grad).add_product(grads, inputs)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Hooks of the parameter are only called where it has a gradient.
    return torch.zeros_like(weight)


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, reduced, group):
        ctx.save_for_backward(weight)
        ctx.reduced = reduced
        ctx.group = group
        output = torch.matmul(input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx, grad_output):
        (weight,) = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        if ctx.reduced:
            dist.all_reduce(grad_input, group=ctx.group)
        return grad_input, None, None, None, None


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = None,
) -> Tensor:
    """``linear_with_grad_accumulation_and_async_allreduce`` of a weight that is not trained: it
    keeps no input. The three arguments about the weight's gradient have no effect.
    """
    group = group_of(tp_group) if allreduce_dgrad or sequence_parallel else None
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=group)
    return _Frozen.apply(input, weight, bias, allreduce_dgrad, group)


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """input [..., i] @ weight [o, i]^T + bias [o] -> [..., o].

    gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``.
    allreduce_dgrad:              sum the input's gradient over the group.
    sequence_parallel:            input is this rank's part [s / n, b, i] of the sequence, and so is
                                  its gradient; the output has all of it.
    grad_output_buffer:           takes the gradient of the output, and the weight's is not
                                  computed; None: it is.
    wgrad_deferral_limit:         most that the buffer takes; 0 or None: all.
    async_grad_allreduce:         old name of allreduce_dgrad; it has no effect, as in Megatron-LM.
    tp_group:                     None: that of ``parallel_state``.
    """
    if allreduce_dgrad and sequence_parallel:
        reason = "sequence_parallel reduces the gradient already"
        raise ConfigError("allreduce_dgrad", True, reason, "Leave one of them out")
    how = _How(
        fused=gradient_accumulation_fusion,
        reduced=allreduce_dgrad,
        sequence=sequence_parallel,
        group=group_of(tp_group) if allreduce_dgrad or sequence_parallel else None,
        deferred=grad_output_buffer,
        limit=wgrad_deferral_limit or 0,
    )
    return _OverlappedLinear.apply(input, weight, bias, how)
