"""A Llama as torchtitan writes it: its names, and rotary embeddings of pairs of neighbours."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = dim // heads
        self.repeats = heads // kv_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        rows, length, dim = x.shape
        q, k, v = (w(x).view(rows, length, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        k, v = (each.repeat_interleave(self.repeats, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(rows, length, dim))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Heads whose neighbouring elements are turned as complex numbers.

    x:     [rows, length, heads, head_dim].
    turns: complex, [length, head_dim / 2].
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns[:, None]).flatten(3)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.hidden_size
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.attention = Attention(dim, *heads)
        self.feed_forward = FeedForward(dim, config.intermediate_size)
        self.attention_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """config: of transformers."""

    def __init__(self, config):
        super().__init__()
        self.theta = config.rope_parameters["rope_theta"]
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict(
            {str(n): Block(config) for n in range(config.num_hidden_layers)}
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("freqs_cis", self.turns(64))

    def turns(self, length: int) -> torch.Tensor:
        rates = self.theta ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.outer(torch.arange(length).float(), rates)
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.freqs_cis[: tokens.shape[1]])
        return self.output(self.norm(x))
