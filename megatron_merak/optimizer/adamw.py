"""AdamW with gradient clipping over the flat tensors of a ParameterBuffer."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from megatron_merak.config import OptimizerConfig
from megatron_merak.parallel.buffers import ALIGNMENT, ParameterBuffer


@dataclass(frozen=True)
class StepResult:
    """grad_norm: of the whole model, before clipping. skipped: it was not finite, so no rank changed anything."""

    grad_norm: float
    skipped: bool


class AdamW:
    """Decoupled weight decay (https://arxiv.org/abs/1711.05101), torch's fused kernel on one view per decay range.

    A parameter's update does not depend, to the bit, on where in the buffer it lies or on what lies beside it.

    buffer: holds initial parameters already. In fp32 they are updated in place. In any other dtype an fp32 master copy
        is taken here and updated; every step rounds it into `buffer.data`.
    config: adam_beta1, adam_beta2, adam_eps and clip_grad (0: no clipping) are read.
    group: the ranks that hold one replica of the model (tensor x pipeline), whose gradients make the global norm.
        None or one rank: this rank holds all of it.
    """

    def __init__(self, buffer: ParameterBuffer, config: OptimizerConfig, group: dist.ProcessGroup | None = None):
        self.buffer = buffer
        self.config = config
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.master = buffer.data if buffer.dtype == torch.float32 else buffer.data.to(torch.float32)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self._counted = _counted_rows(buffer)
        self._counts = torch.zeros(len(buffer.ranges), dtype=torch.float32, device=buffer.device)
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps done, skipped ones excluded: the t of Adam's bias correction. Set it when a checkpoint is loaded."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        self._counts.fill_(steps)

    def state(self) -> dict[str, torch.Tensor]:
        """The live flat fp32 tensors to save, and to load into; `buffer.view(tensor, name)` is one parameter's part."""
        state = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return state if self.master is self.buffer.data else state | {"master": self.master}

    def refresh_master(self) -> None:
        """Take the parameters as they are in the buffer: after they were loaded without a master copy."""
        if self.master is not self.buffer.data:
            self.master.copy_(self.buffer.data)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> StepResult:
        """Clip `main_grad` in place and update the parameters. Collective over `group`; one host sync.

        `main_grad` must be final, and equal on the ranks of the data-parallel group.
        """
        norm = self.grad_norm()
        if not math.isfinite(norm):
            return StepResult(norm, skipped=True)
        coefficient = self.config.clip_grad / (norm + 1e-6)
        if self.config.clip_grad > 0 and coefficient < 1:
            self.buffer.main_grad.mul_(coefficient)
        self._update(lr, weight_decay)
        if self.master is not self.buffer.data:
            self.buffer.data.copy_(self.master)
        return StepResult(norm, skipped=False)

    def grad_norm(self) -> float:
        """The 2-norm of the model's gradient, each parameter counted by one rank. Collective over `group`.

        Rows of 64 are summed in fp32 and rows in fp64: torch's CPU norm of 58 million fp32 values is 1 % off.
        """
        rows = torch.linalg.vector_norm(self.buffer.main_grad.view(-1, ALIGNMENT), dim=1)
        if self._counted is not None:
            rows.mul_(self._counted)
        rows = rows.double()
        total = torch.dot(rows, rows)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return math.sqrt(total.item())

    def _update(self, lr: float, weight_decay: float) -> None:
        self._steps += 1
        flat = (self.master, self.buffer.main_grad, self.exp_avg, self.exp_avg_sq)
        counts = self._counts.unbind()
        for decay in (True, False):
            chosen = [number for number, part in enumerate(self.buffer.ranges) if part.decay == decay]
            spans = [slice(self.buffer.ranges[number].start, self.buffer.ranges[number].stop) for number in chosen]
            if not chosen:
                continue
            adamw(
                *([tensor[span] for span in spans] for tensor in flat),
                max_exp_avg_sqs=[],
                state_steps=[counts[number] for number in chosen],
                fused=True,
                amsgrad=False,
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                lr=lr,
                weight_decay=weight_decay if decay else 0.0,
                eps=self.config.adam_eps,
                maximize=False,
            )


def _counted_rows(buffer: ParameterBuffer) -> torch.Tensor | None:
    """[size / 64] fp32, 1 where the row belongs to a counted parameter, else 0; None: all are. No row holds two."""
    if all(slot.counted for slot in buffer.slots.values()):
        return None
    counted = torch.ones(buffer.size // ALIGNMENT, dtype=torch.float32)
    for slot in buffer.slots.values():
        if not slot.counted:
            counted[slot.start // ALIGNMENT : -(-slot.stop // ALIGNMENT)] = 0
    return counted.to(buffer.device)
