"""The Lion optimizer, which PyTorch does not provide."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675, algorithm 2), computed as the 32-bit Lion of
    bitsandbytes on any device.

    An update is the sign of an interpolated momentum, with decoupled weight decay.

    betas: of the interpolation whose sign is the update, and of the momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                grad = parameter.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(grad.lerp(momentum, first).sign_(), alpha=-lr)
                momentum.lerp_(grad, 1 - second)
        return loss
