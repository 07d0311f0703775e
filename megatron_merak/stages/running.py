"""Buffers that a training forward changes: the running statistics of batch norm, and the count of their updates."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import Node

from ..checkpoint.shard import Shard
from ..errors import TraceError
from ..graph.capture.captured import Captured
from ..graph.ir.nodes import is_op
from ..parallel.mesh import Mesh
from .blueprint import Blueprint
from .deliver import to_replicas

_COUNT = "num_batches_tracked"


class RunningStatistics:
    """Those of a captured model. The stage that computes a norm keeps its statistics, in its rank's own model.

    As under DistributedDataParallel, the first replica's are saved and evaluated with. Raises TraceError for a norm
    whose momentum depends on the count, which a captured graph would keep as it is.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh):
        self.mesh, model = mesh, blueprint.traced.model
        stages = blueprint.plan.stages_of(mesh.pp_rank)
        mine = {unit for stage in stages for unit in blueprint.plan.stages[stage].units}
        self._held: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for unit, nodes in enumerate(blueprint.chain.units):
            for name in _updated(nodes, blueprint.traced.captured):
                path, _, key = name.rpartition(".")
                norm: nn.Module = model.get_submodule(path)
                if getattr(norm, "momentum", 0.0) is None:
                    reason = "with momentum=None it depends on the number of batches, unknown to a graph"
                    raise TraceError("module", path, reason, "Give it a momentum, for example 0.1")
                if unit not in mine:
                    continue
                buffers[name].data = buffers[name].data.to(mesh.device)
                self._held[name] = buffers[name]
                count = f"{path}.{_COUNT}" if path else _COUNT
                if key == "running_mean" and count in buffers:
                    self._held[count] = buffers[count]
                    self._counts[count] = self._counts.get(count, 0) + 1
        blueprint.traced.share_buffers({name: held for name, held in self._held.items() if name not in self._counts})

    def count(self, micro_batches: int) -> None:
        """As many forwards of training were run on this rank."""
        for name, calls in self._counts.items():
            self._held[name] += calls * micro_batches

    def share(self) -> None:
        """Give all replicas the first one's. Collective over all ranks."""
        to_replicas(list(self.shards()), self.mesh)

    def shards(self) -> Iterator[Shard]:
        """What this rank keeps, under the names of the state dict."""
        owner = self.mesh.dp_rank == 0 and self.mesh.tp_rank == 0
        for name, held in self._held.items():
            yield Shard(name, tuple(held.shape), None, (), held, owner)


def _updated(nodes: tuple[Node, ...], captured: Captured) -> Iterator[str]:
    """The buffers that these nodes change, once per node that does."""
    for node in nodes:
        if is_op(node, "batch_norm", "instance_norm") and node.args[5]:
            for held in node.args[3:5]:
                if isinstance(held, Node) and held.op == "get_attr" and held.target in captured.buffers:
                    yield str(held.target)
