"""Linear and embedding layers whose weight is split over the tensor-parallel ranks.

``collectives='call'``: the layer calls its own collectives, as a stand-alone module.
``collectives='edge'``: the layer only computes on its shard; whoever lists the segments owns the
collectives.
``sequence_parallel``: between the layers each rank has its part [b, s / n, h] of the sequence, not
all of it; 'call'
layers then gather their input and reduce-scatter their output.
``sink``, when set, receives weight gradients instead of autograd.
Weights are not initialised: what fills them knows the full tensor, so that the result does not
depend on the split.
"""

import torch
from torch import Tensor, nn

from .. import ops
from .mappings import (
    Group,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)


def divide(extent: int, parts: int) -> int:
    """extent / parts; a remainder is our own mistake, since the configuration was validated."""
    assert extent % parts == 0, f"{extent} does not divide by {parts}"
    return extent // parts


class ParallelLayer(nn.Module):
    """What the three layers share: the group, who calls which collectives, and where weight
    gradients go.
    """

    def __init__(self, group: Group, collectives: str, sequence_parallel: bool):
        super().__init__()
        assert collectives in ("call", "edge"), collectives
        self.group = group
        self.calls = collectives == "call"
        self.sequence_parallel = sequence_parallel
        self.sink: ops.WeightGradientSink | None = None

    def _full(self, x: Tensor) -> Tensor:
        """What a 'call' layer computes with: its input on all positions, whose gradient is partial
        on each rank.
        """
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(x, self.group)
        return copy_to_tensor_model_parallel_region(x, self.group)

    def _summed(self, partial: Tensor) -> Tensor:
        """A 'call' layer's output: the sum over ranks, all of it or this rank's part of the
        sequence.
        """
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.group)
        return reduce_from_tensor_model_parallel_region(partial, self.group)


class ColumnParallelLinear(ParallelLayer):
    """Y = X A^T + b with A's output features split: x [..., i] replicated -> [..., o / n].

    ``gather_output`` returns [..., o] on every rank ('call' only). weight is [o / n, i], bias [o /
    n]; with ``skip_bias_add`` it is left to the caller, who fuses it with the activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        collectives: str = "call",
        sequence_parallel: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives, sequence_parallel)
        assert self.calls or not gather_output, "under 'edge' the layer has no collectives"
        assert not (sequence_parallel and gather_output), "no part of the sequence would be left"
        rows = divide(out_features, group_size(group))
        self.gather_output = gather_output
        self.adds_bias = not skip_bias_add
        self.weight = nn.Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None

    def entering(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with."""
        return self._full(x) if self.calls else x

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(
            self.entering(x), self.weight, self.bias if self.adds_bias else None, self.sink
        )
        return (
            gather_from_tensor_model_parallel_region(y, self.group)
            if self.calls and self.gather_output
            else y
        )


class RowParallelLinear(ParallelLayer):
    """Y = X A^T + b with A's input features split: x [..., i / n] -> [..., o] replicated.

    weight is [o, i / n]; bias [o] is replicated and added after the sum. With ``skip_bias_add``,
    and always under 'edge', the bias is left to the caller, who fuses it with dropout and residual.
    ``input_is_parallel=False`` splits a replicated x.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        collectives: str = "call",
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives, sequence_parallel)
        assert self.calls or input_is_parallel, "under 'edge' the layer has no collectives"
        assert input_is_parallel or not sequence_parallel, (
            "a part of the sequence has no features to split"
        )
        columns = divide(in_features, group_size(group))
        self.input_is_parallel, self.adds_bias = (
            input_is_parallel,
            bias and self.calls and not skip_bias_add,
        )
        self.weight = nn.Parameter(torch.empty(out_features, columns, dtype=dtype, device=device))
        self.bias = (
            nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.calls and not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.group)
        return self.finish(ops.linear(x, self.weight, None, self.sink))

    def finish(self, y: Tensor) -> Tensor:
        """What becomes of this rank's product with the weight."""
        if self.calls:
            y = self._summed(y)
        if self.bias is None or not self.adds_bias:
            return y
        # On parts of the sequence each rank has a part of the bias's gradient.
        return y + copy_to_tensor_model_parallel_region(
            self.bias, self.group if self.sequence_parallel else None
        )


class VocabParallelEmbedding(ParallelLayer):
    """Rows of the table split over ranks: token ids int64 [...] -> [..., h], zero ('edge': partial)
    outside this rank's rows.

    ``num_embeddings`` must divide by the group size: pad it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = None,
        collectives: str = "call",
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, collectives, sequence_parallel)
        rows = divide(num_embeddings, group_size(group))
        self.start = rows * group_rank(group)
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, dtype=dtype, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        if group_size(self.group) == 1:
            return ops.embedding(ids, self.weight, self.sink)
        y = ops.embedding_part(ids, self.weight, self.start, self.sink)
        return self._summed(y) if self.calls else y
