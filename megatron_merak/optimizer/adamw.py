"""AdamW over the flat tensors of a ParameterBuffer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_merak import ops
from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.base import LocalOptimizer, Rates
from megatron_merak.optimizer.loss_scale import LossScaler
from megatron_merak.parallel.buffers import ParameterBuffer
from megatron_merak.parallel.scattered import Scattered


class AdamW(LocalOptimizer):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101).

    A single pass clips, updates and rounds into `buffer.data`. A parameter's update is bitwise
    independent of its position in the buffer and of its neighbours. `main_grad` is not modified.
    Moments are computed in fp32, and stored in the types that ``config`` names, rounded to nearest.
    For the arguments see `Optimizer`.
    """

    name = "AdamW"

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        shard_group: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        super().__init__(buffer, config, group, shard_group, scaler)
        self.exp_avg = self._zeros(config.exp_avg_dtype)
        self.exp_avg_sq = self._zeros(config.exp_avg_sq_dtype)
        self._change_parts()

    def _zeros(self, stored: str) -> torch.Tensor:
        """Return a moment of all that this rank owns, before the first step."""
        dtype = torch.bfloat16 if stored == "bf16" else torch.float32
        return torch.zeros(self.buffer.owned_size, dtype=dtype, device=self.buffer.home)

    def state(self) -> dict[str, torch.Tensor | Scattered]:
        """Return the live tensors [buffer.owned_size], to save or to load into."""
        state: dict[str, torch.Tensor | Scattered] = {
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        if self.buffer.rounds:
            state["master"] = self.master
        return state

    def _change_parts(self) -> None:
        """Divide what this rank owns by group and number of steps, without frozen parameters."""
        self._ranges = _owned_ranges(self.buffer, self._runs())

    def _runs(self) -> list[tuple[int, int, int, int]]:
        """Return (start, stop, group, missed steps) of adjacent parameters of the buffer that are
        updated alike.
        """
        if not self.frozen and not self.missed:
            return [(*each, 0) for each in self.buffer.ranges]
        runs: list[tuple[int, int, int, int]] = []
        adjacent = False
        for name, slot in self.buffer.slots.items():
            steps = name not in self.frozen
            kind = (slot.group, self.missed.get(name, 0))
            if steps and adjacent and runs[-1][2:] == kind:
                runs[-1] = (runs[-1][0], slot.stop, *kind)
            elif steps:
                runs.append((slot.start, slot.stop, *kind))
            adjacent = steps
        return runs

    def _update(self, rates: Rates, scale: float) -> None:
        self.steps += 1
        config = self.config
        rounds = self.buffer.rounds
        for own, grad, data, group, missed in self._ranges:
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
                step=self.steps - missed,
                scale=scale,
            )


def _owned_ranges(
    buffer: ParameterBuffer, runs: Sequence[tuple[int, int, int, int]]
) -> tuple[tuple[slice, torch.Tensor, torch.Tensor, int, int], ...]:
    """Return (slice of the rank's own state, gradient, values, group, missed steps) of what this
    rank updates.
    """
    ranges = []
    for (start, stop, offset), grad, data in zip(
        buffer.owned, buffer.own_grads, buffer.own_data, strict=True
    ):
        for low, high, group, missed in runs:
            first = max(start, low)
            last = min(stop, high)
            if first < last:
                local = slice(first - start, last - start)
                own = slice(offset + first - start, offset + last - start)
                ranges.append((own, grad[local], data[local], group, missed))
    return tuple(ranges)
