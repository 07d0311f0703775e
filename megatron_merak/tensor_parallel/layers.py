"""Linear and embedding layers whose weight is split over the tensor-parallel ranks.

``collectives='call'``: the layer calls its own collectives, as a stand-alone module.
``collectives='edge'``: the layer only computes on its shard; whoever lists the segments owns the collectives.
``sink``, when set, receives weight gradients instead of autograd.
Weights are not initialised: what fills them knows the full tensor, so that the result does not depend on the split.
"""

import torch
from torch import Tensor, nn

from .. import ops
from .mappings import (
    Group,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)


def divide(extent: int, parts: int) -> int:
    """extent / parts; a remainder is our own mistake, since the configuration was validated."""
    assert extent % parts == 0, f"{extent} does not divide by {parts}"
    return extent // parts


class ParallelLayer(nn.Module):
    """What the three layers share: the group, who calls collectives, and where weight gradients go."""

    def __init__(self, group: Group, collectives: str):
        super().__init__()
        assert collectives in ("call", "edge"), collectives
        self.group, self.calls = group, collectives == "call"
        self.sink: ops.WeightGradientSink | None = None


class ColumnParallelLinear(ParallelLayer):
    """Y = X A^T + b with A's output features split: x [..., i] replicated -> [..., o / n].

    ``gather_output`` returns [..., o] on every rank ('call' only). weight is [o / n, i], bias [o / n].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        collectives: str = "call",
        gather_output: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives)
        assert self.calls or not gather_output, "under 'edge' the layer has no collectives"
        rows = divide(out_features, group_size(group))
        self.gather_output = gather_output
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            x = copy_to_tensor_model_parallel_region(x, self.group)
        y = ops.linear(x, self.weight, self.bias, self.sink)
        return gather_from_tensor_model_parallel_region(y, self.group) if self.calls and self.gather_output else y


class RowParallelLinear(ParallelLayer):
    """Y = X A^T + b with A's input features split: x [..., i / n] -> [..., o] replicated.

    weight is [o, i / n]; bias [o] is replicated and added after the sum. With ``skip_bias_add``, and always under
    'edge', the bias is left to the caller, who fuses it with dropout and residual. ``input_is_parallel=False`` splits a
    replicated x.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        collectives: str = "call",
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives)
        assert self.calls or input_is_parallel, "under 'edge' the layer has no collectives"
        columns = divide(in_features, group_size(group))
        self.input_is_parallel, self.adds_bias = input_is_parallel, bias and self.calls and not skip_bias_add
        self.weight = nn.Parameter(torch.empty(out_features, columns, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.calls and not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.group)
        y = ops.linear(x, self.weight, None, self.sink)
        if self.calls:
            y = reduce_from_tensor_model_parallel_region(y, self.group)
        return y + self.bias if self.adds_bias else y


class VocabParallelEmbedding(ParallelLayer):
    """Rows of the table split over ranks: token ids int64 [...] -> [..., h], zero ('edge': partial) outside this rank's
    rows.

    ``num_embeddings`` must divide by the group size: pad it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = None,
        collectives: str = "call",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives)
        rows = divide(num_embeddings, group_size(group))
        self.start = rows * group_rank(group)
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, dtype=dtype, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        if group_size(self.group) == 1:
            return ops.embedding(ids, self.weight, self.sink)
        local = ids - self.start
        outside = (local < 0) | (local >= self.weight.shape[0])
        y = ops.embedding(local.masked_fill(outside, 0), self.weight, self.sink).masked_fill(outside.unsqueeze(-1), 0.0)
        return reduce_from_tensor_model_parallel_region(y, self.group) if self.calls else y
