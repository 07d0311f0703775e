"""Plain HuggingFace under DistributedDataParallel: gradients are reduced once, in the last
micro-batch's backward.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.model import autocast, parameter_dtype, token_loss, whole_model
from benchmarks.peers.optimizer import optimizer_step
from benchmarks.step.cases import Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=case.tuned)
    update = optimizer_step(case, list(model.parameters()))
    count = shape.micro_batches // world_size

    def step(tokens: torch.Tensor) -> float:
        total = torch.zeros(())
        for index, micro in enumerate(tokens.split(shape.micro_batch)[rank::world_size]):
            with replica.no_sync() if index < count - 1 else nullcontext():
                with autocast(case):
                    loss = token_loss(replica(input_ids=micro[:, :-1]).logits, micro[:, 1:]) / count
                loss.backward()
            total += loss.detach()
        update()
        dist.all_reduce(total)
        return total.item() / world_size

    return Runner(step, notes)
