"""The same global batch for every layout, and the part of it that one replica sees."""

import torch

from .cases import GLOBAL_BATCH, Case
from .families import FAMILIES, SEQUENCE

# unmasked tokens of each sample; the third micro-batch has none
KEPT = (16, 3, 9, 1, 0, 0, 7, 16, 12, 2, 5, 14)
SAMPLES = (GLOBAL_BATCH, 4, 8)  # of a step, in turns: batches may grow, and shrink
Batch = dict[str, torch.Tensor]


def global_batch(case: Case, step: int) -> list[Batch]:
    """All micro-batches of a step in global order: tokens, labels, position_ids int64, loss_mask
    fp32; each [b, s].
    """
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(
        0, FAMILIES[case.family].vocabulary, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator
    )
    kept = torch.tensor(KEPT).roll(step).unsqueeze(1) if case.loss != "full" else SEQUENCE
    mask = (torch.arange(SEQUENCE).expand(GLOBAL_BATCH, SEQUENCE) < kept).float()
    positions = torch.arange(SEQUENCE).expand(GLOBAL_BATCH, SEQUENCE)
    whole = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": mask,
        "position_ids": positions,
    }
    cut = {name: value.split(case.micro_batch) for name, value in whole.items()}
    count = SAMPLES[step % len(SAMPLES)] // case.micro_batch
    return [{name: parts[k].contiguous() for name, parts in cut.items()} for k in range(count)]


def replica_batch(case: Case, step: int, dp_rank: int) -> list[Batch]:
    """Micro-batch k of replica r is number k * dp + r of the global order."""
    return global_batch(case, step)[dp_rank :: case.dp]
