"""The user's model: it shares the trained weights if they are not sharded; else it raises when they
are read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from .four_bit import as_given, follow, keep_packing, move_scales
from .guard import Guard, guard, guard_of, unguard
from .model_fingerprint import Fingerprint, ModelChange
from .withheld import has_memory, is_withheld, restore, version, withhold


class UserModel:
    """The model that was given to a trainer, on this rank.

    exported: returns this rank's shards of the trained weights and buffers.
    settle:   updates all copies of the weights after the exported tensors were written.
    sharded:  whether data-parallel ranks have parts of the weights.

    If there is no tensor or pipeline parallelism, and replicas have all of the weights, the model
    is ``shared``: its parameters become views of the trained ones and need no memory of their own.
    Else they have no values on any rank: reading or writing one raises ConfigError, and so do the
    methods that need all (forward, ``generate``, ``save_pretrained``, ``state_dict``), until
    `gather` copies the trained weights to the first rank; and again once training has changed them.
    """

    def __init__(
        self,
        model: nn.Module,
        exported: Callable[[], list[Shard]],
        mesh: Mesh,
        settle: Callable[[], None] = lambda: None,
        sharded: bool = False,
    ):
        self.model = model
        self.exported = exported
        self.mesh = mesh
        self._settle = settle
        self.shared = mesh.grid.tp * mesh.grid.pp == 1 and not sharded
        self._guard: Guard | None = None
        self._emptied = False  # whether the model lacks its weights on this rank
        self._withheld: dict[str, nn.Parameter] = {}
        if self.shared:
            take(model, {shard.name: shard.tensor for shard in exported()})
            move_scales(model)
            for buffer in model.buffers():
                if not is_fake(buffer):
                    buffer.data = buffer.data.to(mesh.device)
        else:
            self.mark_stale()
        keep_packing(model)
        self.fingerprint = Fingerprint.of(model)
        self.record_weights()

    def record_weights(self) -> None:
        """Record the current weights of the model, so that later changes are detected."""
        self._parameters = [
            p for p in self.model.parameters() if not (is_fake(p) or is_withheld(p))
        ]
        self._writes = self._count()
        self._address = self._parameters[0].data_ptr() if self._parameters else 0
        self._versions = {name: _version(p) for name, p in self.model.named_parameters()}
        self._guard = guard_of(self.model)

    def mark_stale(self) -> None:
        """Note that the trained weights change: remove the values of a model that does not share
        them.
        """
        if not self.shared and not self._emptied:
            guard(self.model, self.mesh.grid.size)
            self._withheld = withhold(self.model, self.mesh.grid.size)
            self._guard = guard_of(self.model)
            self._emptied = True

    def gather(self) -> None:
        """Copy the trained weights to the first rank's model. Collective over all ranks."""
        if self.shared:
            return
        self.mark_stale()  # its values may be of an earlier step
        gather = Gather(self.exported(), {}, self.mesh.control, "cpu")
        weights = {
            name: gather(name, tuple((0, extent) for extent in shape))
            for name, shape in gather.shapes.items()
        }
        if gather.first:
            take(self.model, {name: self._placed(name, values) for name, values in weights.items()})
            unguard(self.model)
            self._emptied = False
        self.record_weights()

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let the first rank's model `take` weights inside; afterwards it has them only if it had
        them before.
        """
        emptied = self._emptied
        try:
            yield
        finally:
            if emptied and not self.shared:
                self._withheld = withhold(self.model, self.mesh.grid.size)
            self.record_weights()

    @torch.no_grad()
    def release(self, everywhere: bool) -> None:
        """Undo the withholding, for a trainer that has not trained the model.

        everywhere: whether every rank's model gets its weights back, or the first one's only.

        Parameters that never had memory are as before. Collective over all ranks.
        """
        control = self.mesh.control
        withheld = {name: p for name, p in self._withheld.items() if is_withheld(p)}
        missing = gather_json(
            [name for name, p in withheld.items() if has_memory(p)], control, "cpu"
        )
        names = dict.fromkeys(chain(*missing) if everywhere else missing[0])
        gather = Gather(self.exported() if names else (), {}, control, "cpu")
        for name in names:
            values = gather(name, tuple((0, extent) for extent in gather.shapes[name]))
            if everywhere and control is not None:
                values = values if gather.first else torch.empty(values.shape, dtype=values.dtype)
                dist.broadcast(values, group=control, group_src=0)
            if name in withheld and has_memory(withheld[name]) and not values.is_meta:
                given = as_given(withheld[name], values)
                restore(withheld[name], given.to(withheld[name].device))
        for parameter in withheld.values():
            if not has_memory(parameter):
                restore(parameter, None)
        unguard(self.model)

    def _placed(self, name: str, values: Tensor) -> Tensor:
        """``values`` on the device where the model has that parameter or buffer."""
        path, _, key = name.rpartition(".")
        return values.to(getattr(self.model.get_submodule(path), key).device)

    # Detecting what the user changed

    def change(
        self, only_weights: bool = False, thawed: Collection[str] = ()
    ) -> ModelChange | None:
        """The first change of the model that a capture depends on.

        only_weights: only changes of parameters.
        thawed:       parameters that may have been frozen, or may be trainable again.
        """
        now = Fingerprint.of(self.model)
        if only_weights:
            return self.fingerprint.first_weight_change(now)
        keys = [f"{name}.requires_grad" for name in thawed]
        same = {
            key: self.fingerprint.rest[key]
            for key in keys
            if key in now.rest and key in self.fingerprint.rest
        }
        return self.fingerprint.first_change(replace(now, rest={**now.rest, **same}))

    def is_taken(self) -> bool:
        """Whether another trainer has withheld the weights of this model."""
        if self.shared:
            return any(map(is_withheld, self._parameters))
        return guard_of(self.model) is not self._guard

    def written_parameter(self) -> str | None:
        """The first parameter that was written since `record_weights`, if the model does not share
        the trained ones.
        """
        if self.shared:
            return None
        versions = self._versions
        return next(
            (
                name
                for name, p in self.model.named_parameters()
                if _version(p) != versions.get(name)
            ),
            None,
        )

    def weights_changed(self) -> bool:
        """Whether weights were written since `record_weights`, or shared ones moved. Quick enough
        for every step.
        """
        moved = self.shared and self._parameters and self._parameters[0].data_ptr() != self._address
        return bool(moved) or self._count() != self._writes

    def _count(self) -> int:
        return sum([version(p) for p in self._parameters])

    @torch.no_grad()
    def adopt(self) -> None:
        """If the model shares the trained weights, continue training with the values that it has
        now.

        The user may have written them in place or set ``data``, or another trainer may have taken
        the model.
        """
        if not self.shared:
            return
        shards = self.exported()
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for shard in shards:
            own: Tensor = (
                buffers[shard.name]
                if shard.name in buffers
                else self.model.get_parameter(shard.name)
            )
            if own.data_ptr() != shard.tensor.data_ptr():
                follow(shard, own)
        take(self.model, {shard.name: shard.tensor for shard in shards})
        self._settle()
        self.record_weights()


def take(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set parameters, withheld or not, and buffers of ``model`` to ``values``, by name, without
    copying.
    """
    others = {}
    for name, value in values.items():
        path, _, key = name.rpartition(".")
        parameter = model.get_submodule(path)._parameters.get(key)
        if parameter is not None:
            value = as_given(parameter, value)
            restore(parameter, value if has_memory(parameter) else None)
        if parameter is None or is_fake(parameter):
            others[name] = value
    give(model, others)


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    """A key that changes when the values of the parameter are written, but not when it is moved."""
    return (id(parameter), version(parameter)) if has_memory(parameter) else (0, 0)


@contextmanager
def left_out(model: nn.Module, name: str) -> Iterator[None]:
    """Remove the submodule ``name``, "" for none, from ``model`` inside."""
    part = model._modules.pop(name) if name else None
    try:
        yield
    finally:
        if name:
            model._modules[name] = part
