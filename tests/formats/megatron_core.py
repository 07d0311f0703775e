"""Models of megatron-core, and what it needs in order to run without a GPU."""

import contextlib

import torch


def without_a_gpu(monkeypatch) -> None:
    """Replace what megatron-core asks of a GPU; process groups are there."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_: self)
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    # it asks whether this is None, and does not define it without Transformer Engine
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    # dropout is 0, and there is no generator of a GPU to fork
    monkeypatch.setattr(get_cuda_rng_tracker(), "fork", lambda *_: contextlib.nullcontext())


def their_model(config, grid=(1, 1, 1)):
    """megatron-core's own model of a config of transformers, or what one of its ranks has of it.

    grid: how many ranks there are: tensor-, pipeline- and expert-parallel.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    gpt2 = config.model_type == "gpt2"
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    heads = config.num_attention_heads
    norm = "LayerNorm" if gpt2 else "RMSNorm"
    qk_norm = config.model_type.startswith("qwen3")
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=getattr(config, "num_key_value_heads", heads),
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_hidden_size=config.n_inner if gpt2 else config.intermediate_size,
        moe_ffn_hidden_size=getattr(config, "moe_intermediate_size", None)
        or config.intermediate_size
        if experts
        else None,
        num_moe_experts=experts,
        moe_router_topk=getattr(config, "num_experts_per_tok", 2),
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=False,
        gated_linear_unit=not gpt2,
        activation_func=torch.nn.functional.silu if not gpt2 else _gelu,
        add_bias_linear=gpt2,
        add_qkv_bias=config.model_type == "qwen2",
        normalization=norm,
        layernorm_epsilon=config.layer_norm_epsilon if gpt2 else config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=grid[0],
        pipeline_model_parallel_size=grid[1],
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=grid[2],
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization=norm
    )
    return GPTModel(
        settings,
        spec,
        vocab_size=96,
        max_sequence_length=64,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        rotary_base=None if gpt2 else config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).eval()


def _gelu(values):
    return torch.nn.functional.gelu(values, approximate="tanh")


def logits(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask)[..., :90]
