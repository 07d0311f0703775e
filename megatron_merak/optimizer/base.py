"""The base classes of optimizers: unscaling, global norm and clipping of the gradient before the
update.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_merak import ops
from megatron_merak.config import OptimizerConfig
from megatron_merak.errors import NumericsError
from megatron_merak.optimizer.loss_scale import LossScaler
from megatron_merak.parallel.buffers import ParameterBuffer
from megatron_merak.parallel.host_read import read
from megatron_merak.parallel.scattered import Scattered

Rates = Sequence[tuple[float, float]]  # (learning rate, weight decay) of each parameter group


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step.

    grad_norm:  of the whole model, before clipping.
    skipped:    whether the norm was not finite, so that no rank changed its parameters.
    loss:       of the step, if it was read together with the norm.
    zeros:      number of zeros in this rank's part of the gradient, if it was read together with
                the norm.
    loss_scale: of the next step; None without loss scaling.
    staleness:  number of updates by others since the weights that the gradient was computed with.
    late:       whether the gradient was too stale to be applied, see --ps-max-staleness.
    """

    grad_norm: float
    skipped: bool
    loss: float | None = None
    zeros: int | None = None
    loss_scale: float | None = None
    staleness: int | None = None
    late: bool = False


class Optimizer:
    """The interface of all optimizers, with the scale and the norm of the gradient; state is left
    to subclasses.

    buffer:      must already have the initial parameters.
    config:      what it says of AdamW, and clip_grad (0: no clipping), are read.
    group:       the ranks of one replica of the model (tensor x pipeline), over which the global
                 norm is taken. None or one rank: this rank has the full model.
    shard_group: where the buffer is sharded, the data-parallel ranks that it is sharded over. Each
                 one updates what it owns; `buffer.data` must be all-gathered afterwards.
    scaler:      of the loss; every step reports to it whether gradients overflowed.

    Attributes:
    name:   of the update rule; checkpoints are compatible between optimizers of the same name.
    scaled: the factor by which `main_grad` exceeds the gradient, set by `begin`.
    steps:  number of steps without skipped ones, the t of Adam's bias correction. Set it after
            loading a checkpoint.
    frozen: the parameters that take no part in steps until `freeze` is called again.
    missed: how many of ``steps`` a parameter took no part in; absent: none. Set it before
            ``steps``.
    """

    name: str

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        self.buffer = buffer
        self.config = config
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.shard_group = shard_group if buffer.sharded else None
        self.steps = 0
        self.scaler = scaler or LossScaler()
        self.scaled = 1.0
        self.frozen: frozenset[str] = frozenset()
        self._missed: dict[str, int] = {}
        self._counted = _parts(buffer, counted=True)
        self._copies = _parts(buffer, counted=False)

    def reduce_and_step(
        self, sums: torch.Tensor | None, zeros: torch.Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        """Finish the reduction of `main_grad` over replicas, if it is not finished, and apply the
        gradient.

        Return the values of ``sums`` and ``zeros`` on the host, [] for None, and the result.
        Collective over all ranks.

        sums:  tensor to read in the step's only host sync; summed over replicas.
        zeros: another tensor to read then.
        """
        raise NotImplementedError

    @property
    def missed(self) -> Mapping[str, int]:
        return self._missed

    @missed.setter
    def missed(self, value: Mapping[str, int]) -> None:
        self._missed = dict(value)
        self._change_parts()

    def freeze(self, names: Collection[str]) -> None:
        """Let parameters, of this rank or others, take no part in steps, and all others take part
        again.

        As with optimizers of torch, for a parameter without a gradient: it keeps its values and its
        state, does not count in the norm, and its own number of steps stays.
        """
        if self.frozen != frozenset(names):
            self.frozen = frozenset(names)
            self._counted = _parts(self.buffer, counted=True, frozen=self.frozen)
            self._copies = _parts(self.buffer, counted=False, frozen=self.frozen)
            self._change_parts()

    def _change_parts(self) -> None:
        """Called when ``frozen`` or ``missed`` was set."""

    def _miss(self) -> None:
        """Count a step that the frozen parameters took no part in."""
        for name in sorted(self.frozen):
            self._missed[name] = self._missed.get(name, 0) + 1

    def refresh_master(self) -> None:
        """Copy the parameters of the buffer to the master copy, after they were loaded
        without one.
        """
        raise NotImplementedError

    def begin(self) -> float:
        """Begin a backward that fills `main_grad`. Return the loss scale that it must use."""
        self.scaled = self.scaler.scale
        return self.scaled

    @torch.no_grad()
    def unscale(self) -> None:
        """Divide what this rank owns of `main_grad` by the loss scale, so that it can be read
        before a step.
        """
        if self.scaled != 1.0:
            for gradient in self.buffer.own_grads:
                gradient.mul_(1.0 / self.scaled)
            self.scaled = 1.0

    def _clipped(self, square: float) -> tuple[float, float | None]:
        """Return the gradient's norm, and the factor of `main_grad` in the update; None where it is
        not finite.
        """
        norm = math.sqrt(square) / self.scaled
        if not math.isfinite(square):
            return norm, None
        # 1e-6 as in torch's clip_grad_norm_, so that clipped steps are the same
        coefficient = self.config.clip_grad / (norm + 1e-6)
        clips = self.config.clip_grad > 0 and coefficient < 1
        return norm, (coefficient if clips else 1.0) / self.scaled

    def _result(self, norm: float, skipped: bool) -> StepResult:
        """Report a step to the scaler and return its result."""
        self.scaler.update(skipped)
        return StepResult(
            norm, skipped, loss_scale=self.scaler.scale if self.scaler.scales else None
        )

    def grad_norm(self) -> float:
        """Return the 2-norm of the model's gradient, each parameter counted by one rank. Collective
        over `group`.
        """
        return math.sqrt(self.square_norm().item()) / self.scaled

    @torch.no_grad()
    def square_norm(self) -> torch.Tensor:
        """Return the squared norm of `main_grad`, 0-d fp64 on the buffer's device, without a host
        sync. Collective.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.buffer.home)
        for gradient in self._counted:
            total += ops.sum_of_squares(gradient)
        for gradient in self._copies if self.scaler.scales else ():
            total += 0.0 * ops.sum_of_squares(gradient)  # NaN if only this rank's copy overflowed
        total = total.to(self.buffer.device)
        for group in (self.shard_group, self.group):
            if group is not None:
                dist.all_reduce(total, group=group)
        return total


class LocalOptimizer(Optimizer):
    """An optimizer whose state is on the ranks themselves, with an fp32 master copy of 16-bit
    parameters.

    A step updates `buffer.master` and, where `buffer.data` is another tensor, rounds into that. For
    the arguments see `Optimizer`.

    Attribute ``before_update``: called in each step, skipped ones too, with the squared norm and the
    rates, while `main_grad` is final and not changed yet; None: nobody looks at it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        super().__init__(buffer, config, group, shard_group, scaler=scaler)
        self.master = buffer.master
        self.before_update: Callable[[float, Rates], object] | None = None

    def state(self) -> dict[str, torch.Tensor | Scattered]:
        """Return the state in the shape of parameters, fp32 or bf16, to save or to load into. Flat:
        [buffer.owned_size].
        """
        raise NotImplementedError

    def other_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the state in other shapes, to save or to load into: by kind, then by parameter.

        All ranks have the same kinds.
        """
        return {}

    def writes(self, name: str) -> bool:
        """Whether this rank is the one that saves the `other_state` of a parameter."""
        raise NotImplementedError

    def refresh_master(self) -> None:
        self.buffer.refresh_master()

    def reduce_and_step(
        self, sums: torch.Tensor | None, zeros: torch.Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        """As in `Optimizer`; what this rank owns of `main_grad` must already be reduced over
        data-parallel ranks.
        """
        values, counts, (square,) = read(sums, zeros, self.square_norm())
        return values, counts, self.apply(square, rates)

    @torch.no_grad()
    def step(self, rates: Rates) -> StepResult:
        """Update the parameters with the clipped `main_grad`. Collective over `group`; one host
        sync.

        What this rank owns of `main_grad` must be final: summed over the data-parallel ranks.
        """
        return self.apply(self.square_norm().item(), rates)

    @torch.no_grad()
    def apply(self, square: float, rates: Rates) -> StepResult:
        """As `step`, given the value of `square_norm` on the host. No host sync."""
        if self.before_update is not None:
            self.before_update(square, rates)
        norm, factor = self._clipped(square)
        if factor is not None:
            self._update(rates, factor)
            self._miss()
        return self._result(norm, factor is None)

    @torch.no_grad()
    def apply_unseen(self, rates: Rates) -> None:
        """Update the parameters with `main_grad` as it is: no norm is taken, so that no rank waits
        for others. Raises NumericsError, and updates nothing, where it is not finite.
        """
        if not all(torch.isfinite(gradient).all() for gradient in self.buffer.own_grads):
            reason = "it is not finite, and other stages update without this one"
            remedy = (
                "Resume from the last checkpoint with a lower learning rate, or with a schedule "
                "that updates once a step, which skips such steps"
            )
            raise NumericsError("gradient", "of an update within a step", reason, remedy)
        self._update(rates, 1.0)
        self._miss()

    def _update(self, rates: Rates, scale: float) -> None:
        """Update the parameters with ``scale`` times `main_grad`."""
        raise NotImplementedError


def _parts(
    buffer: ParameterBuffer, counted: bool, frozen: Collection[str] = ()
) -> tuple[torch.Tensor, ...]:
    """Return the parts of the gradient that this rank counts in the norm, or (``counted`` false)
    the others.

    They include padding between two parameters. What several data-parallel ranks own, such as a
    bucket that is not sharded, is counted by the first one, of those over which the norm is taken.
    Those of ``frozen`` parameters are left out.
    """
    experts = buffer.experts
    # unsharded, the norm is taken over one copy of everything, of which several divide experts
    elsewhere = not buffer.sharded and experts is not None and experts.index > 0
    spans: list[list[int]] = []
    adjacent = False
    for name, slot in buffer.slots.items():
        counts = slot.counted and not (elsewhere and not slot.experts)
        chosen = counts == counted and name not in frozen
        if chosen and adjacent:
            spans[-1][1] = slot.stop
        elif chosen:
            spans.append([slot.start, slot.stop])
        adjacent = chosen
    skipped = {
        (bucket.start, bucket.stop)
        for bucket in buffer.buckets
        if buffer.sharded and not bucket.sharded and buffer.places[bucket.experts] > 0
    }
    parts = []
    for low, high in spans:
        for (start, stop, _), grad in zip(buffer.owned, buffer.own_grads, strict=True):
            first = max(start, low)
            last = min(stop, high)
            if first < last and (start, stop) not in skipped:
                parts.append(grad[first - start : last - start])
    return tuple(parts)
