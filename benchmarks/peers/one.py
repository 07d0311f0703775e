"""HuggingFace in one process, as it is or compiled: gradient accumulation over the
micro-batches.
"""

import torch

from benchmarks.peers.model import autocast, parameter_dtype, token_loss, whole_model
from benchmarks.peers.optimizer import optimizer_step
from benchmarks.step.cases import COMPILED, Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    update = optimizer_step(case, list(model.parameters()))

    def mean_loss(micro: torch.Tensor) -> torch.Tensor:
        with autocast(case):
            return (
                token_loss(model(input_ids=micro[:, :-1]).logits, micro[:, 1:])
                / shape.micro_batches
            )

    loss_of = torch.compile(mean_loss) if case.contestant == COMPILED else mean_loss

    def step(tokens: torch.Tensor) -> float:
        total = torch.zeros(())
        for micro in tokens.split(shape.micro_batch):
            loss = loss_of(micro)
            loss.backward()
            total += loss.detach()
        update()
        return total.item()

    return Runner(step, notes)
