"""HuggingFace's model under DeepSpeed's ZeRO stage 1, where the package deepspeed is installed.

On CPUs it wants DS_ACCELERATOR=cpu, and gloo. Its optimizer is torch's AdamW, as for the other
peers: DeepSpeed's own is compiled when it is first used.
"""

import os

import torch
import torch.distributed as dist

from benchmarks.peers.model import parameter_dtype, token_loss, whole_model
from benchmarks.peers.sharded import SETTINGS, groups
from benchmarks.step.cases import RECIPE, Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32


def config(case: Case, shape: ModelShape, replicas: int) -> dict:
    """DeepSpeed's defaults, but for what every contestant has: batches, clipping, precision."""
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches // replicas,
        "gradient_clipping": RECIPE.clip,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
    }


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    optimizer = torch.optim.AdamW(groups(model), **SETTINGS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config(case, shape, world_size),
        dist_init_required=False,
    )

    def step(tokens: torch.Tensor) -> float:
        total, micro_batches = torch.zeros(()), tokens.split(shape.micro_batch)[rank::world_size]
        for micro in micro_batches:
            loss = token_loss(engine(input_ids=micro[:, :-1]).logits, micro[:, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / len(micro_batches)
        dist.all_reduce(total)
        return total.item() / world_size

    return Runner(step, notes | {"deepspeed": deepspeed.__version__})
