"""Tiny models of many families, with batches, random weights, and the plain way to run a captured
graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.empty import init_empty_weights

BATCH, LENGTH, TARGET = 2, 16, 8

_SIZES = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    "sliding_window": 8,
    "state_size": 8,
    "use_cache": False,
}
_CLIP_PART = {
    k: _SIZES[k]
    for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_SEQ2SEQ, _IMAGE = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"

# name: auto class, what differs from _SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (_CAUSAL, {}),
    "gpt2": (_CAUSAL, {}),
    "bloom": (_CAUSAL, {}),
    # what caps scores; older releases default to sdpa
    "gemma2": (_CAUSAL, {"attn_implementation": "eager"}),
    "qwen3": (_CAUSAL, {}),
    "mistral": (_CAUSAL, {}),
    "mixtral": (_CAUSAL, {}),
    "qwen3_moe": (_CAUSAL, {}),
    "gpt_oss": (_CAUSAL, {}),
    "phi3": (_CAUSAL, {}),
    "phimoe": (_CAUSAL, {}),
    "falcon": (_CAUSAL, {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "opt": (_CAUSAL, {"word_embed_proj_dim": 32}),
    "gptj": (_CAUSAL, {"rotary_dim": 4}),
    "gpt_neox": (_CAUSAL, {}),
    "mamba": (_CAUSAL, {}),
    "olmo2": (_CAUSAL, {}),
    "recurrent_gemma": (_CAUSAL, {"lru_width": 32, "num_hidden_layers": 3}),
    "bert": (_MASKED, {}),
    "deberta-v2": (_MASKED, {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "t5": (_SEQ2SEQ, {}),
    "bart": (_SEQ2SEQ, {}),
    "vit": (_IMAGE, {}),
    "swin": (
        _IMAGE,
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2},
    ),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {
                **_CLIP_PART,
                "vocab_size": 96,
                "max_position_embeddings": 32,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {**_CLIP_PART, "image_size": 32, "patch_size": 8},
        },
    ),
}


def tiny(
    name: str, **overrides: Any
) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Any]]:
    """(build it with memory, build it without, a batch) of a family; ``overrides`` replace fields
    of its config.

    Both models come in train mode and without dropout. ``attn_implementation`` may be among the
    overrides, and ``batch``, ``length`` give the shape of the batch.
    """
    batch, length = overrides.pop("batch", BATCH), overrides.pop("length", LENGTH)
    attention = (
        {"attn_implementation": overrides.pop("attn_implementation")}
        if "attn_implementation" in overrides
        else {}
    )

    def real() -> nn.Module:
        import transformers  # here, since importing its models takes a rank longer than most tests

        auto = getattr(transformers, FAMILIES[name][0])
        make = auto.from_config if FAMILIES[name][0].startswith("Auto") else auto._from_config
        return make(configuration(name, **overrides), **attention).train()

    def empty() -> nn.Module:
        with init_empty_weights():
            return real()

    return real, empty, example(name, batch, length)


def configuration(name: str, **overrides: Any) -> Any:
    """The family's tiny configuration, every dropout zero unless ``overrides`` say otherwise."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    writable = {k for k in known if not isinstance(getattr(kind, k, None), property)}
    common = {k: v for k, v in _SIZES.items() if k in writable} if name != "clip" else {}
    config = kind(**{**common, **FAMILIES[name][1]})
    for part in (config, *(getattr(config, key) for key in getattr(config, "sub_configs", {}))):
        for field, value in list(vars(part).items()):
            if "drop" in field and isinstance(value, float):
                setattr(part, field, 0.0)
    if FAMILIES[name][0] == _SEQ2SEQ:
        config.decoder_start_token_id = 1
    for field, value in overrides.items():
        setattr(config, field, value)
    return config


def example(name: str, batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    """A batch for the family, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    auto = FAMILIES[name][0]
    ids = torch.randint(3, 96, (batch, length), generator=generator)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    if auto in (_CAUSAL, _MASKED):
        return {"input_ids": ids, "labels": ids.clone()}
    if auto == _IMAGE:
        return {
            "pixel_values": images,
            "labels": torch.randint(0, 2, (batch,), generator=generator),
        }
    if name == "clip":
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": images, "return_loss": True}
    labels = torch.randint(3, 96, (batch, TARGET), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 32, generator=generator), "labels": labels}
    return {"input_ids": ids, "labels": labels}


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, each from its own name; vectors (norms, biases) around 0.5: defaults of 0 and
    1 hide defects.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(
                seed * 1_000_003 + sum(map(ord, name)) * 31 + len(name)
            )
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.08
            parameter.copy_(values + (0.5 if parameter.dim() == 1 else 0.0))
    return model


def run(
    captured: Captured, parameters: Mapping[str, Tensor], batch: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The captured outputs, computed node by node with these parameters (by canonical name; more do
    no harm).
    """

    class Run(torch.fx.Interpreter):
        def get_attr(self, target, args, kwargs):
            return (
                parameters[target]
                if target in captured.shapes
                else super().get_attr(target, args, kwargs)
            )

    graph = captured.module.graph
    return Run(captured.module).run(
        *(batch[node.target] for node in graph.find_nodes(op="placeholder"))
    )


def gradients(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by canonical name) of the model as it is."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch)["loss"]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads
