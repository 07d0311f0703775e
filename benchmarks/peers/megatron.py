"""Megatron-core's GPT model under its own tensor parallelism, on CPUs, where the package
megatron-core is installed.

Without CUDA, Apex and Transformer Engine its layers are plain PyTorch. Two things need a hand: it
asks CUDA for the current device, and its generators of random numbers are CUDA's; there is no
dropout here.
"""

import warnings

import torch
import torch.distributed as dist

from benchmarks.peers.optimizer import MasterStep, PlainStep
from benchmarks.peers.tensor import sharded_norm
from benchmarks.step.cases import Case, ModelShape
from benchmarks.step.contract import Runner
from benchmarks.step.matmul_precision import use_fastest_fp32
from benchmarks.step.weights import initial_weight

warnings.filterwarnings("ignore", module="megatron")


CPU = torch.device("cpu")


def gpt_model(
    shape: ModelShape,
    dtype: torch.dtype,
    ranks: int,
    device: torch.device = CPU,
    fast: bool = False,
) -> torch.nn.Module:
    """The Llama of the benchmark in Megatron's words, this rank's part. fast: of Transformer
    Engine's layers.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    if device.type == "cpu":
        torch.cuda.current_device = lambda: device
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads, ffn_hidden_size=shape.mlp,
        normalization="RMSNorm", layernorm_epsilon=shape.norm_epsilon, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=ranks, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
    )  # fmt: skip
    if fast:
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(
        config, layer, shape.vocabulary, shape.sequence,
        position_embedding_type="rope", rotary_base=int(shape.rotary_base),
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def whole_weight(name: str, shape: ModelShape, seed: int) -> list[torch.Tensor]:
    """The full fp32 matrices of HuggingFace's that Megatron's parameter ``name`` is made of, in its
    order.
    """
    outside = {
        "embedding.word_embeddings": ["model.embed_tokens"],
        "output_layer": ["lm_head"],
        "decoder.final_layernorm": ["model.norm"],
    }
    inside = {
        "input_layernorm": ["input_layernorm"],
        "pre_mlp_layernorm": ["post_attention_layernorm"],
        "self_attention.linear_qkv": [f"self_attn.{x}_proj" for x in "qkv"],
        "self_attention.linear_proj": ["self_attn.o_proj"],
        "mlp.linear_fc1": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.linear_fc2": ["mlp.down_proj"],
    }
    hidden = shape.hidden
    mlp = shape.mlp
    vocabulary = shape.vocabulary
    sizes = {
        "embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "norm": (hidden,),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden), "down_proj": (hidden, mlp),
    }  # fmt: skip
    stem = name.removesuffix(".weight")
    if stem in outside:
        names = outside[stem]
    else:
        layer, part = stem.removeprefix("decoder.layers.").split(".", 1)
        names = [f"model.layers.{layer}.{one}" for one in inside[part]]
    return [
        initial_weight(f"{n}.weight", sizes.get(n.split(".")[-1], (hidden, hidden)), seed)
        for n in names
    ]


@torch.no_grad()
def fill(model: torch.nn.Module, shape: ModelShape, seed: int, rank: int, ranks: int) -> None:
    """This rank's part of the same initial weights that every contestant has."""
    for name, parameter in model.named_parameters():
        parts = whole_weight(name, shape, seed)
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            parts = [part.chunk(ranks, 1)[rank] for part in parts]
        elif parameter.dim() > 1:
            parts = [part.chunk(ranks)[rank] for part in parts]
        if name.endswith("linear_qkv.weight"):  # head by head: its query, its key, its value
            heads = [part.unflatten(0, (shape.heads // ranks, -1)) for part in parts]
            parts = [torch.cat(heads, 1).flatten(0, 1)]
        parameter.copy_(torch.cat(parts))


def build(case: Case, shape: ModelShape, seed: int) -> Runner:
    dist.init_process_group("gloo")
    notes = use_fastest_fp32() if case.tuned else {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    low = case.precision == "bf16"  # Megatron's bf16 is bf16 weights with fp32 masters
    model = gpt_model(shape, torch.bfloat16 if low else torch.float32, ranks)
    fill(model, shape, seed, rank, ranks)
    parameters = list(model.parameters())
    update = (
        MasterStep(parameters, sharded_norm)
        if low
        else PlainStep(parameters, case.tuned, sharded_norm)
    )
    positions = torch.arange(shape.sequence)[None]
    hidden_keys = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool).triu(1)[None, None]

    def step(tokens: torch.Tensor) -> float:
        total = 0.0
        for micro in tokens.split(shape.micro_batch):
            losses = model(
                micro[:, :-1].contiguous(), positions, hidden_keys, labels=micro[:, 1:].contiguous()
            )
            loss = losses.mean() / shape.micro_batches
            loss.backward()
            total += loss.item()
        update()
        return total

    return Runner(step, notes)
