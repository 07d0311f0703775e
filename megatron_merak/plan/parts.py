"""What a plan is made of: the rank grid, the units of the chain, the stages that they are cut into."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_merak.config.rank_order import AXES, DEFAULT, REMEDY, mistake, normal
from megatron_merak.errors import PlanError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Grid:
    """The rank grid: tensor, context, data and pipeline parallel extents, and the ``order`` in which ranks run over
    these axes, the first varying fastest.

    The default order is Megatron-LM's, so rank = ((p * dp + d) * cp + c) * tp + t.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise PlanError(f"grid extent {axis}", getattr(self, axis), "an extent counts ranks", "Use 1 or more")
        if reason := mistake(self.order):
            raise PlanError("grid order", self.order, reason, REMEDY)
        object.__setattr__(self, "order", normal(self.order, self.cp))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """The (tp, cp, dp, pp) coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise PlanError("rank", rank, f"the grid has {self.size} ranks", f"Use 0 to {self.size - 1}")
        extents = (self.tp, self.cp, self.dp, self.pp)
        tp, cp, dp, pp = (rank // stride % extent for stride, extent in zip(self._strides, extents, strict=True))
        return tp, cp, dp, pp

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these coordinates."""
        places = (tp, cp, dp, pp)
        for axis, place in zip(AXES, places, strict=True):
            extent = getattr(self, axis)
            if not 0 <= place < extent:
                raise PlanError(f"{axis} coordinate", place, f"the extent is {extent}", f"Use 0 to {extent - 1}")
        return sum(map(operator.mul, places, self._strides))

    def stride(self, axis: str) -> int:
        """How many ranks neighbours along "tp", "cp", "dp" or "pp" are apart."""
        return dict(zip(AXES, self._strides, strict=True))[axis]

    @property
    def _strides(self) -> tuple[int, ...]:
        return _strides(self.order, self.tp, self.cp, self.dp, self.pp)

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ only along ``axis``, one ascending list per group, groups by their first rank.

        ``axis`` is "tp", "cp", "dp" or "pp", or several joined by a dash: "tp-pp" is one model replica's ranks.
        """
        free = axis.split("-")
        if unknown := [name for name in free if name not in AXES]:
            raise PlanError("grid axis", ", ".join(unknown), f"the axes are {', '.join(AXES)}", "Join axes by a dash")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = zip(AXES, self.coordinates(rank), strict=True)
            groups.setdefault(tuple(x for name, x in place if name not in free), []).append(rank)
        return list(groups.values())

    def shard_groups(self, instances: int) -> list[list[int]]:
        """Return the "dp" groups, each split into ``instances`` groups of neighbours, which shard among themselves."""
        size = self.dp // instances
        return [ranks[first : first + size] for ranks in self.groups("dp") for first in range(0, self.dp, size)]

    def replicate_groups(self, instances: int) -> list[list[int]]:
        """Return the groups of ranks that own the same shards: those at the same index of each of `shard_groups`."""
        size = self.dp // instances
        return [ranks[place::size] for ranks in self.groups("dp") for place in range(size)]


@functools.cache
def _strides(order: str, *extents: int) -> tuple[int, ...]:
    """Of each axis in ``AXES``; so are the extents."""
    inner = order.split("-")
    of = dict(zip(AXES, extents, strict=True))
    return tuple(math.prod(of[other] for other in inner[: inner.index(axis)]) for axis in AXES)


@dataclass(frozen=True)
class Unit:
    """One link of the chain that a model is: what one tensor-parallel rank holds and computes of it.

    ``parameters``: values that this unit alone uses. ``tied``: name and values of each tensor that it shares with other
    units; every stage with one of them holds a copy. ``flops``: of one micro-batch's forward, a multiply-add counting
    two, causal attention with half of its scores; the ``attention_flops`` among them have no weights. ``more_flops``:
    what its (forward, backward) computes beyond ``flops`` and twice ``flops``. ``saved_bytes``: kept from its forward
    for its backward, beyond its input and its parameters. ``output_bytes``: what crosses a stage border behind it,
    ``passed_bytes`` of which earlier units made. ``transient_bytes``: live only while it runs (the logits and their
    gradient). In pairs of (forward, backward): ``reduces``, its all-reduces over the tensor-parallel ranks, their
    ``reduced_bytes`` together, and ``operations`` that the host starts. ``weight_bytes``: what its weight gradients are
    made of (inputs and output gradients of its matrix products), kept where they are computed apart from the backward;
    0: as much as ``saved_bytes``, but where some are frozen. ``unread_bytes``: of what enters it, what no backward
    reads. ``products``: (m, n, k) of the matrix products in its forward beside attention's, of a part where the rest is
    alike; none: they are unknown.
    ``frozen``: how many of its ``parameters`` are not trained, ``tied_frozen``: which of its ``tied`` tensors.
    ``state_bytes``: what the optimizer keeps of one of its other ``parameters`` on average, ``tied_state_bytes``: of a
    value of some ``tied`` tensors, by name; None, and where there is no entry: as much as the plan says.
    ``unneeded_flops``: what the backward leaves out of twice ``flops``, since (inputs, weights) take no gradient.
    """

    name: str
    kind: str
    parameters: int
    flops: int
    saved_bytes: int
    output_bytes: int
    tied: tuple[tuple[str, int], ...] = ()
    transient_bytes: int = 0
    passed_bytes: int = 0
    reduces: tuple[int, int] = (0, 0)
    reduced_bytes: tuple[int, int] = (0, 0)
    operations: tuple[int, int] = (0, 0)
    weight_bytes: int = 0
    unread_bytes: int = 0
    attention_flops: int = 0
    more_flops: tuple[int, int] = (0, 0)
    products: tuple[tuple[int, int, int], ...] = ()
    frozen: int = 0
    tied_frozen: tuple[str, ...] = ()
    state_bytes: float | None = None
    tied_state_bytes: tuple[tuple[str, float], ...] = ()
    unneeded_flops: tuple[int, int] = (0, 0)

    @property
    def held_bytes(self) -> int:
        """Kept between a backward and the weight gradients that it left."""
        known = self.weight_bytes or self.frozen or self.tied_frozen
        return self.weight_bytes if known else self.saved_bytes


@dataclass(frozen=True)
class StagePlan:
    """Units [first, last) of the chain; ``recompute`` names those (by index in the chain) that keep no tape.

    Neighbours among them are recomputed in runs of ``span``, of which only the input is kept.
    """

    first: int
    last: int
    recompute: tuple[int, ...] = ()
    span: int = 1

    def __post_init__(self):
        if not 0 <= self.first < self.last:
            raise PlanError("stage", f"[{self.first}, {self.last})", "a stage holds one unit or more", "Move the cuts")
        if outside := [unit for unit in self.recompute if not self.first <= unit < self.last]:
            raise PlanError("recompute", outside, f"the stage holds units [{self.first}, {self.last})", "Drop them")
        if self.span < 1:
            raise PlanError("span", self.span, "units are recomputed in runs of one or more", "Use 1 or more")

    @property
    def units(self) -> range:
        return range(self.first, self.last)

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """``recompute``, as runs of units that are recomputed together."""
        runs: list[tuple[int, ...]] = []
        for unit in sorted(self.recompute):
            if runs and runs[-1][-1] == unit - 1 and len(runs[-1]) < self.span:
                runs[-1] += (unit,)
            else:
                runs.append((unit,))
        return tuple(runs)


def held_parameters(units: Sequence[Unit]) -> int:
    """The values of some units on one rank, tied ones once."""
    tied = dict(pair for unit in units for pair in unit.tied)
    return sum(unit.parameters for unit in units) + sum(tied.values())


def trained_tied(unit: Unit) -> list[tuple[str, int]]:
    """Of a unit's ``tied``, those that are trained."""
    return [pair for pair in unit.tied if pair[0] not in unit.tied_frozen]


def trained_parameters(units: Sequence[Unit]) -> int:
    """As ``held_parameters``, of those that are trained."""
    tied = dict(pair for unit in units for pair in trained_tied(unit))
    return sum(unit.parameters - unit.frozen for unit in units) + sum(tied.values())


def optimizer_state(units: Sequence[Unit], usual: float) -> float:
    """Bytes that the optimizer keeps of some units on one rank. usual: of a value of which its unit says nothing."""
    tied = {name: (values, dict(unit.tied_state_bytes)) for unit in units for name, values in trained_tied(unit)}
    own = ((unit.parameters - unit.frozen, unit.state_bytes) for unit in units)
    own_bytes = sum(values * (usual if each is None else each) for values, each in own)
    return own_bytes + sum(values * each.get(name, usual) for name, (values, each) in tied.items())
