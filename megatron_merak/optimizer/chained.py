"""Several optimizers that share the parameters of a model among them, as one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Chained(torch.optim.Optimizer):
    """``Chained([torch.optim.Muon(matrices), torch.optim.AdamW(others)])``: its groups are theirs, in that order.

    It steps by itself, too, so that any training loop of torch can have it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = list(optimizers)
        groups = [group for each in self.optimizers for group in each.param_groups]
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups  # the very same, so that a schedule of one is seen by the other

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each. ``closure`` runs once, before them."""
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
