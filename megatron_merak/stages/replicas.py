"""Check that data-parallel replicas have the same weights: by gradient norms each step, by digests at intervals.

The loss of a step is all-reduced over the replicas in any case. The same all-reduce carries the gradient norm of each
replica in the previous step, and the host reads both at once: a gradient reduction that went wrong is detected one step
later, at no cost. Digests of all weights are compared at intervals and before weights are saved; digests of shards
where several instances have the same ones.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PlanError
from ..optimizer.base import LocalOptimizer
from ..parallel.agree import gather_json
from ..parallel.buffers import Sharding
from ..parallel.mesh import Mesh
from ..runtime.shards import ShardGatherer

_CHUNK = 1 << 20  # 8-byte words that are summed at a time
_NAMED = 8
_NOT_FINITE = -1.0


class Replicas:
    """The data-parallel replicas of the job.

    optimizer: its parameters and their fp32 masters are compared.
    gatherer:  all-gathers the parameters that other replicas update.
    interval:  optimizer steps between two comparisons of digests, 0 for none.
    """

    def __init__(self, mesh: Mesh, optimizer: LocalOptimizer, gatherer: ShardGatherer, interval: int):
        self.mesh, self.optimizer, self.gatherer, self.interval = mesh, optimizer, gatherer, interval
        self._norm = 0.0

    def record_norm(self, grad_norm: float, steps: int) -> None:
        """Record a step's gradient norm for the next `reduce`, and compare digests every ``interval`` steps.

        steps: done so far.

        Collective over all ranks if digests are compared; raises as `check`.
        """
        self._norm = grad_norm if math.isfinite(grad_norm) else _NOT_FINITE
        if self.interval and steps % self.interval == 0:
            self.check()

    def reduce(self, loss: Tensor) -> Tensor:
        """Return the sum of ``loss`` over replicas, followed by the gradient norm of each in the previous step.

        loss: 0-d fp64.

        The result is fp64, [1 + dp], or [1] for one replica; its values are for `loss`. Collective over ``mesh.dp``.
        """
        if self.mesh.dp is None:
            return loss.reshape(1)
        reduced = torch.zeros(1 + self.mesh.grid.dp, dtype=torch.float64, device=loss.device)
        reduced[0], reduced[1 + self.mesh.dp_rank] = loss, self._norm
        dist.all_reduce(reduced, group=self.mesh.dp)
        return reduced

    def loss(self, reduced: Sequence[float]) -> float:
        """Return the loss from the values of what `reduce` returned, and check the gradient norms.

        Raises PlanError on every rank if the norm of a replica differs.
        """
        norms = torch.tensor(reduced[1:]).float().tolist()  # clipping uses fp32 norms
        if len(dict.fromkeys(norms)) > 1:
            other = next(replica for replica, norm in enumerate(norms) if norm != norms[0])
            reason = f"replica {other} had a gradient norm of {norms[other]} in the previous step, and replica 0 had "
            reason += f"{norms[0]}, so their weights are no longer the same"
            raise PlanError("data-parallel replicas", self._ranks(other), reason, _REMEDY)
        return reduced[0]

    def check(self) -> None:
        """Compare the weights of all replicas by digest. Collective over all ranks; raises PlanError on every rank."""
        if self.mesh.control is None or self.mesh.grid.dp == 1:
            return
        digests = gather_json(self._digests(), self.mesh.control, "cpu")
        grid = self.mesh.grid
        odd = []
        for rank, (full, sharded) in enumerate(digests):
            tp, cp, dp, pp = grid.coordinates(rank)
            first, peer = grid.rank(tp, cp, 0, pp), grid.rank(tp, cp, dp % self.mesh.shard_ranks, pp)
            if full != digests[first][0] or sharded != digests[peer][1]:
                odd.append(rank)
        if odd:
            named = ", ".join(map(str, odd[:_NAMED])) + (f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else "")
            who = f"ranks {named} have" if len(odd) > 1 else f"rank {named} has"
            expected = "first replica" if self.mesh.instances == 1 else "first replica, or instance"
            reason = f"{who} other weights than the same position of the {expected}"
            raise PlanError("data-parallel replicas", f"({grid.dp})", reason, _REMEDY)

    def _ranks(self, replica: int) -> str:
        grid = self.mesh.grid
        ranks = [rank for rank in range(grid.size) if grid.coordinates(rank)[2] == replica]
        return f"(ranks {', '.join(map(str, ranks[:_NAMED]))}{', ...' * (len(ranks) > _NAMED)})"

    def _digests(self) -> tuple[str, str]:
        """Digests of the bits of parameters and fp32 masters: of those that each replica has in full, and of shards.

        The second one is of nothing unless replicas of other instances have the same shards.
        """
        self.gatherer.finish()
        buffer, master = self.optimizer.buffer, self.optimizer.master
        full = [buffer.data] if buffer.sharding < Sharding.PARAMETERS else []
        own = [] if full else [*buffer.own_data]
        (own if buffer.sharded else full).extend([master] if buffer.rounds else [])
        return _digest(full), _digest(own if self.mesh.instances > 1 else [])


def _digest(flats: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for flat in flats:
        sums = [chunk.sum() for chunk in flat.view(torch.int64).split(_CHUNK)]  # sums of 8-byte words, modulo 2**64
        digest.update(torch.stack(sums).cpu().numpy().tobytes() if sums else b"")
    return digest.hexdigest()


_REMEDY = "Resume from a checkpoint; if it happens again, look for a faulty device or for code that changes weights"
