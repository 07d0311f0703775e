"""The GPT that flags describe, on this rank: captured as any other model, with its units and losses."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import Config, ModelConfig
from ..config.checks import refused_halves
from ..graph.capture.empty import empty_parameters
from ..models.gpt_module import GPTModule, target_count
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.agree import together
from ..parallel.mesh import Mesh
from ..parallel.ranks import Members
from ..plan import TensorSharding
from .blueprint import Blueprint
from .captured import CapturedModel
from .optimizer_state import OptimizerOf, adamw_of
from .parameter_groups import groups_of_run, outer_names
from .token_losses import TokenLosses, check_updates
from .traced import Traced


def build_gpt(config: ModelConfig) -> GPTModule:
    """Return the model, without memory."""
    with empty_parameters():
        return GPTModule(config)


def traced_gpt(config: Config, ranks: Members | None = None) -> Traced:
    """Return the model, traced with its first micro-batch. ranks: see ``Traced``."""
    model = build_gpt(config.model)
    train = config.train
    length = config.model.seq_length
    tokens = torch.zeros(train.micro_batch_size, length, dtype=torch.long)
    positions = torch.arange(length).expand_as(tokens)
    samples = {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": torch.ones(tokens.shape),
        "position_ids": positions,
    }
    return Traced(model, model.batch_of(samples), train.dtype, train.is_half, ranks=ranks)


def tables_of(traced: Traced, tp: int, multiple: int) -> dict[str, TensorSharding]:
    """Return how the tables of a model are sharded, as Megatron-LM has it: the vocabulary is padded
    and sharded, whatever its size, and positions are whole on each rank.
    """
    module = traced.model
    assert isinstance(module, GPTModule)
    found = {}
    for name in outer_names(module):
        shape = traced.captured.shapes.get(name)
        if shape is None:  # tied to another
            continue
        step = tp * multiple
        padded = -(-shape[0] // step) * step
        if tp > 1 or padded != shape[0]:
            found[name] = TensorSharding(name, tuple(shape), 0, padded=padded)
    positions = module.positions_name
    if positions is not None:
        found[positions] = TensorSharding(positions, tuple(traced.captured.shapes[positions]))
    return found


class GPTModel(TokenLosses, CapturedModel):
    """This rank's part of a planned GPT; its batches are samples of GPT data sets. Collective over
    all ranks.

    optimizer_of: makes the optimizer.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        config: Config,
        mesh: Mesh,
        optimizer_of: OptimizerOf = adamw_of,
    ):
        train = config.train
        with together(mesh.control, "cpu"):
            check_updates(config, blueprint.plan, mesh)
            halved = blueprint.plan.overlap == "sub-pipeline"
            if halved and config.model.couples_samples:
                raise refused_halves(config.model.couples_samples)
        self.shape = config.model
        self.per_token = train.calculate_per_token_loss
        module = blueprint.traced.model
        assert isinstance(module, GPTModule)
        self.batch_of = module.batch_of
        super().__init__(
            blueprint,
            mesh,
            optimizer=config.optimizer,
            seed=train.seed,
            group_of=groups_of_run(config.optimizer, outer_names(module)),
            replica_check_interval=train.check_weight_hash_across_dp_replicas_interval,
            graph_warm_up=config.parallel.graph_warm_up,
            scaler=scaler_of_run(train),
            optimizer_of=optimizer_of,
        )

    @staticmethod
    def count(batch: Mapping[str, Tensor]) -> Tensor:
        return target_count(batch)

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.count(batch)

    @property
    def notes(self) -> tuple[str, ...]:
        """See `TrainedModel`."""
        return self.blueprint.traced.captured.notes

    def from_samples(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """See `TrainedModel`."""
        return [self.batch_of(batch) for batch in batches]
