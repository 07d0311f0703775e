"""The models that parity is shown on: our configuration of each, and HuggingFace's model with the
same numbers.
"""

from abc import ABC, abstractmethod

from torch import nn

from megatron_merak.config import ModelConfig

SEQUENCE, POSITIONS, LAYERS, HIDDEN, HEADS = 16, 24, 4, 32, 8


class Family(ABC):
    """Sizes are small and awkward: more positions than tokens, a vocabulary that no tensor-parallel
    size divides.
    """

    vocabulary: int
    ours: dict

    def model(self, hidden_dropout: float, attention_dropout: float) -> ModelConfig:
        return ModelConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            seq_length=SEQUENCE,
            max_position_embeddings=POSITIONS,
            vocab_size=self.vocabulary,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            **self.ours,
        )

    @abstractmethod
    def original(self) -> nn.Module:
        """HuggingFace's model, whose parameters are then loaded by name."""


class GPT2(Family):
    """Biases, LayerNorm, learned positions, tied embeddings. With TP=4 two ranks hold vocabulary
    padding alone.
    """

    vocabulary = 131
    ours = {"ffn_hidden_size": 48}

    def original(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=POSITIONS,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_inner=48,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
        return GPT2LMHeadModel(config)


class Llama(Family):
    """RMSNorm, SwiGLU, rotary, grouped queries, a head of its own; padding falls into the last
    rank's rows only.
    """

    vocabulary = 243
    ours = {
        "ffn_hidden_size": 40,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "num_query_groups": 4,
        "make_vocab_size_divisible_by": 8,
    }

    def original(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
            max_position_embeddings=POSITIONS,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)


class Qwen(Family):
    """Llama with norms on queries and keys, biases on the qkv projection, wider heads, tied
    embeddings.
    """

    vocabulary = 99
    ours = {
        "ffn_hidden_size": 56,
        "kv_channels": 6,
        "position_embedding_type": "rope",
        "rotary_base": 1000000,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "qk_layernorm": True,
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "group_query_attention": True,
        "num_query_groups": 4,
    }

    def original(self) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=56,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=4,
            head_dim=6,
            max_position_embeddings=POSITIONS,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            attention_bias=True,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
        model = Qwen3ForCausalLM(config)
        # attention_bias means all four projections; Qwen2 has it on q, k and v alone
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias = None
        return model


FAMILIES: dict[str, Family] = {"gpt2": GPT2(), "llama": Llama(), "qwen": Qwen()}
