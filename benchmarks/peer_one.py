"""Plain HuggingFace in one process: gradient accumulation over the micro-batches."""

import torch
from cases import Case, ModelShape
from contract import Runner
from matmul_precision import use_fastest_fp32
from peer_model import autocast, parameter_dtype, token_loss, whole_model
from peer_optimizer import optimizer_step


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    update = optimizer_step(case, list(model.parameters()))

    def step(tokens: torch.Tensor) -> float:
        total = torch.zeros(())
        for micro in tokens.split(shape.micro_batch):
            with autocast(case):
                loss = token_loss(model(input_ids=micro[:, :-1]).logits, micro[:, 1:]) / shape.micro_batches
            loss.backward()
            total += loss.detach()
        update()
        return total.item()

    return Runner(step, notes)
