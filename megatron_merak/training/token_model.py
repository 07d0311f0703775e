"""A captured causal language model that trains on samples of GPT data sets."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import HFConfig
from ..errors import ConfigError
from ..graph.ir.operators import flops
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.mesh import Mesh
from ..stages.blueprint import Blueprint
from ..stages.captured import CapturedModel
from ..stages.model_config import config_of
from ..stages.optimizer_state import OptimizerOf, adamw_of
from ..stages.parameter_groups import groups_of_run, outer_names
from .hf_batches import TokenBatches, documents_alone, token_count


class TokenModel(CapturedModel):
    """This rank's part of a planned model; its batches are those of GPT data sets. Collective over
    all ranks.

    batches:      makes the model's batches of samples.
    optimizer_of: makes the optimizer.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        batches: TokenBatches,
        config: HFConfig,
        mesh: Mesh,
        optimizer_of: OptimizerOf = adamw_of,
    ):
        traced = blueprint.traced
        self.batches = batches
        self.per_token = config.train.calculate_per_token_loss
        super().__init__(
            blueprint,
            mesh,
            optimizer=config.optimizer,
            seed=config.train.seed,
            group_of=groups_of_run(config.optimizer, outer_names(traced.model)),
            replica_check_interval=config.train.check_weight_hash_across_dp_replicas_interval,
            graph_warm_up=config.parallel.graph_warm_up,
            scaler=scaler_of_run(config.train),
            optimizer_of=optimizer_of,
        )
        if traced.captured.untouched:
            self.freeze(())  # nothing but these, which freeze() leaves out of updates by itself

    def flops(self) -> int:
        forward = sum(map(flops, self.blueprint.traced.captured.module.graph.nodes))
        return 3 * forward * self.plan.num_microbatches * self.plan.grid.dp

    def from_samples(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """See `TrainedModel`. With --calculate-per-token-loss all targets count alike, whatever
        their micro-batch.
        """
        if not self.per_token:
            return [self.batches(batch) for batch in batches]
        count = torch.tensor(float(sum(map(token_count, batches))), device=self.mesh.device)
        if self.mesh.dp is not None:
            dist.all_reduce(count, group=self.mesh.dp)
        return [self.batches(batch, count.clamp(min=1).cpu()) for batch in batches]

    def mean_loss(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """See `TrainedModel`. All ranks learn it."""
        outputs = self.evaluate([self.batches(batch) for batch in batches])
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if outputs is not None:
            losses = torch.stack([output["loss"].double() for output in outputs])
            counts = torch.ones_like(losses)
            if self.per_token:
                counts = losses.new_tensor([token_count(batch) for batch in batches])
                losses = losses.where(counts > 0, 0.0)  # a mean over no targets is no number
            sums += torch.stack([(losses * counts).sum(), counts.sum()])
        # only one pipeline rank has the last stage, and any may report
        for group in (self.mesh.dp, self.mesh.pp):
            if group is not None:
                dist.all_reduce(sums, group=group)
        return (sums[0] / sums[1].clamp(min=1)).item()

    def check_apart(self, both: Mapping[str, Tensor]) -> None:
        """Try on a micro-batch whether conversations that share a sample are read by themselves:
        two together have the losses and gradients of each alone. Collective over all ranks.

        both: samples of two conversations, see ``shared_samples``.

        Raises ConfigError on all ranks where they have not.
        """
        count = torch.tensor(float(token_count(both)))
        one, *others = (self.batches(each, count) for each in (both, *documents_alone(both)))
        mismatch = self.difference(one, others)
        if mismatch:
            raise ConfigError(
                "--sft",
                "on",
                f"{type(self.model).__name__} does not read conversations of a sample by "
                f"themselves: with two of them {mismatch}",
                "Train another model on conversations",
            )

    def settings(self) -> dict[str, Any] | None:
        return config_of(self.model)
