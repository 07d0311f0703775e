"""The HuggingFace model that is the GPT of flags: its config.json from our settings, and our settings
from a config.json.

It has the function and the tensor names of one of these model types, or of none:

    gpt2        learned positions, LayerNorm, GELU, biases
    llama       rotary, RMSNorm, SwiGLU, biases everywhere or nowhere
    qwen2       rotary, RMSNorm, SwiGLU, biases of queries, keys and values only
    qwen3       rotary, RMSNorm, SwiGLU, no biases, normalized queries and keys
    stablelm    rotary, LayerNorm, SwiGLU, no biases but perhaps of queries, keys and values
    starcoder2  rotary, LayerNorm, GELU, biases; its MLP has other tensor names (RENAMED)
    mixtral     llama without biases, with experts, weighed among those of a token
    qwen3_moe   qwen3 with experts
    qwen2_moe   llama or qwen2 with experts, one of them shared behind a gate
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
    }
)

# (here, in HuggingFace's model) of tensor names that differ, by model type.
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {"starcoder2": ((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj."))}
)

# Of --use-rope-scaling, as `rotary_frequencies` computes it.
_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TRAINED_POSITIONS = 8192


def is_gpt2_style(config: ModelConfig) -> bool:
    """Whether HuggingFace's GPT-2 can hold this model, so that its tensor names are used."""
    return (
        config.position_embedding_type == "learned_absolute"
        and config.normalization == "LayerNorm"
        and not (config.swiglu or config.disable_bias_linear or config.qk_layernorm)
        and config.query_groups == config.num_attention_heads
        and config.head_dim * config.num_attention_heads == config.hidden_size
    )


def hf_type(model: ModelConfig) -> str:
    """Return the model type of transformers that computes what ``model`` computes. Raises
    ConfigError if none does.
    """
    if is_gpt2_style(model):
        return "gpt2"
    if model.position_embedding_type != "rope":
        raise _no_type("--position-embedding-type", model.position_embedding_type, "rope")
    if model.num_experts is not None:
        return _mixture_type(model)
    biased = not model.disable_bias_linear
    qkv = model.add_qkv_bias
    if model.normalization == "RMSNorm":
        if not model.swiglu:
            raise _no_type("--swiglu", "off", "on, with --normalization RMSNorm")
        if model.rotary_percent != 1:
            raise _no_type(
                "--rotary-percent", model.rotary_percent, "1, with --normalization RMSNorm"
            )
        if not model.qk_layernorm:
            return "llama" if biased or not qkv else "qwen2"
        if biased or qkv:
            raise _no_type(
                "--qk-layernorm", "on", "off, or --disable-bias-linear without --add-qkv-bias"
            )
        return "qwen3"
    if model.qk_layernorm:
        raise _no_type("--qk-layernorm", "on", "off, or --normalization RMSNorm")
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        raise _no_type(
            "--kv-channels", model.head_dim, "the hidden size / attention heads, or RMSNorm"
        )
    if model.swiglu and not biased:
        return "stablelm"
    if model.swiglu or not biased:
        raise _no_type(
            "--disable-bias-linear", "off" if biased else "on", "on with --swiglu, off without it"
        )
    if model.rotary_percent != 1:
        raise _no_type("--rotary-percent", model.rotary_percent, "1, without --swiglu")
    return "starcoder2"


def _mixture_type(model: ModelConfig) -> str:
    """Return the model type of a mixture with rotary embedding."""
    if model.normalization != "RMSNorm":
        raise _no_type("--normalization", model.normalization, "RMSNorm, with --num-experts")
    if model.rotary_percent != 1:
        raise _no_type("--rotary-percent", model.rotary_percent, "1, with --normalization RMSNorm")
    if model.moe_shared_expert_intermediate_size is not None:
        if not model.moe_shared_expert_gate:
            reason = (
                "the model of transformers for a shared expert, qwen2_moe, has it behind a gate"
            )
            remedy = "Models that can be converted have the gate"
            raise ConfigError("--moe-shared-expert-gate", "off", reason, remedy)
        if model.qk_layernorm:
            raise _no_type("--qk-layernorm", "on", "off, with a shared expert")
        return "qwen2_moe"
    if model.add_qkv_bias:
        raise _no_type("--add-qkv-bias", "on", "off, with --num-experts")
    if model.qk_layernorm:
        return "qwen3_moe"
    if model.moe_router_pre_softmax:
        raise _no_type("--moe-router-pre-softmax", "on", "off, or --qk-layernorm")
    return "mixtral"


