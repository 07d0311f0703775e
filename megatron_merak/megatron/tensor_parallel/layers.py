"""Megatron-LM's linear and embedding layers, whose weight is sharded over tensor-parallel ranks.

They initialise their weights, take sequences first, [s, b, h], and return the bias beside the
output, for the caller to add where ``skip_bias_add`` is set.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ConfigError
from ..config import Initialise, ModelParallelConfig, check
from ..streams import current_device
from .attributes import set_tensor_model_parallel_attributes
from .linear import linear_with_frozen_weight, linear_with_grad_accumulation_and_async_allreduce
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from .utils import VocabUtility, divided, group_of


class _Sharded(nn.Module):
    """What the layers share: the group, and how parameters are made.

    config:    of the model.
    group:     None: that of ``parallel_state``.
    is_expert: whether the layer is an expert's.
    """

    def __init__(
        self, config: ModelParallelConfig, group: dist.ProcessGroup | None, is_expert: bool
    ):
        super().__init__()
        check(config)
        self.config = config
        self.is_expert = is_expert
        self.tp_group = group_of(group, is_expert)
        self.expert_parallel = is_expert and config.expert_model_parallel_size > 1
        # Tokens are exchanged between the ranks of experts by the model.
        self.explicit_expert_comm = is_expert and (self.ranks > 1 or self.expert_parallel)

    @property
    def ranks(self) -> int:
        return self.tp_group.size()

    def _parameter(self, *shape: int) -> nn.Parameter:
        """Memory for a parameter, zero where it is initialised at all."""
        device = torch.device("cpu") if self.config.use_cpu_initialization else current_device()
        make = torch.zeros if self.config.perform_initialization else torch.empty
        parameter = nn.Parameter(make(*shape, device=device, dtype=self.config.params_dtype))
        parameter.allreduce = not self.expert_parallel  # type: ignore[attr-defined]
        return parameter

    def _initialise(
        self,
        weight: nn.Parameter,
        whole: tuple[int, int],
        dim: int,
        method: Initialise,
        stride: int = 1,
        keep_whole: bool = False,
    ) -> Tensor | None:
        """Initialise a weight that is sharded along ``dim``; return the whole one where it is to be
        kept.
        """
        if not self.config.perform_initialization:
            return None
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=stride)
        if not self.config.use_cpu_initialization:
            tracker = get_cuda_rng_tracker()
            expert = [get_expert_parallel_rng_tracker_name()] if self.is_expert else []
            with tracker.fork(*expert), torch.no_grad():
                method(weight)
            return None
        full = torch.empty(*whole, dtype=torch.float32)
        with torch.no_grad():
            method(full)
            full = full.to(self.config.params_dtype)
            # Each of the parts that lie one behind the other is sharded on its own.
            size = divided("shard of a weight", weight.shape[dim], stride)
            parts = full.split(size, dim)[self.tp_group.rank() :: self.ranks]
            weight.copy_(torch.cat(parts, dim))
        return full if keep_whole else None

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, **how) -> Tensor:
        fused = self.config.gradient_accumulation_fusion
        if not weight.requires_grad:
            return linear_with_frozen_weight(x, weight, bias, fused, tp_group=self.tp_group, **how)
        return linear_with_grad_accumulation_and_async_allreduce(
            x, weight, bias, fused, tp_group=self.tp_group, **how
        )

    def sharded_state_dict(self, *_args: object, **_named: object) -> dict[str, object]:
        """Refused: Megatron-LM's distributed checkpoints are read and written by merak-convert."""
        reason = "layers do not write Megatron-LM's distributed checkpoints"
        remedy = "Use state_dict(), of this rank's shard, or merak-convert"
        raise ConfigError("sharded_state_dict", type(self).__name__, reason, remedy)


