"""The targets of samples of GPT data sets: the tokens that follow, and which of them count."""

from collections.abc import Mapping

from torch import Tensor

IGNORED = -100  # a label that is left out of the loss


def targets(samples: Mapping[str, Tensor]) -> Tensor:
    """Return the token that follows each position, int64[b, s]; ``IGNORED`` where the loss mask is
    0.
    """
    return samples["labels"].masked_fill(samples["loss_mask"] == 0, IGNORED)
