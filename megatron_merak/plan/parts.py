"""Parts of a plan: the rank grid, the units of the chain, the stages into which they are cut."""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_merak.config.rank_order import AXES, DEFAULT, REMEDY, mistake, normal
from megatron_merak.errors import PlanError

LARGEST = 1 << 17  # ranks
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Grid:
    """The rank grid: extents of tensor, context, data and pipeline parallelism.

    order: in which ranks run over these axes, the first varying fastest; by default Megatron-LM's,
           so that rank = ((p * dp + d) * cp + c) * tp + t.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise PlanError(
                    f"grid extent {axis}",
                    getattr(self, axis),
                    "an extent counts ranks",
                    "Use 1 or more",
                )
        if reason := mistake(self.order):
            raise PlanError("grid order", self.order, reason, REMEDY)
        if self.size > LARGEST:
            reason = f"more than {LARGEST:,} ranks are not planned"
            raise PlanError("grid", f"of {self.size:,} ranks", reason, "Use fewer ranks")
        object.__setattr__(self, "order", normal(self.order, self.cp))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def layer_ranks(self) -> int:
        """Number of ranks that compute each layer together."""
        return self.tp * self.cp

    @property
    def copies(self) -> int:
        """Number of ranks that have the same weights, and add up their gradients."""
        return self.cp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Return the (tp, cp, dp, pp) coordinates of a rank."""
        if not 0 <= rank < self.size:
            raise PlanError(
                "rank", rank, f"the grid has {self.size} ranks", f"Use 0 to {self.size - 1}"
            )
        extents = (self.tp, self.cp, self.dp, self.pp)
        tp, cp, dp, pp = (
            rank // stride % extent for stride, extent in zip(self._strides, extents, strict=True)
        )
        return tp, cp, dp, pp

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates."""
        places = (tp, cp, dp, pp)
        for axis, place in zip(AXES, places, strict=True):
            extent = getattr(self, axis)
            if not 0 <= place < extent:
                raise PlanError(
                    f"{axis} coordinate", place, f"the extent is {extent}", f"Use 0 to {extent - 1}"
                )
        return sum(map(operator.mul, places, self._strides))

    def stride(self, axis: str) -> int:
        """Return the distance of neighbours along "tp", "cp", "dp" or "pp", in ranks."""
        return dict(zip(AXES, self._strides, strict=True))[axis]

    @property
    def _strides(self) -> tuple[int, ...]:
        return _strides(self.order, self.tp, self.cp, self.dp, self.pp)

    def groups(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along ``axis``, each ascending, ordered by
        their first rank.

        axis: "tp", "cp", "dp" or "pp", or several joined by a dash: "tp-pp" groups the ranks of a
              model replica.
        """
        free = axis.split("-")
        if unknown := [name for name in free if name not in AXES]:
            raise PlanError(
                "grid axis",
                ", ".join(unknown),
                f"the axes are {', '.join(AXES)}",
                "Join axes by a dash",
            )
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            place = zip(AXES, self.coordinates(rank), strict=True)
            groups.setdefault(tuple(x for name, x in place if name not in free), []).append(rank)
        return list(groups.values())

    def context_levels(self, inner: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups of ``inner`` context-parallel neighbours, and those of the ranks at the
        same place of each.
        """
        groups = self.groups("cp")
        firsts = range(0, self.cp, inner)
        return (
            [ranks[first : first + inner] for ranks in groups for first in firsts],
            [ranks[place::inner] for ranks in groups for place in range(inner)],
        )

    def shard_groups(self, instances: int) -> list[list[int]]:
        """Return the groups of ranks with the same weights, each split into ``instances`` groups of
        neighbours, which shard among themselves.
        """
        size = self.copies // instances
        return [
            ranks[first : first + size]
            for ranks in self.groups("cp-dp")
            for first in range(0, self.copies, size)
        ]

    def replicate_groups(self, instances: int) -> list[list[int]]:
        """Return the groups of ranks that own the same shards: those at the same index of each of
        `shard_groups`.
        """
        size = self.copies // instances
        return [ranks[place::size] for ranks in self.groups("cp-dp") for place in range(size)]

    def expert_groups(self, experts: int) -> list[list[int]]:
        """Return the groups of ranks that divide the experts of a layer, each ascending: its tensor-
        parallel ranks, in some neighbouring copies.

        experts: number of ranks in a group.
        """
        together = experts // self.tp
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            key = (self.coordinates(rank)[3], self.copy_rank(rank) // together)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def copy_rank(self, rank: int) -> int:
        """Return the index of a rank among those that have the same weights, ascending."""
        _, cp, dp, _ = self.coordinates(rank)
        inside = self.stride("cp") <= self.stride("dp")
        return dp * self.cp + cp if inside else cp * self.dp + dp

    def same_weights(self, rank: int) -> list[int]:
        """Return the ranks that have the same weights as a rank, ascending."""
        tp, _, _, pp = self.coordinates(rank)
        return sorted(self.rank(tp, cp, dp, pp) for cp in range(self.cp) for dp in range(self.dp))


@functools.cache
def _strides(order: str, *extents: int) -> tuple[int, ...]:
    """Return the stride of each axis in ``AXES``, which is also the order of the extents."""
    inner = order.split("-")
    of = dict(zip(AXES, extents, strict=True))
    return tuple(math.prod(of[other] for other in inner[: inner.index(axis)]) for axis in AXES)


@dataclass(frozen=True)
class Unit:
    """One link of the chain that a model is, as one tensor-parallel rank stores and computes it.

    name:             of the unit.
    parameters:       number of values that this unit alone uses.
    tied:             name and number of values of each tensor that other units use too; every stage
                      with one of them has a copy.
    flops:            of one micro-batch's forward; a multiply-add counts two, causal attention half
                      of its scores.
    repeated_flops:   those of ``flops`` that every context-parallel rank computes.
    attention_flops:  those of ``flops`` without weights.
    attention_drops:  whether its attention has dropout.
    attention_heads:  queries of a head in a sequence, and features of a head; zeros: unknown, or
                      there is no attention.
    more_flops:       of (forward, backward), beyond ``flops`` and twice ``flops``.
    saved_bytes:      saved by its forward for its backward, beyond its input and its parameters.
    output_bytes:     sent across a stage boundary after it.
    passed_bytes:     those of ``output_bytes`` that earlier units produced.
    transient_bytes:  live only while it runs (the logits and their gradient).
    reduces:          number of its all-reduces over the tensor-parallel ranks, of (forward,
                      backward).
    reduced_bytes:    their sizes together, of (forward, backward).
    exchanged_bytes:  those of ``reduced_bytes`` that stand for exchanges, of which every rank sends
                      another part to each other rank, and for gathers of context-parallel ranks
                      beside tensor-parallel ones.
    ring_bytes:       those of ``exchanged_bytes`` that are passed on in a ring, each behind a part of
                      attention.
    cp_inner:         context-parallel neighbours that exchange heads, beside a ring of those at the same
                      place of each group of these; 1: none do.
    inner_sent:       (number, bytes) of exchanges of these, which ``reduced_bytes`` has not: of the
                      forward, of the backward, and of the backward while no weight gradient is computed.
    outer_sent:       likewise, of what is passed on in such a ring.
    experts:          those of ``parameters`` that copies of a layer divide, all of them trained.
    routed_bytes:     rows of tokens that these copies exchange, of (forward, backward).
    regathered_bytes: (all, exchanged) ``reduced_bytes`` of the backward that gather keys and values
                      again, unless the unit is recomputed.
    bare_bytes:       (all, exchanged) ``reduced_bytes`` of the backward that context-parallel ranks
                      send, and ``routed_bytes``, while no weight gradient is computed.
    hiding:           share of its weight gradients that is computed while others are under way.
    meanwhile_flops:  those of ``flops`` that are computed while rows of tokens are exchanged, such as a
                      shared expert's: of the forward, of gradients of inputs, of weights, and those
                      of weights that ``hiding`` has, too.
    meanwhile_bytes:  of these rows, in (forward, backward); in ``routed_bytes`` or, between the ranks of
                      a layer, in ``exchanged_bytes``.
    cp_comm_type:     what ranks that divide sequences exchange in it, see ``--cp-comm-type``; "":
                      nothing.
    operations:       that the host starts, of (forward, backward).
    weight_bytes:     operands of its weight gradients (inputs and output gradients of its matrix
                      products), stored if these are deferred; 0: ``saved_bytes``, unless some are
                      frozen.
    unread_bytes:     of its input, what no backward reads.
    products:         (m, n, k) of the matrix products in its forward, except attention's; of one
                      part, if the others are alike; none if unknown.
    frozen:           number of its ``parameters`` that are not trained.
    tied_frozen:      which of its ``tied`` tensors are not trained.
    state_bytes:      optimizer state of one of its trained ``parameters`` on average; None: as the
                      plan says.
    tied_state_bytes: of a value of ``tied`` tensors, by name; tensors without an entry: as the plan
                      says.
    fp8_flops:        those of ``flops`` whose operands are rounded to fp8.
    recomputed_bytes: (of activations that its backward computes again in place of having them in
                      ``saved_bytes``, moved for that).
    rounded_values:   of matrices that are rounded, of (forward, backward).
    added_values:     of weight gradients that are made in 16 bits before they are added up, such as
                      those of experts.
    packed:           those of ``frozen`` that are stored in 4 bits.
    packed_bytes:     of these, with their scales.
    unpacked_bytes:   that are moved to make matrices of these, of (forward, backward).
    unneeded_flops:   that the backward saves of twice ``flops``, since (inputs, weights) need no
                      gradient.
    backward:         whether it has one: nothing that it computes needs a gradient where all before it
                      is frozen, and its own weights are.
    running_bytes:    most bytes beyond its input and ``saved_bytes`` while (its forward, its
                      backward, a backward that defers weight gradients) runs; zeros: unknown.
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
    attention_drops: bool = False
    attention_heads: tuple[int, int] = (0, 0)
    exchanged_bytes: tuple[int, int] = (0, 0)
    ring_bytes: tuple[int, int] = (0, 0)
    cp_inner: int = 1
    inner_sent: tuple[tuple[int, int], ...] = ()
    outer_sent: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    routed_bytes: tuple[int, int] = (0, 0)
    regathered_bytes: tuple[int, int] = (0, 0)
    bare_bytes: tuple[int, int, int] = (0, 0, 0)
    hiding: float = 1.0
    meanwhile_flops: tuple[int, int, int, int] = (0, 0, 0, 0)
    meanwhile_bytes: tuple[int, int] = (0, 0)
    cp_comm_type: str = ""
    repeated_flops: int = 0
    fp8_flops: int = 0
    recomputed_bytes: tuple[int, int] = (0, 0)
    rounded_values: tuple[int, int] = (0, 0)
    added_values: int = 0
    packed: int = 0
    packed_bytes: int = 0
    unpacked_bytes: tuple[int, int] = (0, 0)
    running_bytes: tuple[int, int, int] = (0, 0, 0)
    backward: bool = True

    def working(self, defers: bool) -> int:
        """Return the most bytes that it needs only while it runs, with the gradients of values that
        only pass it.

        defers: whether its backward leaves weight gradients to a W.
        """
        forward, backward, deferred = self.running_bytes
        if not backward:
            return max(forward, self.transient_bytes)
        return max(forward, (deferred if defers else backward) + self.passed_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes stored between a backward and the weight gradients that it deferred."""
        known = self.weight_bytes or self.frozen or self.tied_frozen
        return self.weight_bytes if known else self.saved_bytes


@dataclass(frozen=True)
class StagePlan:
    """Units [first, last) of the chain.

    recompute: those (by index in the chain) that are recomputed.
    span:      recomputed neighbours form runs of so many, of which only the input is saved.
    offload:   those whose saved tensors are in host memory until their backward.
    """

    first: int
    last: int
    recompute: tuple[int, ...] = ()
    span: int = 1
    offload: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 <= self.first < self.last:
            raise PlanError(
                "stage",
                f"[{self.first}, {self.last})",
                "a stage holds one unit or more",
                "Move the cuts",
            )
        for name, chosen in (("recompute", self.recompute), ("offload", self.offload)):
            if outside := [unit for unit in chosen if not self.first <= unit < self.last]:
                raise PlanError(
                    name,
                    outside,
                    f"the stage holds units [{self.first}, {self.last})",
                    "Drop them",
                )
        if both := [unit for unit in self.offload if unit in self.recompute]:
            reason = "what is recomputed is not kept, neither on the device nor on the host"
            raise PlanError("offload", both, reason, "Keep each unit in one of the two lists")
        if self.span < 1:
            raise PlanError(
                "span", self.span, "units are recomputed in runs of one or more", "Use 1 or more"
            )

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

    @property
    def continued(self) -> tuple[int, ...]:
        """Units that begin where nothing but the one before decides what passes: no message, no
        recomputation from there, nothing that waits in host memory.
        """
        run_of = {unit: run for run in self.runs for unit in run}
        apart = {*self.offload}
        return tuple(
            unit
            for unit in self.units[1:]
            if run_of.get(unit) == run_of.get(unit - 1) and not {unit - 1, unit} & apart
        )


def kind_of_unit(unit: Unit) -> tuple[Any, ...]:
    """Return a key that is equal for units which differ by their names alone."""
    return tuple((vars(unit) | {"name": ""}).values())


def held_parameters(units: Sequence[Unit]) -> int:
    """Return the number of values of some units on one rank, tied ones once."""
    tied = dict(pair for unit in units for pair in unit.tied)
    return sum(unit.parameters for unit in units) + sum(tied.values())


def trained_tied(unit: Unit) -> list[tuple[str, int]]:
    """Return those of a unit's ``tied`` tensors that are trained."""
    return [pair for pair in unit.tied if pair[0] not in unit.tied_frozen]


def trained_parameters(units: Sequence[Unit]) -> int:
    """Return ``held_parameters`` of those that are trained."""
    tied = dict(pair for unit in units for pair in trained_tied(unit))
    return sum(unit.parameters - unit.frozen for unit in units) + sum(tied.values())


def packed_weights(units: Sequence[Unit]) -> tuple[int, int]:
    """Return the number of frozen values of some units that are stored in 4 bits, and their bytes."""
    return sum(unit.packed for unit in units), sum(unit.packed_bytes for unit in units)


def spread_parameters(units: Sequence[Unit], divided: int) -> int:
    """Return the number of trained values that ranks with the same weights shard together, where
    ``divided`` of these have other experts each.
    """
    return trained_parameters(units) + (divided - 1) * sum(unit.experts for unit in units)


def optimizer_state(units: Sequence[Unit], usual: float) -> float:
    """Return the bytes of optimizer state of some units on one rank. usual: of a value whose unit
    does not say.
    """
    tied = {
        name: (values, dict(unit.tied_state_bytes))
        for unit in units
        for name, values in trained_tied(unit)
    }
    own = ((unit.parameters - unit.frozen, unit.state_bytes) for unit in units)
    own_bytes = sum(values * (usual if each is None else each) for values, each in own)
    return own_bytes + sum(values * each.get(name, usual) for name, (values, each) in tied.items())
