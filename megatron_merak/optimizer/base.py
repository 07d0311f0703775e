"""What every optimizer does with a gradient before it is applied: its scale, its norm, its clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_merak import ops
from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.loss_scale import LossScaler
from megatron_merak.parallel.buffers import ParameterBuffer
from megatron_merak.parallel.host_read import read
from megatron_merak.parallel.scattered import Scattered

Rates = Sequence[tuple[float, float]]  # learning rate and weight decay of each group of parameters


@dataclass(frozen=True)
class StepResult:
    """grad_norm: of the whole model, before clipping. skipped: it was not finite, so no rank changed anything.

    loss_scale: of the step that comes, None where there is none. loss: of the step, and zeros: of this rank's part of
    the gradient, where the caller had them read with the norm. staleness: how many updates by other workers lie
    between the weights of this gradient and the update, and late: it was too old to be applied; see
    --ps-max-staleness.
    """

    grad_norm: float
    skipped: bool
    loss: float | None = None
    zeros: int | None = None
    loss_scale: float | None = None
    staleness: int | None = None
    late: bool = False


class Optimizer:
    """What becomes of a gradient, whoever keeps the state: its scale, its norm, and one interface to apply it.

    buffer: holds initial parameters already.
    config: adam_beta1, adam_beta2, adam_eps and clip_grad (0: no clipping) are read.
    group: the ranks that hold one replica of the model (tensor x pipeline), whose gradients make the global norm.
        None or one rank: this rank holds all of it.
    shared: where the buffer is sharded, the data-parallel ranks that share its update; each one updates what it owns,
        and `buffer.data` is to be gathered after that.
    scaler: of the loss; every step tells it whether gradients overflowed.

    name: of the arithmetic; checkpoints of one name fit together.
    scaled: the factor of what `main_grad` holds, beside the gradient; whoever fills it says so, see `begin`.
    steps: steps done, skipped ones excluded, the t of Adam's bias correction. Set it when a checkpoint is loaded.
    """

    name: str

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shared: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        self.buffer = buffer
        self.config = config
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.shared = shared if buffer.sharded else None
        self.steps = 0
        self.scaler = scaler or LossScaler()
        self.scaled = 1.0
        self._counted = _parts(buffer, counted=True)
        self._copies = _parts(buffer, counted=False)

    def reduce_and_step(
        self, sums: torch.Tensor | None, zeros: torch.Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        """Make the gradient in `main_grad` that of all replicas, as far as their reduction has not, and apply it.

        sums, zeros: what else the host shall read in the step's one sync, the first of it a sum over replicas.
        Returns their values, [] for None, and what became of the step. Collective over all ranks.
        """
        raise NotImplementedError

    def refresh_master(self) -> None:
        """Take the parameters as they are in the buffer: after they were loaded without a master copy."""
        raise NotImplementedError

    def begin(self) -> float:
        """A backward fills `main_grad`: the factor that it gives to the gradient."""
        self.scaled = self.scaler.scale
        return self.scaled

    @torch.no_grad()
    def unscale(self) -> None:
        """Let what this rank owns of `main_grad` be the gradient itself, for whoever reads it before a step."""
        if self.scaled != 1.0:
            for gradient in self.buffer.own_grads:
                gradient.mul_(1.0 / self.scaled)
            self.scaled = 1.0

    def _clipped(self, square: float) -> tuple[float, float | None]:
        """The gradient's norm, and the factor that `main_grad` has in the update; None where it is not finite."""
        norm = math.sqrt(square) / self.scaled
        if not math.isfinite(square):
            return norm, None
        coefficient = self.config.clip_grad / (norm + 1e-6)
        clips = self.config.clip_grad > 0 and coefficient < 1
        return norm, (coefficient if clips else 1.0) / self.scaled

    def _result(self, norm: float, skipped: bool) -> StepResult:
        """Of a step that is done, of which the scaler is told."""
        self.scaler.update(skipped)
        return StepResult(norm, skipped, loss_scale=self.scaler.scale if self.scaler.scales else None)

    def grad_norm(self) -> float:
        """The 2-norm of the model's gradient, each parameter counted by one rank. Collective over `group`."""
        return math.sqrt(self.square_norm().item()) / self.scaled

    @torch.no_grad()
    def square_norm(self) -> torch.Tensor:
        """The square of the norm of what `main_grad` holds, 0-d fp64 on the buffer's device: the host does not wait for
        it. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.device)
        for gradient in self._counted:
            total += ops.sum_of_squares(gradient)
        for gradient in self._copies if self.scaler.scales else ():
            total += 0.0 * ops.sum_of_squares(gradient)  # nan if only this rank's overflowed
        for group in (self.shared, self.group):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total


class KeptOptimizer(Optimizer):
    """One whose state its ranks keep themselves, with an fp32 master copy of 16-bit parameters.

    For the arguments see `Optimizer`. `buffer.master` is updated; where that is not `buffer.data`, every step rounds it
    into it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shared: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        super().__init__(buffer, config, group, shared, scaler)
        self.master = buffer.master

    def state(self) -> dict[str, torch.Tensor | Scattered]:
        """What is saved, and loaded into, of parameters: fp32, of their shape. Flat tensors are [buffer.owned_size]."""
        raise NotImplementedError

    def others(self) -> dict[str, dict[str, torch.Tensor]]:
        """What else is saved, and loaded into: by kind, then by parameter. Every kind is there on every rank."""
        return {}

    def writes(self, name: str) -> bool:
        """Whether of all ranks this one saves what `others` has of a parameter."""
        raise NotImplementedError

    def refresh_master(self) -> None:
        self.buffer.refresh_master()

    def reduce_and_step(
        self, sums: torch.Tensor | None, zeros: torch.Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        """What this rank owns of `main_grad` must be summed over the data-parallel ranks already, bucket by bucket."""
        told, counts, (square,) = read(sums, zeros, self.square_norm())
        return told, counts, self.apply(square, rates)

    @torch.no_grad()
    def step(self, rates: Rates) -> StepResult:
        """Update the parameters with the clipped `main_grad`. Collective over `group`; one host sync.

        What this rank owns of `main_grad` must be final: summed over the data-parallel ranks.
        """
        return self.apply(self.square_norm().item(), rates)

    @torch.no_grad()
    def apply(self, square: float, rates: Rates) -> StepResult:
        """`step` of a gradient of which the host knows `square_norm`. No sync."""
        norm, factor = self._clipped(square)
        if factor is not None:
            self._update(rates, factor)
        return self._result(norm, factor is None)

    def _update(self, rates: Rates, scale: float) -> None:
        """Apply ``scale`` times what `main_grad` holds."""
        raise NotImplementedError


def _parts(buffer: ParameterBuffer, counted: bool) -> tuple[torch.Tensor, ...]:
    """The parts of the gradient that this rank counts in the norm, or leaves to others, padding between two parameters
    included.

    Of what data-parallel ranks own together, such as a bucket that is not sharded, the first one counts all.
    """
    spans: list[list[int]] = []
    adjoins = False
    for slot in buffer.slots.values():
        chosen = slot.counted == counted
        if chosen and adjoins:
            spans[-1][1] = slot.stop
        elif chosen:
            spans.append([slot.start, slot.stop])
        adjoins = chosen
    alone = buffer.sharded and buffer.shard > 0
    others = {(bucket.start, bucket.stop) for bucket in buffer.buckets if alone and not bucket.sharded}
    found = []
    for low, high in spans:
        for (start, stop, _), grad in zip(buffer.owned, buffer.own_grads, strict=True):
            first, last = max(start, low), min(stop, high)
            if first < last and (start, stop) not in others:
                found.append(grad[first - start : last - start])
    return tuple(found)
