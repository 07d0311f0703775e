"""How far two runs are apart, and how far they may be."""

from dataclasses import astuple, dataclass

import torch

from .rig import Run, Tensors


@dataclass(frozen=True)
class Distance:
    """How far apart a and b are.

    loss: largest absolute difference over the curve. norm: largest relative one of the global
          gradient norm over it.
    gradient: ``|a - b| / |b|`` after one step, in 2-norms, of all gradients as one vector. tensor:
              of the worst tensor.
    """

    loss: float
    norm: float
    gradient: float
    tensor: float

    def within(self, limit: "Distance") -> bool:
        return all(value <= most for value, most in zip(astuple(self), astuple(limit), strict=True))


# fp32: sums are taken in another order, nothing else. bf16: two correct bf16 models differ by as
# much as each differs from fp32; docs/evidence/parity_native.md shows that distance beside ours.
# fp16 rounds eight times as finely.
TOLERANCE = {
    "fp32": Distance(1e-5, 1e-5, 1e-5, 1e-5),
    "bf16": Distance(1e-2, 3e-2, 4e-2, 2e-1),
    "fp16": Distance(2e-3, 4e-3, 6e-3, 3e-2),
}


def tensor_distances(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """``|a - b| / |b|`` by name; both sides must hold the same names and shapes."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    assert all(ours[name].shape == theirs[name].shape for name in theirs)
    return {name: apart(ours[name], tensor) for name, tensor in theirs.items()}


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    theirs = theirs.double()
    return (
        torch.linalg.vector_norm(ours.double() - theirs) / torch.linalg.vector_norm(theirs)
    ).item()


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def distance(ours: Run, theirs: Run) -> Distance:
    """Over the steps that ``ours`` has, at most those of ``theirs``."""
    steps = len(ours.curve)
    losses = zip(
        [ours.first_loss, *ours.curve], [theirs.first_loss, *theirs.curve[:steps]], strict=True
    )
    norms = zip(ours.norms, theirs.norms[:steps], strict=True)
    return Distance(
        max(abs(a - b) for a, b in losses),
        max(abs(a / b - 1) for a, b in norms),
        apart(flat(ours.gradients), flat(theirs.gradients)),
        max(tensor_distances(ours.gradients, theirs.gradients).values()),
    )


def differing(ours: Tensors, theirs: Tensors) -> list[str]:
    """Names of tensors that are not the same to the bit."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
