"""megatron_merak's side of the benchmark when it is given HuggingFace's own, unmodified model."""

import torch
from transformers import LlamaForCausalLM

from benchmarks.peers.model import llama_config
from benchmarks.step.cases import RECIPE, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.weights import initial_weight
from megatron_merak import init_empty_weights
from megatron_merak.config import OptimizerConfig, ParallelConfig
from megatron_merak.parallel.launch import launch
from megatron_merak.parallel.memory import keep_freed_memory
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.precision import choose_fp32_matmul
from megatron_merak.plan import Grid
from megatron_merak.planner.request import Request
from megatron_merak.stages.blueprint import make_blueprint
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.traced import Traced


@torch.no_grad()
def fill(trainer: CapturedModel, seed: int) -> None:
    """Give this rank its parts of the contestants' common weights."""
    for shard in trainer.shards(trainer.buffer.data):
        full = initial_weight(shard.name, shard.shape, seed)
        parts = (
            [full]
            if shard.dim is None
            else [full.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
        )
        shard.tensor.copy_(torch.cat(parts, shard.dim or 0))
    trainer.optimizer.refresh_master()


def step_runner(shape: ModelShape, tp: int, pp: int, dp: int, bf16: bool, seed: int) -> Runner:
    """As ``ours.step_runner``, of the model that HuggingFace's classes make."""
    world = launch("gloo")
    precision = choose_fp32_matmul(world.device)
    keep_freed_memory()
    mesh = build_mesh(Grid(tp=tp, dp=dp, pp=pp), world.rank, world.device)
    with init_empty_weights():
        model = LlamaForCausalLM(llama_config(shape))
    count = torch.tensor(float(shape.tokens))

    def batch(row: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs, targets = row[:, :-1], row[:, 1:]
        return {
            "input_ids": inputs,
            "labels": targets,
            "shift_labels": targets,
            "num_items_in_batch": count,
        }

    example = torch.zeros(shape.micro_batch, shape.sequence + 1, dtype=torch.int64)
    traced = Traced(model, batch(example), "bfloat16" if bf16 else "float32", ranks=mesh)
    optimizer = OptimizerConfig(
        clip_grad=RECIPE.clip,
        adam_beta1=RECIPE.beta1,
        adam_beta2=RECIPE.beta2,
        adam_eps=RECIPE.epsilon,
    )
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    request = Request(
        parallel=parallel, replicas=dp, microbatches=shape.micro_batches // dp, graph_sharding="cut"
    )
    blueprint = make_blueprint(traced, request)
    trainer = CapturedModel(blueprint, mesh, optimizer=optimizer, seed=seed)
    fill(trainer, seed)

    def step(tokens: torch.Tensor) -> float:
        rows = tokens.split(shape.micro_batch)[mesh.dp_rank :: dp]
        rate = RECIPE.learning_rate
        reduced = trainer.backward([batch(row) for row in rows])
        return trainer.update([(rate, RECIPE.weight_decay), (rate, 0.0)], reduced).loss

    stages = [f"[{stage.first}, {stage.last})" for stage in trainer.plan.stages]
    return Runner(step, {"matmul_precision": precision, "units per stage": stages})
