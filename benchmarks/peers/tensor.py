"""HuggingFace's Llama under torch.distributed.tensor.parallel: DTensor styles and its
vocabulary-parallel loss.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from benchmarks.peers.model import autocast, parameter_dtype, token_loss, whole_model
from benchmarks.peers.optimizer import local, optimizer_step
from benchmarks.step.cases import Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32


def parallelize(model: torch.nn.Module, mesh, tuned: bool) -> None:
    """Megatron's table in DTensor's words; norms stay replicated.

    Split by vocabulary, as usual, the embedding's gradient comes back replicated: a full table is
    all-reduced in every micro-batch. Tuned, the embedding is split by hidden size, which costs one
    small all-gather instead.
    """
    layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    layer |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    outside = {
        "model.embed_tokens": ColwiseParallel(output_layouts=Replicate())
        if tuned
        else RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)


def sharded_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Norm over all ranks from local pieces: matrices are sharded; vectors (norm scales) are
    replicated.
    """
    square = get_total_norm([g for g in gradients if g.dim() > 1]).float().square()
    dist.all_reduce(square)
    return (square + get_total_norm([g for g in gradients if g.dim() == 1]).float().square()).sqrt()


def place_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Shard every gradient as its parameter is."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    dist.init_process_group("gloo")
    notes = use_fastest_fp32() if case.tuned else {}
    model = whole_model(shape, seed, parameter_dtype(case))
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), case.tuned)
    parameters = list(model.parameters())
    update = optimizer_step(case, parameters, sharded_norm)

    def step(tokens: torch.Tensor) -> float:
        total = torch.zeros(())
        for micro in tokens.split(shape.micro_batch):
            with loss_parallel():
                with autocast(case):
                    loss = (
                        token_loss(model(input_ids=micro[:, :-1]).logits, micro[:, 1:])
                        / shape.micro_batches
                    )
                loss.backward()
            total += local(loss.detach())
        place_gradients(parameters)
        update()
        return total.item()

    return Runner(step, notes)
