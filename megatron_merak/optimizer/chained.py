"""Several optimizers, each with a part of a model's parameters, combined into one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Chained(torch.optim.Optimizer):
    """``Chained([torch.optim.Muon(matrices), torch.optim.AdamW(others)])``, with the parameter
    groups of both.

    It can also be used on its own in any PyTorch training loop.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = list(optimizers)
        groups = [group for each in self.optimizers for group in each.param_groups]
        super().__init__([dict(group) for group in groups], {})
        # the same objects, so that a learning-rate schedule reaches the optimizers
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer. ``closure`` runs once, before them."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            each.load_state_dict(state)
        self.param_groups[:] = [group for each in self.optimizers for group in each.param_groups]
