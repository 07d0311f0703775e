"""The GPT that flags describe, as a search needs it."""

from dataclasses import replace

from megatron_merak.cluster import Cluster
from megatron_merak.config import Config
from megatron_merak.config.checks import (
    check_divided_experts,
    check_model,
    check_sequence_parallel,
    check_tensor_parallel,
)
from megatron_merak.errors import ConfigError
from megatron_merak.plan import Unit
from megatron_merak.planner.make import gpt_chain
from megatron_merak.planner.search.choice import Layer


class FormulaChain:
    """The chains of the GPT of flags, by formulas; a ``Model``.

    config: its shape and precision; degrees and micro-batch are not read.
    """

    frozen_bytes = 0.0
    shares_sequences = False
    has_experts = False

    def __init__(self, config: Config, cluster: Cluster):
        check_model(config.model)
        self.config = config
        self.cluster = cluster

    def units(
        self, layer: Layer, micro_batch_size: int, sequence_parallel: bool, selective: bool
    ) -> tuple[Unit, ...]:
        config = self.config
        tp = layer.tp
        if layer.cp > 1:  # the formulas know whole sequences
            reason = "the formulas for the GPT of flags know whole sequences"
            raise ConfigError("--context-parallel-size", layer.cp, reason, f"Pin cp={layer.cp}")
        parallel = replace(
            config.parallel,
            **layer.settings(),
            sequence_parallel=sequence_parallel,
            recompute_granularity="selective" if selective else None,
            recompute_method=None,
            recompute_num_layers=None,
        )
        check_divided_experts(config.model, parallel)
        check_tensor_parallel(config.model, tp)
        check_sequence_parallel(
            config.model.seq_length, config.model.max_position_embeddings, parallel
        )
        train = replace(config.train, micro_batch_size=micro_batch_size)
        return gpt_chain(replace(config, parallel=parallel, train=train), tp, self.cluster)
