"""Buffers that the forward of training updates: running statistics of batch norm, and the number of
updates.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import Node

from ..checkpoint.shard import Shard
from ..errors import TraceError
from ..graph.capture.captured import Captured
from ..graph.ir.nodes import is_op
from ..parallel.mesh import Mesh
from .blueprint import Blueprint
from .deliver import broadcast_to_replicas

_COUNT = "num_batches_tracked"


class RunningStatistics:
    """The running statistics of a captured model, in the model of the rank whose stage computes the
    norm.

    ``names`` are those of all ranks' buffers. As with DistributedDataParallel, checkpoints and
    evaluations use those of the first replica.

    Raises TraceError for a norm whose momentum depends on the number of updates, which would be a
    constant of the captured graph.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh):
        self.mesh = mesh
        model = blueprint.traced.model
        stages = blueprint.plan.stages_of(mesh.pp_rank)
        own_units = {unit for stage in stages for unit in blueprint.plan.stages[stage].units}
        self._buffers: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        # of all stages
        self.names: set[str] = set()
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for unit, nodes in enumerate(blueprint.chain.units):
            for name in _updated(nodes, blueprint.traced.captured):
                path, _, key = name.rpartition(".")
                norm: nn.Module = model.get_submodule(path)
                if getattr(norm, "momentum", 0.0) is None:
                    reason = (
                        "with momentum=None it depends on the number of batches, unknown to a graph"
                    )
                    raise TraceError("module", path, reason, "Give it a momentum, for example 0.1")
                count = f"{path}.{_COUNT}" if path else _COUNT
                self.names |= {name, count}
                if unit not in own_units:
                    continue
                buffers[name].data = buffers[name].data.to(mesh.device)
                self._buffers[name] = buffers[name]
                if key == "running_mean" and count in buffers:
                    self._buffers[count] = buffers[count]
                    self._counts[count] = self._counts.get(count, 0) + 1
        blueprint.traced.share_buffers(
            {name: buffer for name, buffer in self._buffers.items() if name not in self._counts}
        )

    def count(self, micro_batches: int) -> None:
        """Add the training forwards of ``micro_batches`` to the numbers of updates."""
        for name, calls in self._counts.items():
            self._buffers[name] += calls * micro_batches

    def share(self) -> None:
        """Copy the first replica's statistics to all replicas. Collective over all ranks."""
        broadcast_to_replicas(list(self.shards()), self.mesh)

    def shards(self) -> Iterator[Shard]:
        """This rank's statistics, by their names in the state dict."""
        owner = self.mesh.copy_rank == 0 and self.mesh.tp_rank == 0
        for name, buffer in self._buffers.items():
            yield Shard(name, tuple(buffer.shape), None, (), tensor=buffer, owner=owner)


def _updated(nodes: tuple[Node, ...], captured: Captured) -> Iterator[str]:
    """The buffers that these nodes update, once per node."""
    for node in nodes:
        if is_op(node, "batch_norm", "instance_norm") and node.args[5]:
            for buffer in node.args[3:5]:
                if (
                    isinstance(buffer, Node)
                    and buffer.op == "get_attr"
                    and buffer.target in captured.buffers
                ):
                    yield str(buffer.target)
