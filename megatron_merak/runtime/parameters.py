"""The parameters of one rank over a training step: where their gradients add up and what makes these final."""

from collections.abc import Collection, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from ..errors import PlanError
from ..parallel.buffers import ParameterBuffer, Sharding
from ..parallel.mesh import Mesh
from ..parallel.relay import Relay
from ..plan import TensorSharding
from ..segment import Segment
from .grads import GradientReducer
from .shards import ShardGatherer
from .units import Tour, UnitShards, Visit
from .weights import Gradient, WeightGradients


class RankParameters:
    """Trainable parameters of all stages of a rank, as views of ``buffer``.

    Where that is sharded over replicas, gradients are final, after a step, for what this rank owns, and `gatherer`
    brings what the others have updated.

    names: parameter -> its name in the buffer. replicated: those of which every tensor-parallel rank holds all. ties:
    those that other ranks of the pipeline hold as well, with the group of the ranks that do. overlap: reduce gradients
    over replicas while the backward runs. gathers_early: gather updated shards while the next forward runs. partial:
    those whose gradients are in parts over tensor-parallel ranks in any case, beside the replicated ones that sharded
    segments read. shared: how many stages of this rank use a parameter, where that is more than one. reads: the
    trainable parameters that each unit reads. in_bf16: gradients travel between replicas in bf16, see `Wire`; the sums
    over other ranks, of ``partial`` and ``ties``, in fp32. tensors: how tensor parallelism divides parameters that are
    whole tensors of the model.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        names: Mapping[nn.Parameter, str],
        mesh: Mesh,
        replicated: Collection[str] = (),
        ties: Sequence[tuple[str, dist.ProcessGroup]] = (),
        overlap: bool = True,
        gathers_early: bool = True,
        partial: Collection[str] = (),
        shared: Mapping[str, int] | None = None,
        reads: Mapping[int, Collection[str]] | None = None,
        in_bf16: bool = False,
        tensors: Mapping[str, TensorSharding] | None = None,
    ):
        self.tensors = tensors or {}
        self.buffer, self.names, self.mesh = buffer, names, mesh
        self._grads = {name: Gradient(buffer.grad(name)) for name in buffer.slots}
        by_unit = buffer.sharding >= Sharding.GRADIENTS
        self.weights = WeightGradients({parameter: self._grads[name] for parameter, name in names.items()}, by_unit)
        sharing, across = mesh.sharing, mesh.across
        given = (buffer, sharing, self._grads, reads or {}, overlap, across, mesh.dp, in_bf16)
        self.units = UnitShards(*given) if by_unit else None
        relay = None if across is None or by_unit else Relay(mesh.device, mesh.clock)
        self.reducer = GradientReducer(buffer, mesh.dp, overlap, sharing, across, relay, in_bf16)
        self.gatherer = ShardGatherer(buffer, sharing, gathers_early)
        self._replicated, self._ties, self._shared = replicated, ties, dict(shared or {})
        self._partial: dict[str, None] = dict.fromkeys(partial)

    @property
    def copies(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """Parameters that other ranks of this replica hold as well, with the groups of those that do: ties first."""
        found: list[tuple[list[str], dist.ProcessGroup]] = [([name], group) for name, group in self._ties]
        if self.mesh.tp is not None:
            found.append(([name for name in self.buffer.slots if name in self._replicated], self.mesh.tp))
        return [(names, group) for names, group in found if names]

    def used_by(self, segments: Sequence[Segment]) -> dict[Segment, list[str]]:
        """Admit the segments of a program. Returns the parameters that each one's backward uses last.

        Raises PlanError where parameters are sharded and a segment reads one that is not there when its unit runs.
        """
        for segment in segments if self.units is not None else ():
            for name in (self.names[parameter] for parameter in segment.parameters if parameter in self.names):
                if not self.units.serves(segment.unit, name):
                    reason = f"unit {segment.unit} uses it for this batch, and did not for the first one"
                    remedy = "Start with a batch like this one, or use --data-parallel-sharding-strategy optim"
                    raise PlanError("parameter", name, reason, remedy)
        first_use = {p: s for s in reversed(segments) for p in s.parameters if p in self.names}
        last: dict[Segment, list[str]] = {}
        for parameter, segment in first_use.items():
            last.setdefault(segment, []).append(self.names[parameter])
        return last

    def trained_by(self, segments: Sequence[Segment]) -> None:
        """Admit the backwards of segments: gradients of replicated parameters that sharded ones read are in parts."""
        if self.mesh.tp is not None:
            used = (self.names[p] for s in segments if s.sharded for p in s.parameters if p in self.names)
            self._partial |= {name: None for name in used if name in self._replicated}

    def arrive(self, segment: Segment) -> None:
        """Return when the parameters that a segment reads have arrived."""
        if self.gatherer.pending:
            self.gatherer.wait(self.names[parameter] for parameter in segment.parameters if parameter in self.names)

    def tour(self, visits: Sequence[Visit], then: int | None = None, last: bool = False) -> Tour | None:
        """What brings the parameters, and reduces the gradients, of a pass; ``then``, ``last``: see `Tour`."""
        return None if self.units is None else Tour(self.units, visits, then, last)

    def start_step(self) -> None:
        self.gatherer.hold_gradient(False)
        if self.units is not None:
            self.units.start()
            return
        for grad in self._grads.values():
            grad.start()
        self.reducer.start()
        self._users = dict(self._shared)

    def ready(self, name: str) -> None:
        """One stage adds no more to the gradient of ``name`` in this step."""
        self._users[name] = self._users.get(name, 1) - 1
        if self._users[name] == 0:
            self._grads[name].settle()
            self.reducer.ready(name)

    def finish_step(self) -> None:
        """Make the gradients final: sum them over replicas, and where a parameter's gradient is in parts, over its
        holders.
        """
        if self.units is not None:
            self.units.finish()
        else:
            for grad in self._grads.values():
                grad.settle()
            self.reducer.finish()
        partial = [(name, self.mesh.tp) for name in self.buffer.slots if name in self._partial]
        for name, group in (*partial, *self._ties):
            for own in self.buffer.own_grad(name):
                dist.all_reduce(own, group=group)
        self.gatherer.hold_gradient(True)
