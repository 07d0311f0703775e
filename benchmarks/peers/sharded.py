"""HuggingFace's model whose replicas share the optimizer by torch's own means: FSDP2, or DDP with
ZeRO stage 1.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.model import autocast, parameter_dtype, token_loss, whole_model
from benchmarks.step.cases import RECIPE, Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32

SETTINGS = {
    "lr": RECIPE.learning_rate,
    "betas": (RECIPE.beta1, RECIPE.beta2),
    "eps": RECIPE.epsilon,
}
FSDP = "torch-fsdp2"


def groups(model: torch.nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": RECIPE.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def sharded(model: torch.nn.Module, case: Case) -> tuple:
    """FSDP2, a layer at a time; what is computed in bf16 is cast when it is gathered."""
    bf16 = case.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bf16
        else None
    )
    more = {} if policy is None else {"mp_policy": policy}
    for part in (*model.model.layers, model):
        fully_shard(part, **more)
    optimizer = torch.optim.AdamW(groups(model), **SETTINGS)

    def micro_step(last: bool):
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return model, optimizer, micro_step, nullcontext


def redundancy_free(model: torch.nn.Module, case: Case) -> tuple:
    """DistributedDataParallel and an optimizer of which every replica has a part: ZeRO stage 1."""
    replica = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        groups(model), optimizer_class=torch.optim.AdamW, **SETTINGS
    )
    return (
        replica,
        optimizer,
        lambda last: nullcontext() if last else replica.no_sync(),
        lambda: autocast(case),
    )


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    made = sharded if case.contestant == FSDP else redundancy_free
    replica, optimizer, micro_step, context = made(model, case)
    count = shape.micro_batches // world_size

    def step(tokens: torch.Tensor) -> float:
        total = torch.zeros(())
        for index, micro in enumerate(tokens.split(shape.micro_batch)[rank::world_size]):
            with micro_step(index == count - 1):
                with context():
                    loss = token_loss(replica(input_ids=micro[:, :-1]).logits, micro[:, 1:]) / count
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / world_size

    return Runner(step, notes)
