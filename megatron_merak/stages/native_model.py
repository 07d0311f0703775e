"""The native model on this rank, with its optimizer."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from ..checkpoint.store import Shard
from ..config import Config
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.agree import together
from ..parallel.buffers import Flat
from ..parallel.mesh import Mesh
from ..plan import Plan
from .kernels import check_kernels
from .native import build_stages
from .optimizer_state import OptimizerOf, adamw_of
from .same_plan import check_same_plan
from .token_losses import TokenLosses, check_updates


class NativeModel(TokenLosses):
    """The native model of ``config``, built by ``plan``. Collective over all ranks. For the base
    see `TrainedModel`.

    layouts: per parameter, which HuggingFace tensors its storage consists of.
    """

    def __init__(
        self, config: Config, plan: Plan, mesh: Mesh, optimizer_of: OptimizerOf = adamw_of
    ):
        with together(mesh.control, "cpu"):
            check_kernels(mesh.device)
            check_updates(config, plan, mesh)
        check_same_plan(plan, mesh.control)
        built = build_stages(config, plan, mesh)
        train = config.train
        self.shape = config.model
        self.per_token = train.calculate_per_token_loss
        self.layouts = built.layouts
        super().__init__(
            plan,
            mesh,
            built.stages,
            built.parameters,
            optimizer=config.optimizer,
            scaler=scaler_of_run(train),
            optimizer_of=optimizer_of,
            replica_check_interval=train.check_weight_hash_across_dp_replicas_interval,
        )

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["loss_mask"].sum()

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterator[Shard]:
        """See `TrainedModel`. Exactly one rank owns each shard: in the first replica, on the first
        stage that has it, and on tensor-parallel rank 0 if it is replicated."""
        mesh = self.mesh
        tp = self.mesh.grid.tp
        for name, layout in self.layouts.items():
            if names is not None and name not in names:
                continue
            owner = mesh.dp_rank == 0 and self.buffer.slots[name].counted
            for piece, view in layout.views(self.buffer.view(flat, name), mesh.tp_rank, tp):
                tensor = piece.sharding
                yield Shard(
                    tensor.name,
                    tensor.shape,
                    tensor.dim,
                    tensor.intervals(mesh.tp_rank, tp),
                    tensor=view,
                    owner=owner,
                )
