"""The GPT that flags describe, in the shapes of GPT-2 and of Llama: a plain module with HuggingFace's
names, which is captured, cut and sharded like any other.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from .gpt_dense import EmbeddingRows, GPT2FeedForward, Linear, LlamaFeedForward, Matrices
from .gpt_experts import MixtureFeedForward
from .hf_config import is_gpt2_style
from .targets import IGNORED, targets


class Angles(NamedTuple):
    """Of rotary embedding: cosines and sines of all positions, each fp32 [1, 1, s, rotary_dim]."""

    cos: Tensor
    sin: Tensor


class GPTNorm(nn.Module):
    """LayerNorm or RMSNorm. Its output has the dtype of its weight, whatever its input's is."""

    def __init__(self, size: int, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_epsilon
        self.weight = nn.Parameter(torch.empty(size))
        layer = config.normalization == "LayerNorm"
        self.bias = nn.Parameter(torch.empty(size)) if layer else None

    def draw(self, key: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of "weight" or "bias"."""
        value = 1.0 if key == "weight" else 0.0
        return torch.full(self.weight.shape, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            weight = self.weight.to(x.dtype)
            bias = self.bias.to(x.dtype)
            return F.layer_norm(x, weight.shape, weight, bias, self.eps).to(self.weight.dtype)
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(x.dtype) * normed.to(x.dtype)).to(self.weight.dtype)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """[b, n, s, d] with the first features of each head turned by their position."""
    size = angles.cos.shape[-1]
    cos = angles.cos.to(x.dtype)
    sin = angles.sin.to(x.dtype)
    turned = x[..., :size]
    half = size // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    result = turned * cos + swapped * sin
    return result if size == x.shape[-1] else torch.cat((result, x[..., size:]), -1)


class Attention(nn.Module):
    """Causal attention: subclasses project."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = config.query_groups
        self.size = config.head_dim
        self.dropout = config.attention_dropout

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, heads or groups, s, d] each -> [b, s, heads * d]."""
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.groups != self.heads,
        )
        return context.transpose(1, 2).flatten(2)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[b, s, heads * d] -> [b, heads, s, d]."""
        return x.view(*x.shape[:2], heads, self.size).transpose(1, 2)


class GPT2Attention(Attention):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        matrices = Matrices(config)
        size = config.hidden_size
        self.c_attn = matrices.into(size, 3 * size)
        self.c_proj = matrices.out(size, size)

    def forward(self, x: Tensor, angles: Angles | None) -> Tensor:
        query, key, value = self.c_attn(x).chunk(3, -1)
        parts = (self.split(part, self.heads) for part in (query, key, value))
        return self.c_proj(self.attend(*parts))


class LlamaAttention(Attention):
    def __init__(self, config: ModelConfig):
        super().__init__(config)
        matrices = Matrices(config)
        size = config.hidden_size
        bias = matrices.bias or config.add_qkv_bias
        self.q_proj = matrices.into(size, self.heads * self.size, bias)
        self.k_proj = matrices.into(size, self.groups * self.size, bias)
        self.v_proj = matrices.into(size, self.groups * self.size, bias)
        self.o_proj = matrices.out(self.heads * self.size, size)
        self.q_norm = GPTNorm(self.size, config) if config.qk_layernorm else None
        self.k_norm = GPTNorm(self.size, config) if config.qk_layernorm else None

    def forward(self, x: Tensor, angles: Angles | None) -> Tensor:
        query = self._normed(self.q_proj(x), self.heads, self.q_norm)
        key = self._normed(self.k_proj(x), self.groups, self.k_norm)
        if angles is not None:
            query = rotated(query, angles)
            key = rotated(key, angles)
        value = self.split(self.v_proj(x), self.groups)
        return self.o_proj(self.attend(query, key, value))

    def _normed(self, x: Tensor, heads: int, norm: GPTNorm | None) -> Tensor:
        parts = x.view(*x.shape[:2], heads, self.size)
        return (parts if norm is None else norm(parts)).transpose(1, 2)


class GPTLayer(nn.Module):
    """Pre-norm attention and feed-forward, each followed by dropout and residual add.

    names: of its norms and its parts, in order.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        gpt2 = is_gpt2_style(config)
        self.names = GPT2_LAYER if gpt2 else LLAMA_LAYER
        self.dropout = config.hidden_dropout
        parts = (
            GPTNorm(config.hidden_size, config),
            GPT2Attention(config) if gpt2 else LlamaAttention(config),
            GPTNorm(config.hidden_size, config),
            self._feed_forward(config),
        )
        for name, part in zip(self.names, parts, strict=True):
            self.add_module(name, part)

    @staticmethod
    def _feed_forward(config: ModelConfig) -> nn.Module:
        if config.num_experts is not None:
            return MixtureFeedForward(config)
        if is_gpt2_style(config):
            return GPT2FeedForward(config)
        return LlamaFeedForward(config, config.ffn_size)

    def forward(
        self, x: Tensor, angles: Angles | None, auxiliary: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and the sum of the auxiliary losses up to this layer.

        auxiliary: that of the layers before; None: they have none.
        """
        before, attention, between, feed = (getattr(self, name) for name in self.names)
        x = self._add(x, attention(before(x), angles))
        if not isinstance(feed, MixtureFeedForward):
            return self._add(x, feed(between(x))), auxiliary
        output, own = feed(between(x))
        if own is not None:
            auxiliary = own if auxiliary is None else auxiliary + own
        return self._add(x, output), auxiliary

    def _add(self, x: Tensor, part: Tensor) -> Tensor:
        return x + F.dropout(part.to(x.dtype), self.dropout, self.training)


GPT2_LAYER = ("ln_1", "attn", "ln_2", "mlp")
LLAMA_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class PartNames(NamedTuple):
    """What a family calls the parts of its models. inside: all but the output layer."""

    inside: str
    tokens: str
    positions: str
    layers: str
    norm: str


GPT2_PARTS = PartNames("transformer", "wte", "wpe", layers="h", norm="ln_f")
LLAMA_PARTS = PartNames("model", "embed_tokens", "embed_positions", layers="layers", norm="norm")


class GPTModule(nn.Module):
    """The causal language model of ``config``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.shape = c
        self.names = GPT2_PARTS if is_gpt2_style(c) else LLAMA_PARTS
        names = self.names
        vocabulary = (c.vocab_size or 0, c.hidden_size)
        inside = nn.Module()
        inside.add_module(names.tokens, EmbeddingRows(vocabulary, c.init_method_std, bias=False))
        if c.position_embedding_type == "learned_absolute":
            table = (c.max_positions, c.hidden_size)
            inside.add_module(names.positions, EmbeddingRows(table, c.init_method_std, bias=False))
        inside.add_module(names.layers, nn.ModuleList(GPTLayer(c) for _ in range(c.num_layers)))
        inside.add_module(names.norm, GPTNorm(c.hidden_size, c))
        self.add_module(names.inside, inside)
        if c.position_embedding_type == "rope":
            scaling = c.rope_scaling_factor if c.use_rope_scaling else None
            frequencies = ops.rotary_frequencies(c.rotary_dim, c.rotary_base, scaling)
            self.register_buffer("frequencies", frequencies, persistent=False)
        untied = c.untie_embeddings_and_output_weights
        self.lm_head = Linear(vocabulary, c.init_method_std, bias=False) if untied else None

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the units into which plans cut the model."""
        layers = (f"layer.{index}" for index in range(self.shape.num_layers))
        return "embedding", *layers, "head"

    @property
    def positions_name(self) -> str | None:
        """The name of the table of positions; None without one."""
        if self.shape.position_embedding_type != "learned_absolute":
            return None
        return f"{self.names.inside}.{self.names.positions}.weight"

    @property
    def fp32_residual(self) -> bool:
        """Whether its residual stream is fp32, whatever its weights are."""
        return self.shape.fp32_residual_connection

    def draw(self, name: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of a parameter: fp32, on the CPU. May be called by several
        threads.
        """
        path, _, key = name.rpartition(".")
        part: Any = self.get_submodule(path)
        return part.draw(key, generator)

    def _part(self, name: str) -> nn.Module:
        return self.get_submodule(f"{self.names.inside}.{name}")

    @property
    def evaluates_as_it_trains(self) -> bool:
        """Whether an evaluation computes what training does, dropout aside: routers have losses of
        their own in training alone.
        """
        return self.shape.num_experts is None

    def get_input_embeddings(self) -> nn.Module:
        return self._part(self.names.tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer: tied, it is the table of tokens."""
        return self.get_input_embeddings() if self.lm_head is None else self.lm_head

    def _angles(self, length: int, device: torch.device) -> Angles | None:
        c = self.shape
        if c.position_embedding_type != "rope":
            return None
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.get_buffer("frequencies"))
        angles = torch.cat((angles, angles), -1)[None, None]
        return Angles(angles.cos(), angles.sin())

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the losses of the targets, fp32, [].

        tokens:       int64 [b, s].
        targets:      int64 [b, s], the token that follows each; ``IGNORED`` where the loss leaves
                      it out.
        position_ids: int64 [b, s], of learned positions.
        """
        c = self.shape
        x = self.get_input_embeddings()(tokens)
        if c.position_embedding_type == "learned_absolute":
            x = x + self._part(self.names.positions)(position_ids)
        if c.fp32_residual_connection:
            x = x.to(torch.float32)
        x = F.dropout(x, c.hidden_dropout, self.training)
        angles = self._angles(tokens.shape[1], tokens.device)
        auxiliary = None
        for layer in self._part(self.names.layers).children():
            x, auxiliary = layer(x, angles, auxiliary)
        table = self.get_output_embeddings().get_parameter("weight")
        normed = self._part(self.names.norm)(x)
        logits = F.linear(normed, table).float()
        loss = F.cross_entropy(
            logits.view(-1, logits.shape[-1]),
            targets.view(-1),
            ignore_index=IGNORED,
            reduction="sum",
        )
        if auxiliary is None:
            return loss
        # Its gradient is that of a mean over tokens, and it is no part of the loss that is shown,
        # as in Megatron-LM.
        return loss + (targets != IGNORED).sum() * (auxiliary - auxiliary.detach())

    def batch_of(self, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `forward` takes, given a micro-batch of a GPT data set."""
        batch = {"tokens": samples["tokens"], "targets": targets(samples)}
        if self.shape.position_embedding_type == "learned_absolute":
            batch["position_ids"] = samples["position_ids"]
        return batch


def target_count(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the number of targets of a batch of `GPTModule` that count, fp32, []."""
    return (batch["targets"] != IGNORED).sum().float()
