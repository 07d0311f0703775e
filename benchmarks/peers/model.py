"""The Llama of the peers, whole or one pipeline stage of it, made of HuggingFace's own modules."""

from contextlib import nullcontext

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from benchmarks.step.cases import Case, ModelShape
from benchmarks.step.weights import fill


def llama_config(shape: ModelShape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.sequence,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rotary_base},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def whole_model(shape: ModelShape, seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    model = LlamaForCausalLM(llama_config(shape)).to(dtype).train()
    fill(model.named_parameters(), seed)
    return model


def parameter_dtype(case: Case) -> torch.dtype:
    """Tuned bf16 keeps bf16 weights (and fp32 masters); out of the box, bf16 is autocast over fp32
    weights.
    """
    return torch.bfloat16 if case.precision == "bf16" and case.tuned else torch.float32


def autocast(case: Case):
    """The context of a forward pass: what HuggingFace's Trainer does for --bf16, for the
    out-of-the-box peers.
    """
    if case.precision == "bf16" and not case.tuned:
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return nullcontext()


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits [b, s, V] against labels [b, s], in fp32 as HuggingFace's own
    loss.
    """
    return nn.functional.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.reshape(-1))


class LlamaStage(nn.Module):
    """The given layers, as stage `stage` of `stages`; the first has the embedding, the last the
    norm and the head.

    forward: tokens int64 [b, s] or hidden states [b, s, h] -> hidden states [b, s, h] or logits [b,
             s, V].
    """

    def __init__(
        self, shape: ModelShape, case: Case, layers: range, stage: int, stages: int, seed: int
    ):
        super().__init__()
        config = llama_config(shape)
        self.case = case
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden) if stage == 0 else None
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer(config, i) for i in layers})
        final = stage == stages - 1
        self.norm = LlamaRMSNorm(shape.hidden, eps=shape.norm_epsilon) if final else None
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if final else None
        self.to(parameter_dtype(case))
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("positions", torch.arange(shape.sequence)[None], persistent=False)
        prefixed = (
            (name if name.startswith("lm_head") else f"model.{name}", p)
            for name, p in self.named_parameters()
        )
        fill(prefixed, seed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with autocast(self.case):
            if self.embed_tokens is not None:
                hidden = self.embed_tokens(hidden)
            angles = self.rotary(hidden, self.positions)
            for layer in self.layers.values():
                hidden = layer(
                    hidden, attention_mask=None, position_embeddings=angles, use_cache=False
                )
            if self.norm is None:
                return hidden
            return self.lm_head(self.norm(hidden))
