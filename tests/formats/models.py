"""Tiny models of transformers with random values, and training states of them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_merak.checkpoint.hf import ModuleSource
from megatron_merak.formats.state import MASTER, MOMENTS, WEIGHTS, PortableState

BASE: dict[str, Any] = dict(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=32, n_head=4, n_layer=2, n_positions=64, n_inner=48),
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "head_dim": 16,
    },
}


def tiny(family: str, **more: Any):
    """A model whose every parameter is random, norms and biases included."""
    torch.manual_seed(3)
    own = {"vocab_size": 90, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    base = own if family == "gpt2" else BASE
    config = AutoConfig.for_model(family, **{**base, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3)
            if "norm" in name or "ln_" in name:
                parameter.add_(1)
    return model


def state_of(model: Any, steps: int = 0, dtype: torch.dtype = torch.float32) -> PortableState:
    """The weights of a model as a state; with random moments where there are ``steps``."""
    kinds = {}
    drawn = torch.Generator().manual_seed(5)
    for kind in (*MOMENTS, *([MASTER] if dtype != torch.float32 else [])) if steps else ():
        values = torch.nn.Module()
        source = ModuleSource(values)
        source._tensors = {
            name: torch.rand(parameter.shape, generator=drawn)
            for name, parameter in model.named_parameters()
        }
        kinds[kind] = source
    weights = ModuleSource(model.to(dtype))
    names = dict(model.named_parameters())
    weights._tensors = {name: weights._tensors[name] for name in names}
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return PortableState(
        kinds={WEIGHTS: weights, **kinds},
        config=config,
        iteration=7 if steps else 0,
        optimizer_steps=steps,
        consumed_samples=28 if steps else 0,
    )


def assert_equal(one: PortableState, other: PortableState) -> None:
    """Every tensor and count of two states is equal, bit for bit."""
    assert one.kinds.keys() == other.kinds.keys()
    for kind, source in one.kinds.items():
        theirs = other.kinds[kind]
        assert sorted(source.names()) == sorted(theirs.names())
        for name in source.names():
            value = source.read(name)
            assert value.dtype == theirs.read(name).dtype, (kind, name)
            assert torch.equal(value, theirs.read(name)), (kind, name)
            if value.dim():
                rows = ((1, value.shape[0]),)
                assert torch.equal(source.read(name, 0, rows), theirs.read(name, 0, rows))
    counts = ("iteration", "optimizer_steps", "consumed_samples")
    assert [getattr(one, each) for each in counts] == [getattr(other, each) for each in counts]
