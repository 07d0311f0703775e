"""``neftune_noise_alpha``: uniform noise is added to the output of the input embedding in training,
as in transformers.

Its magnitude is alpha / sqrt(length of the rows x features). The noise is part of the captured
graph. Like dropout, it is seeded by seed, step and place in the model, so that ranks that share a
layer, recomputation and stages draw the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...graph.capture.inspected import inspected_model


def check_alpha(alpha: object) -> None:
    """Raise ConfigError for a value that is no magnitude."""
    if alpha is None:
        return
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not (isinstance(alpha, int | float) and number and 0 <= alpha < float("inf")):
        raise ConfigError(
            "neftune_noise_alpha",
            repr(alpha),
            "it is not a non-negative number",
            "Give 0 or more, or leave it unset",
        )


def embedding_of(model: nn.Module) -> nn.Module:
    """Return the module whose output gets noise, by transformers' rule. Raises ConfigError if there
    is none.
    """
    inner: Any = inspected_model(model)
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if not isinstance(embedding, nn.Module):
        reason = f"{type(inner).__name__} has no input embedding to add noise to"
        raise ConfigError(
            "neftune_noise_alpha", "(set)", reason, "Leave it unset, or define get_input_embeddings"
        )
    return embedding


@contextmanager
def noisy(model: nn.Module, alpha: float | None) -> Iterator[None]:
    """Add noise to forwards of ``model`` in training, inside this context; alpha None: add none."""
    if alpha is None or not model.training:
        yield
        return

    def add(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return output + _noise(output, alpha) if module.training else output

    handle = embedding_of(model).register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _noise(output: Tensor, alpha: float) -> Tensor:
    """Return uniform noise of the shape and dtype of ``output``."""
    elements = output.size(1) * output.size(2)
    magnitude = alpha * torch.rsqrt(
        torch.full((), elements, dtype=torch.float32, device=output.device)
    )
    drawn = torch.rand_like(output, dtype=torch.float32)
    return ((drawn - 0.5) * (2 * magnitude)).to(output.dtype)
