"""The GPT that flags describe, cut into the units that it names, for ``tests.graph.stages``: run by
the engine, without the fusions of a model that trains.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.lowering.rewrite import rewrite
from megatron_merak.graph.partition.cut import cut_layers
from megatron_merak.graph.sharding.shard import shard
from megatron_merak.models.gpt_module import GPTModule
from tests.graph.stages import Family


class GPTChain(Family):
    """The captured module on one rank, beside the module itself."""

    def __init__(
        self,
        model: GPTModule,
        samples: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ):
        self.model = model.to(dtype)
        self.batch = model.batch_of(samples)
        self.captured = capture(model, self.batch, dtype=dtype)
        chain = cut_layers(self.captured, model.unit_names)
        self.units = len(chain.units)
        self.rank = 0
        self.tp = 1
        self.cp_rank = 0
        self.sharding = shard(self.captured, 1)
        self.rewritten = rewrite(self.captured, chain, self.sharding, 0, 1)
