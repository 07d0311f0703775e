"""The weights of a rank under a schedule that updates them while micro-batches are in flight."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..parallel.pieces import whole
from ..pipeline_parallel.ops import Op, Schedule
from ..pipeline_parallel.unflushed import ops_of_stage, updates_after
from .parameters import RankParameters


class _Copy(NamedTuple):
    """Flat weights as they were before an update. master: None where no parameter is read from
    it.
    """

    data: Tensor
    master: Tensor | None


class WeightVersions:
    """Gives each op of a rank's only stage the version of the weights that its schedule says.

    The newest version is in the buffer, where the optimizer updates it in place. Older ones that
    ops still need are copies. Parameters are pointed at one or the other before an op runs;
    a backward reads a parameter again, so it must see the version of its forward.

    schedule: with updates.
    update:   makes the gradient of the last micro-batches final, updates the buffer, and begins
              the next gradient.
    """

    def __init__(
        self,
        parameters: RankParameters,
        schedule: Schedule,
        stage: int,
        update: Callable[[], None],
    ):
        assert schedule.updates is not None
        self.parameters = parameters
        self.buffer = parameters.buffer
        self.update = update
        ops = ops_of_stage(schedule, stage)
        self._version = {op: schedule.updates.version(op) for op in ops}
        self._last_use = {version: at for at, version in enumerate(self._version.values())}
        self._position = {op: at for at, op in enumerate(ops)}
        self._updates_after = {op for op in ops if updates_after(schedule, op)}
        self._from_master = any(slot.fp32 for slot in self.buffer.slots.values())
        self.start()

    def start(self) -> None:
        """Begin a step: the weights in the buffer are version 0."""
        self.newest = 0
        self._shown = 0
        self._copies: dict[int, _Copy] = {}

    @property
    def held(self) -> int:
        """How many versions are in memory."""
        return 1 + len(self._copies)

    def before(self, op: Op) -> None:
        """Show an op its version of the weights."""
        self._show(self._version[op])

    def after(self, op: Op) -> None:
        """Update the weights if an op is the last one before an update, and free what no later op
        needs.
        """
        at = self._position[op]
        if op in self._updates_after:
            self._advance(at)
        for version in [each for each in self._copies if self._last_use[each] <= at]:
            del self._copies[version]

    def finish(self) -> None:
        """Show the newest weights."""
        self._show(self.newest)

    def _advance(self, at: int) -> None:
        self._show(self.newest)
        if self._last_use.get(self.newest, -1) > at:
            master = self.buffer.master.clone() if self._from_master else None
            self._copies[self.newest] = _Copy(whole(self.buffer.data).clone(), master)
        with _unseen(whole(self.buffer.data)), _unseen(self.buffer.master):
            self.update()
        self.newest += 1
        self._shown = self.newest

    def _show(self, version: int) -> None:
        if version == self._shown:
            return
        copy = None if version == self.newest else self._copies[version]
        for parameter, name in self.parameters.names.items():
            parameter.data = self._view(name, copy)
        self._shown = version

    def _view(self, name: str, copy: _Copy | None) -> Tensor:
        if copy is None:
            return self.buffer.parameter(name)
        flat = copy.master if self.buffer.slots[name].fp32 else copy.data
        assert flat is not None
        return self.buffer.view(flat, name)


def _unseen(flat: Tensor) -> torch.autograd._unsafe_preserve_version_counter:
    """Autograd does not see changes of ``flat``: micro-batches in flight are shown their own copy
    before their backward reads a parameter.
    """
    return torch.autograd._unsafe_preserve_version_counter(flat)
