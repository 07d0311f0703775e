"""The model that the user holds: it has the trained weights where a rank holds all of them, else says who does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.hf import give
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..graph.capture.empty import is_fake
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh
from .guard import Guard, guard, guard_of, unguard
from .model_picture import Change, Picture
from .withheld import is_withheld, restore, withhold


class UserModel:
    """``model`` as given to a trainer, seen from this rank. ``exported``: this rank's parts of what is trained.

    Without tensor and pipeline parallelism its parameters become views of the trained ones, and use no memory of their
    own, unless these are divided over the replicas (``divided``). Else they have none, on any rank: what reads or
    writes a weight, and the methods that need all of them (its forward, ``generate``, ``save_pretrained``,
    ``state_dict``), raise ConfigError until `gather` brings the trained ones to the first rank, and again when training
    changes them. ``settle``: makes what computes follow the exported tensors after they were written.
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
        self._away = False  # whether the model is without its weights on this rank
        self._withheld: dict[str, nn.Parameter] = {}
        if self.shared:
            take(model, {shard.name: shard.tensor for shard in exported()})
            for buffer in model.buffers():
                if not is_fake(buffer):
                    buffer.data = buffer.data.to(mesh.device)
        else:
            self.stale()
        self.picture = Picture.of(model)
        self.note()

    def note(self) -> None:
        """The weights that the model has now are those that it shall have."""
        self._parameters = [p for p in self.model.parameters() if not (is_fake(p) or is_withheld(p))]
        self._writes = self._count()
        self._address = self._parameters[0].data_ptr() if self._parameters else 0
        self._held = {name: _written(p) for name, p in self.model.named_parameters()}
        self._guard = guard_of(self.model)

    def stale(self) -> None:
        """The trained weights change: a model that does not share them has none any more."""
        if not self.shared and not self._away:
            guard(self.model, self.mesh.grid.size)
            self._withheld = withhold(self.model, self.mesh.grid.size)
            self._guard, self._away = guard_of(self.model), True

    def gather(self) -> None:
        """Give the first rank's model the trained weights, in memory of its own. Collective over all ranks."""
        if self.shared:
            return
        self.stale()  # what it has is of before
        gather = Gather(self.exported(), {}, self.mesh.control, "cpu")
        found = {name: gather(name, tuple((0, extent) for extent in shape)) for name, shape in gather.shapes.items()}
        if gather.first:
            take(self.model, {name: self._placed(name, values) for name, values in found.items()})
            unguard(self.model)
            self._away = False
        self.note()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the first rank's model may `take` weights; behind it, it has them only if it had them before."""
        away = self._away
        try:
            yield
        finally:
            if away and not self.shared:
                self._withheld = withhold(self.model, self.mesh.grid.size)
            self.note()

    @torch.no_grad()
    def release(self, everywhere: bool) -> None:
        """Let the model be one that no trainer has taken, as long as its weights were not trained.

        The first rank's has its weights again, or every rank's if ``everywhere``. Those that never had memory are as
        they were. Collective over all ranks.
        """
        control = self.mesh.control
        mine = {name: p for name, p in self._withheld.items() if is_withheld(p)}
        wanting = gather_json([name for name, p in mine.items() if not is_fake(p)], control, "cpu")
        wanted = dict.fromkeys(chain(*wanting) if everywhere else wanting[0])
        gather = Gather(self.exported() if wanted else (), {}, control, "cpu")
        for name in wanted:
            values = gather(name, tuple((0, extent) for extent in gather.shapes[name]))
            if everywhere and control is not None:
                values = values if gather.first else torch.empty(values.shape, dtype=values.dtype)
                dist.broadcast(values, group=control, group_src=0)
            if name in mine and not (is_fake(mine[name]) or values.is_meta):
                restore(mine[name], values.to(mine[name].device))
        for parameter in filter(is_fake, mine.values()):
            restore(parameter, None)
        unguard(self.model)

    def _placed(self, name: str, values: Tensor) -> Tensor:
        """``values`` on the device where the model has that parameter or buffer."""
        path, _, key = name.rpartition(".")
        return values.to(getattr(self.model.get_submodule(path), key).device)

    # What the user changed

    def change(self, only_weights: bool = False) -> Change | None:
        """What was changed of the model that a capture depends on: the first place. only_weights: of its parameters."""
        now = Picture.of(self.model)
        return self.picture.weights_change(now) if only_weights else self.picture.change(now)

    def taken(self) -> bool:
        """Whether another trainer divides this model now."""
        if self.shared:
            return any(map(is_withheld, self._parameters))
        return guard_of(self.model) is not self._guard

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
        take(self.model, {shard.name: shard.tensor for shard in shards})
        self._settle()
        self.note()


def take(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Let parameters and buffers of ``model`` be ``values``, by name, also where they are withheld."""
    others = {}
    for name, value in values.items():
        path, _, key = name.rpartition(".")
        parameter = model.get_submodule(path)._parameters.get(key)
        if parameter is not None:
            restore(parameter, None if is_fake(parameter) else value)
        if parameter is None or is_fake(parameter):
            others[name] = value
    give(model, others)


def _written(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes when its values do, wherever it is moved."""
    return (0, 0) if is_fake(parameter) else (id(parameter), parameter._version)


@contextmanager
def left_out(model: nn.Module, name: str) -> Iterator[None]:
    """Let ``model`` be without its submodule ``name``, "" for none, for what goes by its names."""
    part = model._modules.pop(name) if name else None
    try:
        yield
    finally:
        if name:
            model._modules[name] = part
