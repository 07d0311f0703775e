"""AdamW with gradient clipping over the flat tensors of a ParameterBuffer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_merak import ops
from megatron_merak.config import OptimizerConfig
from megatron_merak.parallel.buffers import ParameterBuffer

Rates = Sequence[tuple[float, float]]  # learning rate and weight decay of each group of parameters


@dataclass(frozen=True)
class StepResult:
    """grad_norm: of the whole model, before clipping. skipped: it was not finite, so no rank changed anything.

    loss: of the step, and zeros: of this rank's part of the gradient, where the caller had them read with the norm.
    """

    grad_norm: float
    skipped: bool
    loss: float | None = None
    zeros: int | None = None


class AdamW:
    """Decoupled weight decay (https://arxiv.org/abs/1711.05101): one pass clips, updates and rounds into `buffer.data`.

    A parameter's update does not depend, to the bit, on where in the buffer it lies or on what lies beside it.

    buffer: holds initial parameters already. `buffer.master` is updated; where that is not `buffer.data`, every step
        rounds it into it.
    config: adam_beta1, adam_beta2, adam_eps and clip_grad (0: no clipping) are read.
    group: the ranks that hold one replica of the model (tensor x pipeline), whose gradients make the global norm.
        None or one rank: this rank holds all of it.
    shared: where the buffer is sharded, the data-parallel ranks that share its update; each one updates what it owns,
        and `buffer.data` is to be gathered after that.

    steps: steps done, skipped ones excluded, the t of Adam's bias correction. Set it when a checkpoint is loaded.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shared: dist.ProcessGroup | None = None,
    ):
        self.buffer = buffer
        self.config = config
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.shared = shared if buffer.sharded else None
        self.master = buffer.master
        self.exp_avg = torch.zeros(buffer.owned_size, device=buffer.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.steps = 0
        self._counted = _counted(buffer)
        self._ranges = _owned_ranges(buffer)

    def state(self) -> dict[str, torch.Tensor]:
        """The live fp32 tensors [buffer.owned_size] to save, and to load into."""
        state = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return state | {"master": self.master} if self.buffer.rounds else state

    def refresh_master(self) -> None:
        """Take the parameters as they are in the buffer: after they were loaded without a master copy."""
        self.buffer.refresh_master()

    @torch.no_grad()
    def step(self, rates: Rates) -> StepResult:
        """Update the parameters with the clipped `main_grad`, which stays. Collective over `group`; one host sync.

        What this rank owns of `main_grad` must be final: summed over the data-parallel ranks.
        """
        return self.apply(self.grad_norm(), rates)

    @torch.no_grad()
    def apply(self, norm: float, rates: Rates) -> StepResult:
        """`step` of a gradient whose norm the host knows: the root of `square_norm`. No sync."""
        if not math.isfinite(norm):
            return StepResult(norm, skipped=True)
        coefficient = self.config.clip_grad / (norm + 1e-6)
        clips = self.config.clip_grad > 0 and coefficient < 1
        self._update(rates, coefficient if clips else 1.0)
        return StepResult(norm, skipped=False)

    def grad_norm(self) -> float:
        """The 2-norm of the model's gradient, each parameter counted by one rank. Collective over `group`."""
        return math.sqrt(self.square_norm().item())

    @torch.no_grad()
    def square_norm(self) -> torch.Tensor:
        """The square of `grad_norm`, 0-d fp64 on the buffer's device: the host does not wait for it. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.device)
        for gradient in self._counted:
            total += ops.sum_of_squares(gradient)
        for group in (self.shared, self.group):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total

    def _update(self, rates: Rates, scale: float) -> None:
        self.steps += 1
        config, rounds = self.config, self.buffer.rounds
        for own, grad, data, group in self._ranges:
            lr, weight_decay = rates[group]
            ops.adamw_(
                self.master[own] if rounds else data,
                self.exp_avg[own],
                self.exp_avg_sq[own],
                grad,
                data if rounds else None,
                lr=lr,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_eps,
                weight_decay=weight_decay,
                step=self.steps,
                scale=scale,
            )


def _owned_ranges(buffer: ParameterBuffer) -> tuple[tuple[slice, torch.Tensor, torch.Tensor, int], ...]:
    """(place in the rank's own state, gradient, values, group) of what this rank updates, cut where groups do."""
    found = []
    for (start, stop, offset), grad, data in zip(buffer.owned, buffer.own_grads, buffer.own_data, strict=True):
        for low, high, group in buffer.ranges:
            first, last = max(start, low), min(stop, high)
            if first < last:
                here, own = slice(first - start, last - start), slice(offset + first - start, offset + last - start)
                found.append((own, grad[here], data[here], group))
    return tuple(found)


def _counted(buffer: ParameterBuffer) -> tuple[torch.Tensor, ...]:
    """The parts of the gradient that this rank counts in the norm, padding between two parameters included.

    Of what data-parallel ranks own together, such as a bucket that is not sharded, the first one counts all.
    """
    spans: list[list[int]] = []
    adjoins = False
    for slot in buffer.slots.values():
        if slot.counted and adjoins:
            spans[-1][1] = slot.stop
        elif slot.counted:
            spans.append([slot.start, slot.stop])
        adjoins = slot.counted
    alone = buffer.sharded and buffer.shard > 0
    others = {(bucket.start, bucket.stop) for bucket in buffer.buckets if alone and not bucket.sharded}
    found = []
    for low, high in spans:
        for (start, stop, _), grad in zip(buffer.owned, buffer.own_grads, strict=True):
            first, last = max(start, low), min(stop, high)
            if first < last and (start, stop) not in others:
                found.append(grad[first - start : last - start])
    return tuple(found)
