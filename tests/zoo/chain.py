"""One type's captured graph through the real engine: a chain of stages, and tensor parallelism over
ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.fusion.fuse import fuse
from megatron_merak.graph.lowering.context import check_contexts
from megatron_merak.graph.lowering.rewrite import Rewritten, rewrite
from megatron_merak.graph.lowering.sequence import check_sequences
from megatron_merak.graph.partition.cut import Chain
from megatron_merak.graph.sharding.shard import Sharding
from megatron_merak.plan import TensorSharding
from tests.graph.lockstep import part
from tests.graph.stages import Stages

from .compare import Cell, gradient_difference, judge, loss_difference
from .fork import fork_ranks


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with its weights, a batch, what one process makes of it, and its capture."""

    model: nn.Module
    batch: Mapping[str, Any]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    captured: Captured
    chain: Chain
    dtype: torch.dtype

    def wanted(self) -> dict[str, Tensor]:
        """The reference's gradients under the names of the capture."""
        aliases = self.captured.aliases
        return {aliases.get(name, name): grad for name, grad in self.gradients.items()}


class RankProgram:
    """What ``Stages`` needs to know of one rank: the rewritten and fused graph, cut into ranges of
    units.
    """

    def __init__(
        self,
        subject: Subject,
        sharding: Sharding,
        rank: int,
        sequences: bool = False,
        cp: int = 1,
        cp_comm_type: str | None = None,
        fused: bool = True,
    ):
        self.model = subject.model
        self.sharding = sharding
        self.tp = sharding.tp
        self.rank = rank % self.tp
        self.cp_rank = rank // self.tp
        self.expert_rank = rank
        self.rewritten: Rewritten = rewrite(
            subject.captured,
            subject.chain,
            sharding,
            self.rank,
            self.tp,
            sequence_parallel=sequences,
            cp_rank=self.cp_rank,
            cp=cp,
            cp_comm_type=cp_comm_type,
            expert_rank=self.expert_rank,
        )
        if cp > 1:
            check_contexts(self.rewritten.graph, cp, self.tp, cp_comm_type)
        if sequences:
            check_sequences(self.rewritten.graph, sharding.tp)
        if fused:
            fuse(self.rewritten.graph)
        self.units = len(subject.chain.units)

    def ranges(self, count: int) -> list[range]:
        borders = [round(i * self.units / count) for i in range(count + 1)]
        return [range(a, b) for a, b in zip(borders, borders[1:], strict=False)]


def check_chain(subject: Subject, whole: Sharding, stages: int) -> Cell:
    """The chain cut into ``stages``, which share nothing but the values that cross; no tensor
    parallelism.
    """
    program = RankProgram(subject, whole, 0)
    torch.manual_seed(0)
    loss, found = Stages(program, min(stages, program.units)).step(subject.batch)
    worst, where = gradient_difference(nonzero(found, subject.wanted()), subject.wanted())
    return judge(loss_difference(loss, subject.loss), worst, where, subject.dtype)


def check_tensor_parallel(
    subject: Subject,
    sharding: Sharding,
    sequences: bool = False,
    cp: int = 1,
    *,
    stages: int = 1,
    cp_comm_type: str | None = None,
) -> Cell:
    """Loss and every gradient of ``sharding.tp`` x cp ranks, gradients put together from the ranks'
    parts. Experts are divided over the ranks with the same sequences, or over all of them.

    sequences:    with sequence parallelism.
    cp:           number of ranks that divide sequences.
    stages:       of each rank, which share nothing but the values that cross.
    cp_comm_type: how ranks that divide sequences exchange.
    """
    RankProgram(
        subject, sharding, 0, sequences, cp, cp_comm_type
    )  # what is refused, is refused here
    tp = sharding.tp
    assert sharding.experts in (1, tp, tp * cp)

    def step(rank: int, world_size: int):
        of_weights = own_group(rank, [list(range(c * tp, (c + 1) * tp)) for c in range(cp)])
        of_sequences = own_group(rank, [list(range(t, tp * cp, tp)) for t in range(tp)])
        program = RankProgram(subject, sharding, rank, sequences, cp, cp_comm_type)
        of_experts = own_group(rank, [list(range(tp * cp))]) if sharding.experts > tp else None
        chain = Stages(
            program,
            min(stages, program.units),
            group=of_weights,
            contexts=of_sequences,
            experts=of_experts,
        )
        loss, found = chain.step(subject.batch)
        return float(loss), {name: grad.numpy() for name, grad in found.items()}

    answers = fork_ranks(step, tp * cp)
    ranks = [{name: torch.from_numpy(grad) for name, grad in found.items()} for _, found in answers]
    loss = max(loss_difference(value, subject.loss) for value, _ in answers)
    wanted, worst, where = subject.wanted(), 0.0, ""
    for place, found in enumerate(ranks):
        rank = place % tp
        beside = ranks[place - rank : place - rank + tp]
        merged = {}
        places = {}
        for name in found:
            tensor = sharding.tensors[name]
            places[name] = place if tensor.experts else rank
            shards = ranks if tensor.experts else beside
            merged[name] = merge(tensor, [r[name] for r in shards], places[name])
        error, name = gradient_difference(nonzero(merged, wanted), wanted)
        if error > worst:
            worst, where = error, name
        for name, full in merged.items():
            tensor = sharding.tensors[name]
            own = part(full, tensor, places[name], sharding.ranks_of(tensor))
            if not torch.equal(own, found[name]):
                worst, where = float("inf"), f"the padding of {name}"
    return judge(loss, worst, where, subject.dtype)


def own_group(rank: int, groups: list[list[int]]) -> dist.ProcessGroup | None:
    """The group of a rank among several that are made; None for a rank alone."""
    if len(groups[0]) == 1:
        return None
    made = [dist.new_group(members) for members in groups]
    return next(group for group, members in zip(made, groups, strict=True) if rank in members)


def merge(tensor: TensorSharding, parts: list[Tensor], rank: int) -> Tensor:
    """The full tensor from all ranks' parts; of a replicated one this rank's copy."""
    if tensor.dim is None:
        return parts[rank]
    full = torch.zeros(tensor.shape, dtype=parts[0].dtype)
    for other, values in enumerate(parts):
        at = 0
        for start, stop in tensor.intervals(other, len(parts)):
            full.narrow(tensor.dim, start, stop - start).copy_(
                values.narrow(tensor.dim, at, stop - start)
            )
            at += stop - start
    return full


def nonzero(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without gradients that are zero where the reference has none at all."""
    return {name: grad for name, grad in found.items() if name in wanted or grad.any()}
