"""The model that the user holds: it has the trained weights where a rank holds all of them, else says who does."""

from collections.abc import Callable

from torch import nn

from ..checkpoint.hf import give
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..graph.empty import is_fake
from ..parallel.mesh import Mesh
from .guard import guard, unguard


class UserModel:
    """``model`` as given to a trainer, seen from this rank. ``exported``: this rank's parts of what is trained.

    Without tensor and pipeline parallelism its parameters become views of the trained ones, and use no memory of their
    own. Else what reads its weights (its forward, ``generate``, ``save_pretrained``, ``state_dict``) raises ConfigError
    until `gather` brings them to the first rank, and again when training changes them.
    """

    def __init__(self, model: nn.Module, exported: Callable[[], list[Shard]], mesh: Mesh):
        self.model, self.exported, self.mesh = model, exported, mesh
        self.shared = mesh.grid.tp * mesh.grid.pp == 1
        if self.shared:
            give(model, {shard.name: shard.tensor for shard in exported()})
            for buffer in model.buffers():
                if not is_fake(buffer):
                    buffer.data = buffer.data.to(mesh.device)
        else:
            self.stale()

    def stale(self) -> None:
        """The trained weights change."""
        if not self.shared:
            guard(self.model, self.mesh.grid.size)

    def gather(self) -> None:
        """Give the first rank's model the trained weights, in memory of its own. Collective over all ranks."""
        if self.shared:
            return
        gather = Gather(self.exported(), {}, self.mesh.control, "cpu")
        model = self.model
        for name, shape in gather.shapes.items():
            values = gather(name, tuple((0, extent) for extent in shape))
            if gather.first:
                give(model, {name: values})
        if gather.first:
            unguard(model)
