"""Whether data-parallel replicas still hold the same weights: gradient norms at every step, digests now and then.

A step's loss is summed over the replicas in any case. In the same reduction every replica tells the gradient norm of
the step before, and the host reads both at once, so a reduction that failed is found one step later, at no cost.
Digests of all weights are compared at intervals and before weights are saved; those of shards where several replicas
own the same ones.
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

_CHUNK = 1 << 20  # words of 8 bytes that are added up at a time
_NAMED = 8
_NOT_FINITE = -1.0


class Replicas:
    """Of the job, as this rank sees them.

    mesh: this rank's. optimizer: its parameters and their fp32 masters are what is compared. gatherer: brings those
    that other replicas update. interval: optimizer steps between two comparisons of digests, 0 for none.
    """

    def __init__(self, mesh: Mesh, optimizer: LocalOptimizer, gatherer: ShardGatherer, interval: int):
        self.mesh, self.optimizer, self.gatherer, self.interval = mesh, optimizer, gatherer, interval
        self._norm = 0.0

    def note(self, grad_norm: float, steps: int) -> None:
        """Remember a step's gradient norm for the next `reduce`, and compare digests every ``interval`` steps.

        steps: done so far. Collective over all ranks where digests are compared; raises as `check`.
        """
        self._norm = grad_norm if math.isfinite(grad_norm) else _NOT_FINITE
        if self.interval and steps % self.interval == 0:
            self.check()

    def reduce(self, loss: Tensor) -> Tensor:
        """The sum of ``loss`` (0-d fp64) over replicas and, behind it, their gradient norms at the step before.

        Collective over ``mesh.dp``. `loss` takes the values of what this returns.
        """
        if self.mesh.dp is None:
            return loss.reshape(1)
        told = torch.zeros(1 + self.mesh.grid.dp, dtype=torch.float64, device=loss.device)
        told[0], told[1 + self.mesh.dp_rank] = loss, self._norm
        dist.all_reduce(told, group=self.mesh.dp)
        return told

    def loss(self, told: Sequence[float]) -> float:
        """The loss that `reduce` told, of replicas that must have had the same gradient norm at the step before.

        Raises PlanError on every rank that is in a group with one that differs: the norm is one number for a replica,
        so these are all ranks.
        """
        norms = torch.tensor(told[1:]).float().tolist()  # as precise as the clipping that follows from it
        if len(dict.fromkeys(norms)) > 1:
            other = next(place for place, norm in enumerate(norms) if norm != norms[0])
            reason = f"replica {other} had a gradient norm of {norms[other]} in the previous step, and replica 0 had "
            reason += f"{norms[0]}, so their weights are no longer the same"
            raise PlanError("data-parallel replicas", self._ranks(other), reason, _REMEDY)
        return told[0]

    def check(self) -> None:
        """Compare the weights of all replicas by digest. Collective over all ranks; raises PlanError on every rank."""
        if self.mesh.control is None or self.mesh.grid.dp == 1:
            return
        found = gather_json(self._digests(), self.mesh.control, "cpu")
        grid = self.mesh.grid
        odd = []
        for rank, (whole, shards) in enumerate(found):
            tp, cp, dp, pp = grid.coordinates(rank)
            same, twin = grid.rank(tp, cp, 0, pp), grid.rank(tp, cp, dp % self.mesh.shard_ranks, pp)
            if whole != found[same][0] or shards != found[twin][1]:
                odd.append(rank)
        if odd:
            named = ", ".join(map(str, odd[:_NAMED])) + (f" and {len(odd) - _NAMED} more" if len(odd) > _NAMED else "")
            who = f"ranks {named} have" if len(odd) > 1 else f"rank {named} has"
            first = "first replica" if self.mesh.instances == 1 else "first replica, or instance"
            reason = f"{who} other weights than the same position of the {first}"
            raise PlanError("data-parallel replicas", f"({grid.dp})", reason, _REMEDY)

    def _ranks(self, replica: int) -> str:
        grid = self.mesh.grid
        ranks = [rank for rank in range(grid.size) if grid.coordinates(rank)[2] == replica]
        return f"(ranks {', '.join(map(str, ranks[:_NAMED]))}{', ...' * (len(ranks) > _NAMED)})"

    def _digests(self) -> tuple[str, str]:
        """Of the bits of what each replica has all of, parameters and their masters; and of what it has shards of,
        where the replicas of other instances have the same ones."""
        self.gatherer.finish()
        buffer, master = self.optimizer.buffer, self.optimizer.master
        whole = [buffer.data] if buffer.sharding < Sharding.PARAMETERS else []
        own = [] if whole else [*buffer.own_data]
        (own if buffer.sharded else whole).extend([master] if buffer.rounds else [])
        return _digest(whole), _digest(own if self.mesh.instances > 1 else [])


def _digest(flats: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for flat in flats:
        sums = [chunk.sum() for chunk in flat.view(torch.int64).split(_CHUNK)]  # of whole words; they wrap around
        digest.update(torch.stack(sums).cpu().numpy().tobytes() if sums else b"")
    return digest.hexdigest()


_REMEDY = "Resume from a checkpoint; if it happens again, look for a faulty device or for code that changes weights"