class ColumnParallelLinear(_Sharded):
    """Y = X A^T + b with the output features of A [o, i] sharded: x [s, b, i] -> [s, b, o / n].

    config, init_method:          of the weight; the bias is zero.
    bias:                         whether there is one.
    gather_output:                return all features on every rank.
    stride:                       number of parts of A, each sharded on its own.
    keep_master_weight_for_test:  keep the whole initial weight in ``master_weight``.
    skip_bias_add:                return the bias instead of adding it.
    skip_weight_param_allocation: take the weight as an argument of ``forward``.
    embedding_activation_buffer, grad_output_buffer: take the operands of weight gradients where
                                  config.defer_embedding_wgrad_compute is set.
    is_expert:                    the layer is an expert's, whose tokens the model exchanges.
    tp_comm_buffer_name:          no effect, as in Megatron-LM.
    disable_grad_reduce:          the caller sums the input's gradient over ranks.
    tp_group:                     None: that of ``parallel_state``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initialise,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(config, tp_group, is_expert)
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        self.disable_grad_reduce = disable_grad_reduce
        self.output_size_per_partition = divided("output_size", output_size, self.ranks)
        self.weight: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            self.weight = self._parameter(self.output_size_per_partition, input_size)
            self.master_weight = self._initialise(
                self.weight,
                (output_size, input_size),
                0,
                init_method,
                stride=stride,
                keep_whole=keep_master_weight_for_test,
            )
        self.bias = self._parameter(self.output_size_per_partition) if bias else None
        if self.bias is not None:
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=stride)
        self.sequence_parallel = config.sequence_parallel and self.ranks > 1
        reduces = self.ranks > 1 and not self.sequence_parallel
        self.allreduce_dgrad = reduces and not disable_grad_reduce

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias that the caller adds, or None.

        input_:                [s, b, i], or [s / n, b, i] where sequences are divided.
        weight:                in place of the layer's own.
        runtime_gather_output: in place of ``gather_output``.
        """
        weight = self._weight(weight)
        own = self.explicit_expert_comm
        reduced_elsewhere = self.allreduce_dgrad or self.sequence_parallel
        if not (reduced_elsewhere or own or self.disable_grad_reduce):
            input_ = copy_to_tensor_model_parallel_region(input_, self.tp_group)
        how: dict[str, object] = {
            "allreduce_dgrad": self.allreduce_dgrad and not own,
            "sequence_parallel": self.sequence_parallel and not own,
        }
        if self.config.defer_embedding_wgrad_compute:
            how |= self._deferred(input_)
        output = self._product(input_, weight, None if self.skip_bias_add else self.bias, **how)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def _weight(self, given: Tensor | None) -> Tensor:
        expected = (self.output_size_per_partition, self.input_size)
        weight = self.weight if given is None else given
        if weight is None:
            reason = "the layer has no weight of its own (skip_weight_param_allocation)"
            raise ConfigError("weight", None, reason, "Give one to forward")
        if tuple(weight.shape) != expected:
            reason = f"the layer's weight is {expected}"
            raise ConfigError("weight of shape", tuple(weight.shape), reason, "Give such a one")
        return weight

    def _deferred(self, input_: Tensor) -> dict[str, object]:
        limit = self.config.wgrad_deferral_limit
        kept = self.embedding_activation_buffer
        if kept is None or self.grad_output_buffer is None:
            reason = "the layer has no buffers for what is deferred"
            remedy = "Give embedding_activation_buffer and grad_output_buffer"
            raise ConfigError("defer_embedding_wgrad_compute", True, reason, remedy)
        if limit == 0 or len(kept) < limit:
            kept.append(input_)
        return {"grad_output_buffer": self.grad_output_buffer, "wgrad_deferral_limit": limit}

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, "
            f"bias={self.bias is not None}, TP={self.ranks}"
        )


class RowParallelLinear(_Sharded):
    """Y = X A^T + b with the input features of A [o, i] sharded: x [s, b, i / n] -> [s, b, o].

    bias:              whether there is one. It is not sharded.
    input_is_parallel: each rank has its slice of x; else all of it.
    Other arguments:   as of ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initialise,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(config, tp_group, is_expert)
        if config.sequence_parallel and not input_is_parallel:
            reason = "a part of the sequence has no features to divide"
            raise ConfigError("input_is_parallel", False, reason, "Give slices of the features")
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = config.sequence_parallel
        self.input_size_per_partition = divided("input_size", input_size, self.ranks)
        self.weight = self._parameter(output_size, self.input_size_per_partition)
        self.master_weight = self._initialise(
            self.weight,
            (output_size, input_size),
            1,
            init_method,
            stride=stride,
            keep_whole=keep_master_weight_for_test,
        )
        self.bias = self._parameter(output_size) if bias else None
        if self.bias is not None:
            # Whoever reduces gradients sums those of the parts of a sequence.
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias that the caller adds, or None.

        input_: [s, b, i / n], or [s, b, i]. The output is [s / n, b, o] where sequences are
                divided.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        output = self._product(
            input_, self.weight, None, allreduce_dgrad=False, sequence_parallel=False
        )
        if self.explicit_expert_comm:
            assert self.skip_bias_add, "an expert's bias is added where its tokens are summed"
        elif self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, "
            f"bias={self.bias is not None}, TP={self.ranks}"
        )


class VocabParallelEmbedding(_Sharded):
    """Rows of a table [v, h] sharded over ranks: ids int64 [b, s] -> [b, s, h].

    reduce_scatter_embeddings: return this rank's part of the sequence, [s / n, b, h].
    Other arguments:           as of ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Initialise,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(config, tp_group, is_expert=False)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = config.deterministic_mode
        first, end = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, self.tp_group.rank(), self.ranks
        )
        self.vocab_start_index = first
        self.vocab_end_index = end
        self.num_embeddings_per_partition = end - first
        self.weight = self._parameter(self.num_embeddings_per_partition, embedding_dim)
        self._initialise(self.weight, (num_embeddings, embedding_dim), 0, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        """Return the rows of ids [b, s]; where sequences are divided, with the sequence first."""
        outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        ids = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        rows = self.weight[ids] if self.deterministic_mode else F.embedding(ids, self.weight)
        rows = rows.masked_fill(outside.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, self.tp_group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, TP={self.ranks}"
