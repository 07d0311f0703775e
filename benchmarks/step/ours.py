"""megatron_merak's side of the benchmark: the one file here that knows its API."""

import torch

from benchmarks.step.cases import RECIPE, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.weights import initial_weight
from megatron_merak.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.launch import launch
from megatron_merak.parallel.memory import keep_freed_memory
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.precision import choose_fp32_matmul
from megatron_merak.planner import plan
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import by_formulas
from megatron_merak.training.trainer import Trainer


def configuration(shape: ModelShape, tp: int, pp: int, dp: int, bf16: bool, seed: int) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            ffn_hidden_size=shape.mlp,
            vocab_size=shape.vocabulary,
            seq_length=shape.sequence,
            position_embedding_type="rope",
            rotary_base=int(shape.rotary_base),
            normalization="RMSNorm",
            norm_epsilon=shape.norm_epsilon,
            swiglu=True,
            disable_bias_linear=True,
            untie_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        parallel=ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        train=TrainConfig(
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batches * shape.micro_batch,
            train_iters=1000,
            bf16=bf16,
            seed=seed,
        ),
        optimizer=OptimizerConfig(
            lr=RECIPE.learning_rate,
            lr_decay_style="constant",
            weight_decay=RECIPE.weight_decay,
            clip_grad=RECIPE.clip,
            adam_beta1=RECIPE.beta1,
            adam_beta2=RECIPE.beta2,
            adam_eps=RECIPE.epsilon,
        ),
    )


@torch.no_grad()
def fill(trainer: Trainer, seed: int) -> None:
    """Give this rank its parts of the contestants' common weights."""
    for shard in trainer.model.shards(trainer.model.buffer.data):
        full = initial_weight(shard.name, shard.shape, seed)
        parts = (
            [full]
            if shard.dim is None
            else [full.narrow(shard.dim, a, b - a) for a, b in shard.intervals]
        )
        shard.tensor.copy_(torch.cat(parts, shard.dim or 0))
    trainer.optimizer.refresh_master()


def step_runner(
    model_shape: ModelShape, tp: int, pp: int, dp: int, bf16: bool, seed: int
) -> Runner:
    """This rank of a tp x pp x dp run, built and ready (see contract.Runner for what its step
    receives and returns).

    The rank finds torchrun's variables in its environment, is pinned to one core and has one
    thread. The weights are weights.initial_weight(name, full shape, seed) by HuggingFace name, the
    recipe is cases.RECIPE, bf16 means bf16 weights with fp32 masters; micro-batch k of
    data-parallel rank r is row k * dp + r of the step's tokens.
    """
    config = configuration(model_shape, tp, pp, dp, bf16=bf16, seed=seed)
    world = launch("gloo")
    precision = choose_fp32_matmul(world.device)
    keep_freed_memory()
    made = plan(config, world.size)
    mesh = build_mesh(made.grid, world.rank, world.device)
    blueprint = by_formulas(traced_gpt(config, mesh), config, made)
    trainer = Trainer(config, GPTModel(blueprint, config, mesh))
    fill(trainer, seed)
    mask = torch.ones(model_shape.micro_batch, model_shape.sequence)
    positions = torch.arange(model_shape.sequence).expand(model_shape.micro_batch, -1)

    def step(tokens: torch.Tensor) -> float | None:
        rows = tokens.split(model_shape.micro_batch)[mesh.dp_rank :: dp]
        batches = [
            {
                "tokens": row[:, :-1],
                "labels": row[:, 1:],
                "loss_mask": mask,
                "position_ids": positions,
            }
            for row in rows
        ]
        return trainer.step(batches).loss

    stages = [f"[{stage.first}, {stage.last})" for stage in made.stages]
    return Runner(step, {"matmul_precision": precision, "units per stage": stages})
