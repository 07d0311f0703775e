"""The loss over a few optimizer steps: tensor x pipeline x data parallel ranks against one plain
process.
"""

from unittest import mock

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from megatron_merak.config import OptimizerConfig
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.stages import traced as traces
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.precision import DTYPES
from tests.engines import blueprint_of, step

from .chain import Subject
from .compare import Cell, judge, loss_difference
from .eager import loss_of
from .fork import fork_ranks
from .specimen import Specimen

GRID = Grid(tp=2, pp=2, dp=2)
STEPS, MICRO_BATCHES, RATE = 3, 2, 1e-3
OPTIMIZER = OptimizerConfig(weight_decay=0.1, clip_grad=1.0)


def batch_of(specimen: Specimen, dtype: torch.dtype, number: int, replica: int, micro: int) -> dict:
    return specimen.batch(seed=(number * GRID.dp + replica) * MICRO_BATCHES + micro, dtype=dtype)


def eager_curve(specimen: Specimen, dtype: torch.dtype) -> list[float]:
    """The unmodified model in plain torch: the mean over micro-batches, clipping, AdamW without
    decay on vectors.
    """
    model: nn.Module = specimen.model(dtype)
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": OPTIMIZER.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=betas, eps=OPTIMIZER.adam_eps)
    curve, count = [], GRID.dp * MICRO_BATCHES
    for number in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for index in range(count):
            loss = (
                loss_of(model(**batch_of(specimen, dtype, number, *divmod(index, MICRO_BATCHES))))
                / count
            )
            loss.backward()
            total += float(loss)
        clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        optimizer.step()
        curve.append(total)
    return curve


def check_curve(specimen: Specimen, subject: Subject) -> Cell:
    """In the precision of ``subject``; fp64 only where the trainer's own float32 is
    promoted, too.
    """
    dtype = subject.dtype
    model = specimen.model(dtype)

    def known(model: nn.Module, batch: dict, **options) -> Captured:
        same = traces.shapes_of(batch) == traces.shapes_of(subject.batch)
        return subject.captured if same else capture(model, batch, **options)

    promoted = mock.patch.dict(DTYPES, {"float32": dtype})
    with promoted, mock.patch.object(traces, "capture", known):
        blueprint = blueprint_of(
            traces.Traced(model, subject.batch), GRID, microbatches=MICRO_BATCHES
        )

    def train(rank: int, world_size: int) -> list[float]:
        mesh = build_mesh(GRID, rank, torch.device("cpu"))
        with promoted:
            trainer = CapturedModel(blueprint, mesh, optimizer=OPTIMIZER)
        return [
            step(
                trainer,
                [
                    batch_of(specimen, dtype, number, mesh.dp_rank, micro)
                    for micro in range(MICRO_BATCHES)
                ],
                RATE,
                OPTIMIZER.weight_decay,
            ).loss
            for number in range(STEPS)
        ]

    curves = fork_ranks(train, GRID.size, timeout=90.0)
    wanted = eager_curve(specimen, dtype)
    worst = max(
        loss_difference(a, b) for curve in curves for a, b in zip(curve, wanted, strict=True)
    )
    return judge(worst, 0.0, "", dtype)
