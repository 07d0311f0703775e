"""Matrices of the GPT of flags, and the feed-forward part of its layers that has no experts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .hf_config import is_gpt2_style


class Weight(nn.Module):
    """A matrix that draws its initial values from a normal distribution, and its bias, of zeros.

    shape: of the weight, [out, in]; with ``transposed`` [in, out], as GPT-2 stores it.
    """

    def __init__(self, shape: tuple[int, int], std: float, bias: bool, transposed: bool = False):
        super().__init__()
        self.std = std
        self.transposed = transposed
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[int(transposed)])) if bias else None

    def draw(self, key: str, generator: torch.Generator) -> Tensor:
        """Return the initial value of "weight" or "bias"."""
        if key == "bias":
            return torch.zeros(self.weight.shape[int(self.transposed)])
        return torch.empty(self.weight.shape).normal_(0.0, self.std, generator=generator)


class Linear(Weight):
    def forward(self, x: Tensor) -> Tensor:
        if not self.transposed:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        product = (
            rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        )
        return product.view(*x.shape[:-1], -1)


class EmbeddingRows(Weight):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Matrices:
    """Makes the matrices of a model's layers."""

    def __init__(self, config: ModelConfig):
        self.bias = not config.disable_bias_linear
        self.transposed = is_gpt2_style(config)
        self.inner = config.init_method_std
        self.outer = config.init_method_std / math.sqrt(2 * config.num_layers)

    def into(self, size: int, width: int, bias: bool | None = None) -> Linear:
        """One whose output only its layer reads."""
        return self._linear(size, width, self.inner, self.bias if bias is None else bias)

    def out(self, size: int, width: int) -> Linear:
        """One whose output is added to the residual stream."""
        return self._linear(size, width, self.outer, self.bias)

    def _linear(self, size: int, width: int, std: float, bias: bool) -> Linear:
        shape = (size, width) if self.transposed else (width, size)
        return Linear(shape, std, bias, self.transposed)


class GPT2FeedForward(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        matrices = Matrices(config)
        self.c_fc = matrices.into(config.hidden_size, config.ffn_size)
        self.c_proj = matrices.out(config.ffn_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class LlamaFeedForward(nn.Module):
    """Two or three products with an activation between. width: of the activation."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__()
        matrices = Matrices(config)
        hidden = config.hidden_size
        self.gate_proj = matrices.into(hidden, width) if config.swiglu else None
        self.up_proj = matrices.into(hidden, width)
        self.down_proj = matrices.out(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
