"""The parameters of one rank in a training step: accumulating their gradients, and making these
final.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PlanError
from ..parallel.buffers import ParameterBuffer, ShardedState
from ..parallel.host_link import HostLink
from ..parallel.mesh import Mesh
from ..parallel.relay import Relay
from ..plan import TensorSharding
from ..segment import Segment
from .frozen_weights import FrozenWeights
from .grads import GradientReducer
from .shards import ShardGatherer
from .units import ShardedPass, UnitShards, Visit
from .weights import Gradient, WeightGradients


class RankParameters:
    """Trainable parameters of all stages of a rank, as views of ``buffer``.

    Where the buffer is sharded over replicas, a step makes final only the gradients that this rank
    owns, and `gatherer` all-gathers the parameters that the other ranks have updated.

    names:           parameter -> its name in the buffer.
    replicated:      parameters that every tensor-parallel rank has in full.
    ties:            parameters that other pipeline ranks have as well, with the group of the ranks
                     that have them.
    overlap:         whether the reduction over replicas overlaps with the backward.
    overlap_gathers: whether the all-gather of updated shards overlaps with the next forward.
    partial:         parameters whose gradients are always partial sums on each tensor-parallel
                     rank, in addition to the replicated ones that sharded segments read.
    shared:          how many stages of this rank use a parameter, where that is more than one.
    reads:           the trainable parameters that each unit reads.
    in_bf16:         whether replicas exchange gradients in bf16, see `Wire`; ``partial`` and
                     ``ties`` use fp32.
    tensors:         how tensor parallelism shards those parameters that are complete tensors of the
                     model.
    frozen:          weights on the host that are not trained; None: none are there.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        names: Mapping[nn.Parameter, str],
        mesh: Mesh,
        replicated: Collection[str] = (),
        ties: Sequence[tuple[str, dist.ProcessGroup]] = (),
        overlap: bool = True,
        overlap_gathers: bool = True,
        partial: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        reads: Mapping[int, Collection[str]] | None = None,
        in_bf16: bool = False,
        tensors: Mapping[str, TensorSharding] | None = None,
        frozen: FrozenWeights | None = None,
    ):
        self.tensors = tensors or {}
        self.buffer = buffer
        self.names = names
        self.mesh = mesh
        self._grads = {name: Gradient(buffer.grad(name)) for name in buffer.slots}
        by_unit = buffer.sharding >= ShardedState.GRADIENTS
        self.weights = WeightGradients(
            {parameter: self._grads[name] for parameter, name in names.items()},
            by_unit,
            group=mesh.tp,
        )
        shard_group = mesh.shard_group
        replicate_group = mesh.replicate_group
        same_experts = None if mesh.experts is None else mesh.experts.same
        self.units = None
        self._link = HostLink(mesh.device, mesh.clock) if buffer.on_host else None
        self._frozen = frozen
        if by_unit:
            self.units = UnitShards(
                buffer,
                shard_group,
                self._grads,
                reads or {},
                overlap=overlap,
                replicate_group=replicate_group,
                group=mesh.copies,
                in_bf16=in_bf16,
                pulse=mesh.pulse,
                experts=same_experts,
                link=self._link,
                frozen=frozen,
            )
        relay = None if replicate_group is None or by_unit else Relay(mesh.device, mesh.clock)
        self.reducer = GradientReducer(
            buffer,
            mesh.copies,
            overlap=overlap,
            shard_group=shard_group,
            replicate_group=replicate_group,
            relay=relay,
            in_bf16=in_bf16,
            experts=same_experts,
        )
        self.gatherer = ShardGatherer(
            buffer, shard_group, overlap_gathers, mesh.pulse, experts=same_experts
        )
        self._replicated = replicated
        self._ties = ties
        self._shared = dict(shared or {})
        self._partial: dict[str, None] = dict.fromkeys(partial)

    @property
    def norm_group(self) -> dist.ProcessGroup | None:
        """The ranks that have all weights together, over which an optimizer takes a norm after the
        ranks that shard them.
        """
        mesh = self.mesh
        if mesh.experts is None or self.buffer.sharded:
            return mesh.weights
        return mesh.experts.weights

    @property
    def copies(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """Parameters that other ranks of this replica have as well, with the groups of these ranks:
        ties first.
        """
        copies: list[tuple[list[str], dist.ProcessGroup]] = [
            ([name], group) for name, group in self._ties
        ]
        if self.mesh.tp is not None:
            copies.append(
                ([name for name in self.buffer.slots if name in self._replicated], self.mesh.tp)
            )
        return [(names, group) for names, group in copies if names]

    def used_by(self, segments: Sequence[Segment]) -> dict[Segment, list[str]]:
        """Return the parameters whose last use in a program's backward is in each segment.

        Raises PlanError where parameters are sharded and a segment reads one that is not gathered
        for its unit.
        """
        for segment in segments if self.units is not None else ():
            for name in self._not_gathered(segment):
                reason = (
                    f"unit {segment.unit} uses it for this batch, and did not for the first one"
                )
                remedy = (
                    "Start with a batch like this one, or use "
                    "--data-parallel-sharding-strategy optim"
                )
                raise PlanError("parameter", name, reason, remedy)
        first_use = {p: s for s in reversed(segments) for p in s.parameters if p in self.names}
        last: dict[Segment, list[str]] = {}
        for parameter, segment in first_use.items():
            last.setdefault(segment, []).append(self.names[parameter])
        return last

    def _not_gathered(self, segment: Segment) -> Iterator[str]:
        """Yield the names of what a segment reads and its unit does not."""
        assert self.units is not None
        for parameter in segment.parameters:
            if parameter in self.names:
                name = self.names[parameter]
                if not self.units.parameters.gathers(segment.unit, name):
                    yield name
            elif self._frozen is not None and parameter in self._frozen.names:
                name = self._frozen.names[parameter]
                if not self._frozen.gathers(segment.unit, name):
                    yield name

    def trained_by(self, segments: Sequence[Segment]) -> None:
        """Register segments that will run backwards.

        Replicated parameters that sharded segments read get partial sums as gradients on each rank.
        """
        if self.mesh.tp is not None:
            used = (
                self.names[p]
                for s in segments
                if s.sharded
                for p in s.parameters
                if p in self.names
            )
            self._partial |= {name: None for name in used if name in self._replicated}

    def wait_for(self, segment: Segment) -> None:
        """Block until the parameters that a segment reads are gathered."""
        if self.gatherer.pending:
            self.gatherer.wait(
                self.names[parameter] for parameter in segment.parameters if parameter in self.names
            )

    def sharded_pass(
        self, visits: Sequence[Visit], next_unit: int | None = None, last: bool = False
    ) -> ShardedPass | None:
        """Return what gathers parameters and reduces gradients during a pass; None where neither is
        sharded.

        next_unit, last: see `ShardedPass`.
        """
        return None if self.units is None else ShardedPass(self.units, visits, next_unit, last)

    def _all_reduce(self, own: Tensor, group: dist.ProcessGroup | None) -> None:
        """Sum what this rank owns of a gradient over a group, whose ranks exchange what is on their
        devices.
        """
        value = own if self._link is None else own.to(self.mesh.device)
        dist.all_reduce(value, group=group)
        if value is not own:
            own.copy_(value)

    def start_step(self) -> None:
        self.gatherer.preserve_gradient(False)
        if self.units is not None:
            self.units.gradients.start()
            return
        for grad in self._grads.values():
            grad.start()
        self.reducer.start()
        self._users = dict(self._shared)

    def settle(self) -> None:
        """Zero the gradients to which nothing was added in this step: all later ones are added."""
        for grad in self._grads.values():
            grad.settle()

    def ready(self, name: str) -> None:
        """Report that one stage has added its last gradient of ``name`` in this step."""
        self._users[name] = self._users.get(name, 1) - 1
        if self._users[name] == 0:
            self._grads[name].settle()
            self.reducer.ready(name)

    def finish_step(self) -> None:
        """Make the gradients final: all-reduce them over replicas, and partial sums over the ranks
        of a parameter.
        """
        if self.units is not None:
            self.units.gradients.finish()
        else:
            self.settle()
            self.reducer.finish()
        partial = [(name, self.mesh.tp) for name in self.buffer.slots if name in self._partial]
        for name, group in (*partial, *self._ties):
            for own in self.buffer.own_grad(name):
                self._all_reduce(own, group)
        self.gatherer.preserve_gradient(True)
