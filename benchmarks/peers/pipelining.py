"""torch.distributed.pipelining, Schedule1F1B, two stages cut by hand between HuggingFace's
layers.
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import get_total_norm

from benchmarks.peers.model import LlamaStage, token_loss
from benchmarks.peers.optimizer import optimizer_step
from benchmarks.step.cases import Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32


def norm_over_stages(gradients: list[torch.Tensor]) -> torch.Tensor:
    square = get_total_norm(gradients).float().square()
    dist.all_reduce(square)
    return square.sqrt()


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    notes = use_fastest_fp32() if case.tuned else {}
    bounds = (0, case.first_stage_layers, shape.layers)
    module = LlamaStage(
        shape, case, range(bounds[rank], bounds[rank + 1]), stage=rank, stages=stages, seed=seed
    )
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    # Tuned: the loss is divided once per micro-batch, which saves the schedule's own pass over all
    # gradients.
    scale = 1.0 / shape.micro_batches if case.tuned else 1.0

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_loss(logits, labels) * scale

    schedule = Schedule1F1B(stage, shape.micro_batches, loss_fn=loss_of, scale_grads=not case.tuned)
    update = optimizer_step(case, list(module.parameters()), norm_over_stages)

    def step(tokens: torch.Tensor) -> float | None:
        if rank == 0:
            schedule.step(tokens[:, :-1], return_outputs=False)
            loss = None
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
            loss = torch.stack(losses).mean().item() / scale
        update()
        return loss

    return Runner(step, notes)
