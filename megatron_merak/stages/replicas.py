"""Check that ranks that should agree do: replicas have the same weights, and ranks run the same
collectives.

Weights are compared by gradient norms each step, and by digests at intervals.

The loss of a step is all-reduced over the replicas in any case. The same all-reduce carries the
gradient norm of each replica in the previous step, and the host reads both at once: a gradient
reduction that went wrong is detected one step later, at no cost. Digests of all weights are
compared at intervals and before weights are saved; digests of shards where several instances have
the same ones. With the digests go checksums of the collectives that ranks have launched and of the
samples that they have read, which the ranks of a replica must have in common.
"""

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..counting import named_ranks
from ..errors import PlanError
from ..optimizer.base import LocalOptimizer, Optimizer
from ..parallel.agree import gather_json
from ..parallel.buffers import ShardedState
from ..parallel.mesh import Mesh
from ..parallel.pieces import whole
from ..runtime.shards import ShardGatherer
from ..runtime.stage import Stage

_CHUNK = 1 << 20  # 8-byte words that are summed at a time
_NAMED = 8
_NOT_FINITE = -1.0


class Replicas:
    """The data-parallel replicas of the job.

    optimizer: its parameters and their fp32 masters are compared.
    gatherer:  all-gathers the parameters that other replicas update.
    interval:  optimizer steps between two comparisons of digests, 0 for none.
    stages:    of this rank, by index.
    """

    def __init__(
        self,
        mesh: Mesh,
        optimizer: Optimizer,
        gatherer: ShardGatherer,
        interval: int,
        stages: Mapping[int, Stage],
    ):
        self.mesh = mesh
        self.optimizer = optimizer
        self.gatherer = gatherer
        self.interval = interval
        self.stages = stages
        self._norm = 0.0
        self._samples = 0
        self._agreed_until = 0  # steps

    def note_samples(self, batches: Sequence[Mapping[str, object]]) -> None:
        """Add the token ids of micro-batches to the checksum of samples."""
        for batch in batches:
            tokens = batch.get("tokens")
            if isinstance(tokens, Tensor):
                self._samples = zlib.crc32(tokens.contiguous().cpu().numpy().data, self._samples)

    def record_norm(self, grad_norm: float, steps: int) -> None:
        """Record a step's gradient norm for the next `reduce`, and compare digests every
        ``interval`` steps.

        steps: done so far.

        Collective over all ranks if digests are compared; raises as `check`.
        """
        self._norm = grad_norm if math.isfinite(grad_norm) else _NOT_FINITE
        if self.interval and steps % self.interval == 0:
            self.check(steps)

    def reduce(self, loss: Tensor) -> Tensor:
        """Return the sum of ``loss`` over replicas, followed by the gradient norm of each in the
        previous step.

        loss: 0-d fp64.

        The result is fp64, [1 + dp], or [1] for one replica; its values are for `loss`. Collective
        over ``mesh.dp``.
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
            reason = (
                f"replica {other} had a gradient norm of {norms[other]} in the previous "
                "step, and replica 0 had "
            )
            reason += f"{norms[0]}, so their weights are no longer the same"
            raise PlanError("data-parallel replicas", self._ranks(other), reason, _REMEDY)
        return reduced[0]

    def check(self, steps: int | None = None) -> None:
        """Compare the weights of all replicas, the collectives and the samples of ranks, by digest.

        steps: done so far, for messages; None: unknown.

        Collective over all ranks; raises PlanError on every rank, naming those that differ from
        most others.
        """
        if self.mesh.control is None:
            return
        grid = self.mesh.grid
        weights = self._digests() if grid.copies > 1 else ("", "")
        own = (*weights, self._collectives(), self._samples)
        full, sharded, collectives, samples = zip(
            *gather_json(own, self.mesh.control, "cpu"), strict=True
        )
        when = (
            f"since step {self._agreed_until}"
            if steps is None
            else f"in steps {self._agreed_until + 1} to {steps}"
        )
        self._check_launched(collectives, when)
        self._check_samples(samples, when)
        place = [grid.coordinates(rank) for rank in range(grid.size)]
        copy = [grid.copy_rank(rank) for rank in range(grid.size)]
        # ranks that divide experts with others have other weights than these
        divided = 1 if self.mesh.experts is None else self.mesh.experts.divided
        odd, known = _unlike_most(
            full, lambda rank: (place[rank][0], copy[rank] % divided, place[rank][3])
        )
        shards = self.mesh.shard_ranks
        others, both_known = _unlike_most(
            sharded, lambda rank: (place[rank][0], copy[rank] % shards, place[rank][3])
        )
        odd = sorted({*odd, *others})
        if odd:
            who = _have(odd)
            expected = (
                "the first replica"
                if self.mesh.instances == 1
                else "the first replica, or instance"
            )
            expected = "most replicas" if known and both_known else expected
            reason = f"{who} other weights than the same position of {expected}"
            raise PlanError("data-parallel replicas", f"({grid.dp})", reason, _REMEDY)
        self._agreed_until = self._agreed_until if steps is None else steps

    def _collectives(self) -> int:
        """Return a checksum of the sequence of collectives that this rank has launched between
        segments.
        """
        code = 0
        for index in sorted(self.stages):
            code = zlib.crc32(self.stages[index].launched.to_bytes(4, "little"), code)
        return code

    def _check_launched(self, checksums: Sequence[int], when: str) -> None:
        """Tensor-parallel ranks run the same segments, and so launch the same collectives in the
        same order.
        """
        place = [self.mesh.grid.coordinates(rank) for rank in range(self.mesh.grid.size)]
        odd, _ = _unlike_most(checksums, lambda rank: place[rank][2:])
        if odd:
            reason = (
                f"{_have(odd)} launched other collectives, or in another order, than the "
                "tensor-parallel ranks of the "
            )
            reason += f"same stage, {when}"
            raise PlanError("sequence of collectives", "(of a stage)", reason, _SEQUENCE)

    def _check_samples(self, checksums: Sequence[int], when: str) -> None:
        place = [self.mesh.grid.coordinates(rank) for rank in range(self.mesh.grid.size)]
        odd, _ = _unlike_most(checksums, lambda rank: place[rank][2])
        if odd:
            reason = f"{_have(odd)} read other samples than the ranks of the same replica, {when}"
            raise PlanError(
                "samples", "(of a replica)", reason, "Provide the same files on all hosts"
            )

    def _ranks(self, replica: int) -> str:
        grid = self.mesh.grid
        ranks = [rank for rank in range(grid.size) if grid.coordinates(rank)[2] == replica]
        return f"(ranks {', '.join(map(str, ranks[:_NAMED]))}{', ...' * (len(ranks) > _NAMED)})"

    def _digests(self) -> tuple[str, str]:
        """Digests of the bits of parameters and fp32 masters: of those that each replica has in
        full, and of shards.

        The second one is of nothing unless replicas of other instances have the same shards.
        """
        self.gatherer.finish()
        assert isinstance(self.optimizer, LocalOptimizer), (
            "replicas of one mesh keep their state themselves"
        )
        buffer = self.optimizer.buffer
        master = self.optimizer.master
        full = [whole(buffer.data)] if buffer.sharding < ShardedState.PARAMETERS else []
        own = [] if full else [*buffer.own_data]
        (own if buffer.sharded else full).extend([master] if buffer.rounds else [])
        return _digest(full), _digest(own if self.mesh.instances > 1 else [])


def _digest(flats: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for flat in flats:
        # sums of 8-byte words, modulo 2**64
        sums = [chunk.sum() for chunk in flat.view(torch.int64).split(_CHUNK)]
        digest.update(torch.stack(sums).cpu().numpy().tobytes() if sums else b"")
    return digest.hexdigest()


def _unlike_most(
    values: Sequence[object], group_of: Callable[[int], object]
) -> tuple[list[int], bool]:
    """Return the ranks whose value most of their group do not have, and whether that was known
    everywhere.

    Where no value is that of more than half of a group, they are those that differ from its first
    rank.
    """
    groups: dict[object, list[int]] = {}
    for rank in range(len(values)):
        groups.setdefault(group_of(rank), []).append(rank)
    odd: list[int] = []
    known = True
    for ranks in groups.values():
        common, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
        if count == len(ranks):
            continue
        majority = 2 * count > len(ranks)
        known = known and majority
        expected = common if majority else values[ranks[0]]
        odd += [rank for rank in ranks if values[rank] != expected]
    return sorted(odd), known


def _have(ranks: Sequence[int]) -> str:
    return f"{named_ranks(list(ranks))} {'have' if len(ranks) > 1 else 'has'}"


_SEQUENCE = (
    "Resume from a checkpoint; if it happens again, look for code that depends on the "
    "rank or on the order of a set"
)
_REMEDY = (
    "Resume from a checkpoint; if it happens again, look for a faulty device or for code "
    "that changes weights"
)
