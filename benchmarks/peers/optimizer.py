"""The optimizer of the peers: AdamW as a user writes it, or tuned, with or without fp32 master
weights.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from benchmarks.step.cases import RECIPE, Case

NormReduction = Callable[[list[torch.Tensor]], torch.Tensor]


def adamw(parameters: list[torch.Tensor], fused: bool) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": RECIPE.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    settings = {
        "lr": RECIPE.learning_rate,
        "betas": (RECIPE.beta1, RECIPE.beta2),
        "eps": RECIPE.epsilon,
    }
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, **settings, **({"fused": True} if fused else {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(gradients: list[torch.Tensor], norm: NormReduction) -> None:
    """What torch.nn.utils.clip_grad_norm_ does, with the norm taken over the whole model."""
    coefficient = (RECIPE.clip / (norm(gradients) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, coefficient)


class PlainStep:
    """Clip, update, forget the gradients."""

    def __init__(self, parameters: list[torch.nn.Parameter], fused: bool, norm: NormReduction):
        self.parameters, self.norm = parameters, norm
        self.optimizer = adamw(parameters, fused)

    def __call__(self) -> None:
        clip([local(p.grad) for p in self.parameters], self.norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class MasterStep:
    """The same over bf16 parameters: an fp32 copy of each is what AdamW updates, from fp32 copies
    of the gradients.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], norm: NormReduction):
        self.norm = norm
        self.parameters = [local(p.detach()) for p in parameters]
        self.owners = parameters
        self.masters = [p.float() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.gradients = [master.grad for master in self.masters]
        self.optimizer = adamw(self.masters, fused=True)

    @torch.no_grad()
    def __call__(self) -> None:
        torch._foreach_copy_(self.gradients, [local(p.grad) for p in self.owners])
        clip(self.gradients, self.norm)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.owners:
            parameter.grad = None


def optimizer_step(
    case: Case, parameters: list[torch.nn.Parameter], norm: NormReduction = get_total_norm
) -> Callable[[], None]:
    """What ends a step. `norm` maps this rank's gradients to the norm of the whole model's
    gradient.
    """
    if case.precision == "bf16" and case.tuned:
        return MasterStep(parameters, norm)
    return PlainStep(parameters, case.tuned, norm)
