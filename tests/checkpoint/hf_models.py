"""Tiny HuggingFace models whose files differ from the model in every way there is: ties, merges,
splits, buffers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_merak.checkpoint.shard import Shard

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    ),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 96},
    ),
    "bert": ("BertForMaskedLM", {**SIZES, "max_position_embeddings": 32}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", {**SIZES, "num_local_experts": 4, "head_dim": 8}),
}


def configuration(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**CONFIGS[name][1], bos_token_id=1, eos_token_id=2, pad_token_id=0)


def model_class(name: str) -> Any:
    import transformers

    return getattr(transformers, CONFIGS[name][0])


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """The model with random values in every parameter and every floating-point buffer that is
    saved.
    """
    model = model_class(name)._from_config(configuration(name))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def shards(model: torch.nn.Module, rank: int = 0, world: int = 1) -> list[Shard]:
    """This rank's part of every parameter: two blocks of a dim where it divides, all on one rank
    where it does not.
    """
    made = []
    for number, (name, parameter) in enumerate(model.named_parameters()):
        dim = next(
            (d for d in _order(parameter.shape, number) if parameter.shape[d] % (2 * world) == 0),
            None,
        )
        if world == 1 or dim is None:
            made.append(
                Shard(
                    name,
                    tuple(parameter.shape),
                    None,
                    (),
                    parameter.detach(),
                    owner=rank == number % world,
                )
            )
            continue
        part = parameter.shape[dim] // (2 * world)
        starts = [rank * part, (world + rank) * part]
        held = torch.cat([parameter.detach().narrow(dim, start, part) for start in starts], dim)
        spans = tuple((start, start + part) for start in starts)
        made.append(Shard(name, tuple(parameter.shape), dim, spans, held))
    return made


def _order(shape: Sequence[int], number: int) -> list[int]:
    dims = list(range(len(shape)))
    return dims[::-1] if number % 2 else dims


def content(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name
