"""The blocks that the native GPT's units are made of."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from ..segment import Collective
from ..tensor_parallel import (
    ColumnParallelLinear,
    RngTracker,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    group_size,
)
from ..tensor_parallel.layers import divide
from ..tensor_parallel.mappings import Group


@dataclass(frozen=True)
class Placement:
    """Where and how a unit's layers live: tensor-parallel group, who calls collectives, dtype,
    device, own RNG.

    ``sequence_parallel``: where tensor parallelism does not split the work (norms, dropout,
    residuals), each rank does
    its part of the sequence; of one rank it means nothing. ``recompute_activations``: the backward
    computes what enters the second matrix of the feed-forward part again. ``fp32_residual``: the
    residual stream is fp32.
    """

    group: Group = None
    collectives: str = "call"
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    rng: RngTracker | None = None
    sequence_parallel: bool = False
    recompute_activations: bool = False
    fp32_residual: bool = False

    @property
    def stream(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return torch.float32 if self.fp32_residual else self.dtype

    @property
    def tp(self) -> int:
        return group_size(self.group)

    @property
    def edges(self) -> bool:
        """Whether collectives stand between the segments instead of inside the layers."""
        return self.collectives == "edge" and self.tp > 1

    @property
    def on_parts(self) -> bool:
        """Whether ranks divide the sequence between the parallel layers."""
        return self.sequence_parallel and self.tp > 1

    @property
    def sums(self) -> Collective:
        """What becomes of partial results: values that leave a parallel layer, gradients that leave
        its input.
        """
        return Collective.REDUCE_SCATTER if self.on_parts else Collective.ALL_REDUCE

    @property
    def joins(self) -> Collective:
        """What a value needs on its way into a parallel layer, and the gradient of one that comes
        out of it.
        """
        return Collective.ALL_GATHER if self.on_parts else Collective.NONE

    def own_stream(self) -> AbstractContextManager[None]:
        """Random numbers of this rank's own where each has its part of the sequence, the shared
        ones elsewhere.
        """
        return self.rng.fork() if self.rng is not None and self.on_parts else nullcontext()

    def whole_gradient(self, parameter: Tensor) -> Tensor:
        """A replicated parameter as it is used on parts of the sequence: its gradient is summed
        over the ranks, here or by whoever owns the collectives.
        """
        return copy_to_tensor_model_parallel_region(
            parameter, self.group if self.on_parts and not self.edges else None
        )

    def border_shape(self, samples: int, length: int, hidden: int) -> tuple[int, int, int]:
        """What a rank has of the hidden state [samples, length, hidden] between two units."""
        return samples, divide(length, self.tp) if self.on_parts else length, hidden

    def kwargs(self) -> dict:
        return {
            "group": self.group,
            "collectives": self.collectives,
            "sequence_parallel": self.on_parts,
            "dtype": self.dtype,
            "device": self.device,
        }


class Norm(nn.Module):
    """LayerNorm or RMSNorm, as the configuration says. Its output has the dtype of its weight,
    whatever its input's is.

    ``partial``: each tensor-parallel rank norms other rows (its heads, or its part of the
    sequence), so the parameters'
    gradients must be summed.
    """

    def __init__(self, size: int, config: ModelConfig, place: Placement, partial: bool = False):
        super().__init__()
        self.group = place.group if partial and not place.edges else None
        self.eps = config.norm_epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=place.dtype, device=place.device))
        layer = config.normalization == "LayerNorm"
        self.bias = (
            nn.Parameter(torch.zeros(size, dtype=place.dtype, device=place.device))
            if layer
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, self.group)
        if self.bias is None:
            return ops.rms_norm(x, weight, self.eps).to(weight.dtype)
        bias = copy_to_tensor_model_parallel_region(self.bias, self.group)
        return ops.layer_norm(x, weight, bias, self.eps).to(weight.dtype)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of x + residual, and the sum, which has residual's dtype."""
        x = x.to(residual.dtype)
        weight = copy_to_tensor_model_parallel_region(self.weight, self.group)
        if self.bias is None:
            normed, total = ops.add_rms_norm(x, residual, weight, self.eps)
        else:
            bias = copy_to_tensor_model_parallel_region(self.bias, self.group)
            normed, total = ops.add_layer_norm(x, residual, weight, bias, self.eps)
        return normed.to(weight.dtype), total


class SelfAttention(nn.Module):
    """Heads split over ranks: [b, s, h] -> partial (or, calling its collectives, full) [b, s, h],
    no output bias.
    """

    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__()
        c = config
        tp = place.tp
        self.config = config
        self.rng = place.rng
        self.heads = c.num_attention_heads // tp
        self.groups = c.query_groups // tp
        width = (c.num_attention_heads + 2 * c.query_groups) * c.head_dim
        bias = not c.disable_bias_linear
        self.qkv = ColumnParallelLinear(
            c.hidden_size, width, bias or c.add_qkv_bias, **place.kwargs()
        )
        rows = c.num_attention_heads * c.head_dim
        self.proj = RowParallelLinear(
            rows, c.hidden_size, bias, skip_bias_add=True, **place.kwargs()
        )
        self.q_norm = Norm(c.head_dim, c, place, partial=True) if c.qk_layernorm else None
        self.k_norm = Norm(c.head_dim, c, place, partial=True) if c.qk_layernorm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        normed = self.q_norm is not None and self.k_norm is not None
        query, key, value = ops.split_heads(
            self.qkv(x), self.heads, self.groups, None if normed else angles
        )
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query)
            key = self.k_norm(key)
            if angles is not None:
                query, key = (ops.rotary(part, *angles) for part in (query, key))
        dropout = self.config.attention_dropout if self.training else 0.0
        if dropout > 0 and self.rng is not None:
            with self.rng.fork():
                context = ops.causal_attention(query, key, value, dropout)
        else:
            context = ops.causal_attention(query, key, value, dropout)
        return self.proj(context)


class FeedForward(nn.Module):
    """[b, s, h] -> partial (or full) [b, s, h] without output bias: SwiGLU, or GELU (tanh), which
    adds the bias of its one input matrix.
    """

    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__()
        c = config
        bias = not config.disable_bias_linear
        self.recomputes = place.recompute_activations
        self.gated = c.swiglu
        width = c.ffn_size * (2 if c.swiglu else 1)
        self.fc1 = ColumnParallelLinear(
            c.hidden_size, width, bias, skip_bias_add=not c.swiglu, **place.kwargs()
        )
        self.fc2 = RowParallelLinear(
            c.ffn_size, c.hidden_size, bias, skip_bias_add=True, **place.kwargs()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        weight = self.fc2.weight
        sink = self.fc2.sink
        if not self.recomputes:
            return self.fc2(ops.swiglu(y) if self.gated else ops.bias_gelu(y, self.fc1.bias))
        if self.gated:
            return self.fc2.finish(ops.gated_linear(y, weight, None, "silu", sink=sink))
        return self.fc2.finish(
            ops.gelu_linear(y, weight, None, self.fc1.bias, "gelu_tanh", sink=sink)
        )