def _no_type(flag: str, value: Any, instead: str) -> ConfigError:
    reason = "no model of transformers has this with the other settings of the checkpoint"
    return ConfigError(flag, value, reason, f"Models that can be converted have {instead}")


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the HuggingFace model that is ``model``; its vocabulary size must
    be known.

    The special tokens are those of no tokenizer. Raises ConfigError if transformers has no such
    model.
    """
    kind = hf_type(model)
    config = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "gpt2":
        return config | _gpt2(model)
    return config | _rotary(model) | _OWN[kind](model)


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": "gelu_new",
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
    }


def _rotary(model: ModelConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.use_rope_scaling:
        lengths = {
            "factor": model.rope_scaling_factor,
            "original_max_position_embeddings": _TRAINED_POSITIONS,
        }
        rope |= _SCALING | lengths
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "max_position_embeddings": model.max_positions,
        "rope_parameters": rope,
        "attention_dropout": model.attention_dropout,
    }


def _llama(model: ModelConfig) -> dict[str, Any]:
    biased = not model.disable_bias_linear
    return _rms(model) | {"attention_bias": biased, "mlp_bias": biased}


def _rms(model: ModelConfig) -> dict[str, Any]:
    return {"rms_norm_eps": model.norm_epsilon, "hidden_act": "silu", "head_dim": model.head_dim}


def _mixtral(model: ModelConfig) -> dict[str, Any]:
    return _rms(model) | {
        "intermediate_size": model.expert_ffn_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "sliding_window": None,
    }


def _qwen_moe(model: ModelConfig) -> dict[str, Any]:
    return _rms(model) | {
        "moe_intermediate_size": model.expert_ffn_size,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    return _qwen_moe(model) | {"attention_bias": False, "sliding_window": None}


def _qwen2_moe(model: ModelConfig) -> dict[str, Any]:
    return _qwen_moe(model) | {
        "shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "qkv_bias": model.add_qkv_bias,
        "use_sliding_window": False,
    }


def _stablelm(model: ModelConfig) -> dict[str, Any]:
    rope = _rotary(model)["rope_parameters"] | {"partial_rotary_factor": model.rotary_percent}
    return {
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "use_qkv_bias": model.add_qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "rope_parameters": rope,
    }


def _starcoder2(model: ModelConfig) -> dict[str, Any]:
    return {
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": None,
        "embedding_dropout": model.hidden_dropout,
        "residual_dropout": model.hidden_dropout,
    }


_OWN: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _rms,
        "qwen3": _rms,
        "mixtral": _mixtral,
        "qwen3_moe": _qwen3_moe,
        "qwen2_moe": _qwen2_moe,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
    }
)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``ModelConfig`` that a config.json asks for, complete as transformers
    writes it.

    What the GPT of flags has no setting for is not looked at: compare ``hf_config`` of the result
    with ``config``. Raises ConfigError for another model type.
    """
    kind = config.get("model_type")
    if kind is None or kind not in ARCHITECTURES:
        remedy = "Train it with merak-pretrain-hf, which takes any model type"
        raise ConfigError(
            "model type", kind, f"the GPT of flags can be {', '.join(ARCHITECTURES)}", remedy
        )
    shared = {
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "init_method_std": config["initializer_range"],
        "make_vocab_size_divisible_by": 1,
    }
    return shared | (_gpt2_settings(config) if kind == "gpt2" else _rotary_settings(kind, config))


def _gpt2_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config["n_inner"] or 4 * config["n_embd"],
        "seq_length": config["n_positions"],
        "max_position_embeddings": config["n_positions"],
        "norm_epsilon": config["layer_norm_epsilon"],
        "attention_dropout": config["attn_pdrop"],
        "hidden_dropout": config["resid_pdrop"],
    }


def _rotary_settings(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    rope = config["rope_parameters"]
    norm = "rms_norm_eps" in config
    scaled = rope.get("rope_type") == "llama3"
    biased = kind == "starcoder2" or bool(config.get("attention_bias")) and kind == "llama"
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": width,
        "num_attention_heads": heads,
        "ffn_hidden_size": config["intermediate_size"],
        "seq_length": config["max_position_embeddings"],
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": config.get("head_dim") or width // heads,
        "position_embedding_type": "rope",
        "rotary_base": int(rope["rope_theta"]),
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "use_rope_scaling": scaled,
        **({"rope_scaling_factor": rope["factor"]} if scaled else {}),
        "normalization": "RMSNorm" if norm else "LayerNorm",
        "norm_epsilon": config["rms_norm_eps"]
        if norm
        else config.get("layer_norm_eps", config.get("norm_epsilon")),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "swiglu": kind != "starcoder2",
        "disable_bias_linear": not biased,
        "add_qkv_bias": kind == "qwen2"
        or bool(config.get("use_qkv_bias") or config.get("qkv_bias")),
        "attention_dropout": config["attention_dropout"],
        "hidden_dropout": config.get("hidden_dropout", config.get("residual_dropout", 0.0)),
        **_expert_settings(kind, config),
    }


def _expert_settings(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if kind not in ("mixtral", "qwen3_moe", "qwen2_moe"):
        return {}
    mixtral = kind == "mixtral"
    shared = config.get("shared_expert_intermediate_size")
    experts = config.get("num_local_experts", config.get("num_experts"))
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": config["intermediate_size" if mixtral else "moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not (mixtral or config["norm_topk_prob"]),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
    }
