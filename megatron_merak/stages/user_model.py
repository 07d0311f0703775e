"""The model that the user holds: it has the trained weights where a rank holds all of them, else says who does."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..checkpoint.hf import give
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..graph.capture.empty import is_fake
from ..parallel.mesh import Mesh
from .guard import Guard, guard, unguard
from .model_picture import Change, Picture


class UserModel:
    """``model`` as given to a trainer, seen from this rank. ``exported``: this rank's parts of what is trained.

    Without tensor and pipeline parallelism its parameters become views of the trained ones, and use no memory of their
    own, unless these are divided over the replicas (``divided``). Else what reads its weights (its forward,
    ``generate``, ``save_pretrained``, ``state_dict``) raises ConfigError until `gather` brings them to the first rank,
    and again when training changes them. ``settle``: makes what computes follow the exported tensors after they were
    written.
    """

    def __init__(
        self,
        model: nn.Module,
        exported: Callable[[], list[Shard]],
        mesh: Mesh,
        settle: Callable[[], None] = lambda: None,
        divided: bool = False,
    ):
        self.model, self.exported, self.mesh, self._settle = model, exported, mesh, settle
        self.shared = mesh.grid.tp * mesh.grid.pp == 1 and not divided
        self._guard: Guard | None = None
        if self.shared:
            give(model, {shard.name: shard.tensor for shard in exported()})
            for buffer in model.buffers():
                if not is_fake(buffer):
                    buffer.data = buffer.data.to(mesh.device)
        else:
            self.stale()
        self.picture = Picture.of(model)
        self.note()

    def note(self) -> None:
        """The weights that the model has now are those that it shall have."""
        self._parameters = [p for p in self.model.parameters() if not is_fake(p)]
        self._writes = self._count()
        self._address = self._parameters[0].data_ptr() if self._parameters else 0
        self._held = {name: _written(p) for name, p in self.model.named_parameters()}
        held = vars(self.model).get("forward")
        self._guard = held if isinstance(held, Guard) else None

    def stale(self) -> None:
        """The trained weights change."""
        if not self.shared:
            guard(self.model, self.mesh.grid.size)
            held = vars(self.model).get("forward")
            self._guard = held if isinstance(held, Guard) else None

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
        self.note()

    # What the user changed

    def change(self, only_weights: bool = False) -> Change | None:
        """What was changed of the model that a capture depends on: the first place. only_weights: of its parameters."""
        now = Picture.of(self.model)
        return self.picture.weights_change(now) if only_weights else self.picture.change(now)

    def taken(self) -> bool:
        """Whether another trainer divides this model now."""
        held = vars(self.model).get("forward")
        return not self.shared and (held if isinstance(held, Guard) else None) is not self._guard

    def edited(self) -> str | None:
        """The first parameter that was written, where the model does not share memory with the trained ones."""
        if self.shared:
            return None
        held = self._held
        return next((name for name, p in self.model.named_parameters() if _written(p) != held.get(name)), None)

    def touched(self) -> bool:
        """Whether weights were written, or moved where they are shared; for every step, since it is quick."""
        moved = self.shared and self._parameters and self._parameters[0].data_ptr() != self._address
        return bool(moved) or self._count() != self._writes

    def _count(self) -> int:
        return sum([p._version for p in self._parameters])

    @torch.no_grad()
    def adopt(self) -> None:
        """Train on with the weights that the model has, where it shares them: written in place, set to other memory,
        or taken by another trainer."""
        if not self.shared:
            return
        shards = self.exported()
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for shard in shards:
            own: Tensor = buffers[shard.name] if shard.name in buffers else self.model.get_parameter(shard.name)
            if own.data_ptr() != shard.tensor.data_ptr():
                shard.tensor.copy_(own)
        give(self.model, {shard.name: shard.tensor for shard in shards})
        self._settle()
        self.note()


def _written(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes when its values do, wherever it is moved."""
    return (0, 0) if is_fake(parameter) else (id(parameter), parameter._version)
