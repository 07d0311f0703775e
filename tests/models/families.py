"""Shapes of the GPT that flags describe beside the HuggingFace models that they are, small and with
random weights.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.models.gpt_module import GPTModule
from megatron_merak.models.hf_config import RENAMED, hf_config, hf_type
from megatron_merak.stages.blueprint import Blueprint
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.gpt_model import build_gpt, traced_gpt
from megatron_merak.training.gpt_blueprint import gpt_blueprint
from tests.parity.rig import part_of

LENGTH, VOCABULARY = 12, 101

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=LENGTH,
    max_position_embeddings=16,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0,
    attention_dropout=0,
)
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=LENGTH,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=8,
    swiglu=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0,
    attention_dropout=0,
)
QWEN3 = replace(LLAMA, qk_layernorm=True, kv_channels=16, untie_embeddings_and_output_weights=False)
QWEN2 = replace(LLAMA, add_qkv_bias=True)
LLAMA31 = replace(
    LLAMA, use_rope_scaling=True, rotary_base=500000, kv_channels=16, max_position_embeddings=131072
)
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "llama31": LLAMA31, "qwen2": QWEN2, "qwen3": QWEN3}


# Further shapes that are a HuggingFace model, compared by one process only.
GPT_ROPE = replace(
    GPT2, position_embedding_type="rope", group_query_attention=True, num_query_groups=2
)
STABLELM = replace(
    LLAMA,
    normalization="LayerNorm",
    rotary_percent=0.25,
    add_qkv_bias=True,
    untie_embeddings_and_output_weights=False,
)
LLAMA_BIASED = replace(LLAMA, disable_bias_linear=False)
MIXTRAL = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=24)
QWEN3_MOE = replace(QWEN3, num_experts=8, moe_ffn_hidden_size=16, moe_router_topk=3)
QWEN2_MOE = replace(
    MIXTRAL,
    add_qkv_bias=True,
    moe_shared_expert_intermediate_size=40,
    moe_shared_expert_gate=True,
)
CONVERTIBLE = FAMILIES | {
    "starcoder2": GPT_ROPE,
    "stablelm": STABLELM,
    "llama-biased": LLAMA_BIASED,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE,
}


def huggingface(name: str, seed: int = 0) -> torch.nn.Module:
    """The family's own model in eval mode, every parameter random: norms are not one, biases not
    zero.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # a rank without it starts sooner

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(CONVERTIBLE[name])))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            norm = parameter.dim() == 1 and parameter_name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if norm else 0.15 * noise)
    return model.eval()


def batch(samples: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, labels that are the next ones, a few of them masked out."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    mask = (torch.rand(samples, LENGTH, generator=generator) > 0.2).float()
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(samples, -1).contiguous(),
    }


def reference(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """Summed loss of the unmasked tokens, and every gradient under its HuggingFace name."""
    logits = model(input_ids=data["tokens"]).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), data["labels"].flatten(), reduction="none"
    )
    loss = (losses * data["loss_mask"].flatten()).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def named(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """HuggingFace's tensors of the family under the names that they have here."""
    result = {}
    for key, tensor in tensors.items():
        for ours, theirs in RENAMED.get(hf_type(CONVERTIBLE[name]), ()):
            key = key.replace(theirs, ours)
        result[key] = tensor
    return result


def weights_of(name: str) -> dict[str, torch.Tensor]:
    """The weights of ``huggingface(name)`` under the names that they have here."""
    theirs = huggingface(name)
    return named(name, {key: each.detach() for key, each in theirs.named_parameters()})


def gpt(name: str, weights: Mapping[str, torch.Tensor], **changes) -> GPTModule:
    """The family's model here, with copies of these weights. changes: of its shape."""
    model = build_gpt(replace(CONVERTIBLE[name], **changes))
    model.load_state_dict({key: each.clone() for key, each in weights.items()}, assign=True)
    return model


@torch.no_grad()
def load(model: CapturedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a model that runs on ranks its parts of these weights; padding rows get values that must
    not matter.
    """
    model.gatherer.gather()
    for name in model.buffer.slots:
        model.buffer.parameter(name).fill_(0.37)
    for shard in model.shards(model.buffer.data):
        shard.tensor.copy_(part_of(weights[shard.name], shard))
    model.buffer.seal(model.buffer.buckets)
    model.optimizer.refresh_master()


def blueprint_of(shape: ModelConfig, tp: int) -> Blueprint:
    """A shape's graph on ``tp`` tensor-parallel ranks, with its plan."""
    config = Config(
        model=shape,
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        train=TrainConfig(micro_batch_size=2, global_batch_size=2),
    )
    return gpt_blueprint(traced_gpt(config), config, tp, CLUSTERS["cpu"])
