"""The choices that a job has: what the runtime runs on so many ranks, with so large a batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_merak.cluster import Cluster
from megatron_merak.config.checks import divisors
from megatron_merak.config.parallel import P2P, SHARDINGS
from megatron_merak.config.rank_order import PIPELINE_INSIDE
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.plan import Grid, refused_together
from megatron_merak.planner.search.choice import ONE_STAGE, Choice, Layer

_LARGEST = 64  # samples of a micro-batch: larger ones gain nothing
_FEW = 8  # ranks that may share any sequence
_LEAST = (
    512  # tokens of one that each of more ranks has: with fewer a layer computes less than it sends
)
_CHUNKS = (2, 3, 4, 6, 8, 12, 16)  # stages per rank
# Schedules that place recomputations, and those that may be fastest where none does; the others
# are tried where they are pinned.
REPEATING = tuple(name for name, row in BUILDERS.items() if row.recomputes)
_FASTEST = ("1f1b", "interleaved", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Degrees:
    """How the ranks and the batch are divided.

    dp:           replicas.
    microbatches: per step and replica.
    """

    layer: Layer
    pp: int
    dp: int
    mb: int
    sp: bool
    microbatches: int

    @property
    def copies(self) -> int:
        """Ranks that have the same weights."""
        return self.layer.cp * self.dp

    def grid(self, order: str) -> Grid:
        return Grid(self.layer.tp, cp=self.layer.cp, dp=self.dp, pp=self.pp, order=order)


class Space:
    """The choices of a job.

    ranks:   of the job.
    batch:   samples per step; where it grows, all sizes, the largest last.
    pins:    fields of ``Choice`` and their values.
    memory:  whether the memory of a rank is known.
    length:  of a sequence, if ranks may share it; 0: they do not.
    experts: whether ranks may divide experts.
    halves:  whether a micro-batch may be computed in halves.
    """

    def __init__(
        self,
        ranks: int,
        batch: Sequence[int],
        cluster: Cluster,
        pins: Mapping[str, Any],
        memory: bool,
        length: int = 0,
        experts: bool = False,
        halves: bool = True,
    ):
        self.ranks = ranks
        self.batch = batch
        self.cluster = cluster
        self.pins = pins
        self.memory = memory
        self.length = length
        self.experts = experts
        self.halves = halves

    def layers(self) -> Iterator[Layer]:
        """Return how layers may be divided, over few ranks first: over tensor-parallel ranks of a
        node, or over ranks that share sequences. Experts are divided over the ranks of a layer, or
        over those of a node, of which as many may shard each expert as shard a layer.
        """
        node = min(self.cluster.ranks_per_node, self.ranks)
        shared = [cp for cp in divisors(self.ranks) if self._may_share(cp)]
        for tp in self._some("tp", [tp for tp in divisors(self.ranks) if tp <= node]):
            divided = sorted({1, tp, *([node] if node % tp == 0 else [])})
            for ep in self._some("ep", divided if self.experts else ()):
                for cp in self._some("cp", shared if tp == ep == 1 else ()):
                    for etp in self._some("etp", ()):
                        for kind in self._kinds(cp):
                            yield Layer(tp, cp, ep, etp, kind)
            both = self.experts and tp > 1 and node // tp > 1 and node % tp == 0
            if both and not {"ep", "etp"} & self.pins.keys():
                for cp in self._some("cp", ()):
                    for kind in self._kinds(cp):
                        yield Layer(tp, cp, node // tp, tp, kind)

    def _may_share(self, cp: int) -> bool:
        """Whether so many ranks may share each sequence."""
        if not self.length or self.length % cp:
            return False
        return cp <= _FEW or self.length // cp >= _LEAST

    def _kinds(self, cp: int) -> list[str]:
        """Return how ranks that share sequences may exchange: as of themselves, or in a ring."""
        return self._some("kind", ("", P2P)) if cp > 1 else [""]

    def degrees(self, layer: Layer, units: int) -> Iterator[Degrees]:
        """Return how a job whose layers are divided so can be divided. units: of the chain."""
        along = (True, False) if layer.tp > 1 else (False,)
        along = (True,) if layer.exchanges_rows and layer.tp > 1 else along
        left = self.ranks // layer.ranks
        for pp in self._some("pp", [pp for pp in divisors(left) if pp <= units]):
            if self.ranks % (layer.ranks * pp):
                continue
            dp = left // pp
            if any(size % dp for size in self.batch) or layer.cp * dp % layer.expert_copies:
                continue
            each = [size // dp for size in self.batch]
            powers = [2**power for power in range(_LARGEST.bit_length()) if 2**power <= each[-1]]
            for mb in self._some("mb", powers):
                if any(size % mb for size in each):
                    continue
                for sp in self._some("sp", along):
                    yield Degrees(layer, pp, dp, mb, sp, microbatches=each[-1] // mb)

    def choices(self, degrees: Degrees, units: int) -> Iterator[Choice]:
        """Return all choices of these degrees, in the first of their orders. units: of the chain."""
        layer = degrees.layer
        base = Choice(
            tp=layer.tp,
            cp=layer.cp,
            ep=layer.ep,
            etp=layer.etp,
            kind=layer.kind,
            pp=degrees.pp,
            mb=degrees.mb,
            sp=degrees.sp,
        )
        for recompute in self._some("recompute", self._recomputations()):
            for schedule, chunks in self._schedules(degrees, recompute, units):
                for sharding in self._some("sharding", SHARDINGS if degrees.copies > 1 else ()):
                    for overlap in self._overlaps(degrees, sharding):
                        yield replace(
                            base,
                            recompute=recompute,
                            schedule=schedule,
                            chunks=chunks,
                            sharding=sharding,
                            overlap=overlap,
                            order=self.orders(degrees)[0],
                        )

    def _some(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return the values of a field, its default if there are none; or the one that is pinned."""
        if name in self.pins:
            return [self.pins[name]]
        return list(values) or [getattr(Choice, name)]

    def _recomputations(self) -> tuple[str, ...]:
        return ("none", "selective", "capacity", "full") if self.memory else ("none",)

    def _schedules(self, degrees: Degrees, recompute: str, units: int) -> Iterator[tuple[str, int]]:
        """Return (schedule, stages per rank)."""
        names = [*_FASTEST]
        names += REPEATING if recompute not in ("none", "selective") else ()
        names = names if degrees.pp > 1 else [ONE_STAGE]
        for name in self._some("schedule", names):
            row = BUILDERS.get(name)
            if row is not None and row.chunked:
                most = units // degrees.pp
                counts = [count for count in _CHUNKS if count <= most]
            else:
                counts = [row.chunks if row is not None else 1]
            for count in self._some("chunks", counts) if counts else ():
                yield name, count

    def _overlaps(self, degrees: Degrees, sharding: str) -> list[str]:
        names = ["weight-gradient"]
        if degrees.layer.ranks > 1:
            names += ["sub-pipeline"] if degrees.mb > 1 and self.halves else []
            names += ["pair"] if degrees.microbatches > 1 else []
        allowed = [name for name in names if not refused_together(sharding, degrees.copies, name)]
        return self._some("overlap", allowed)

    def orders(self, degrees: Degrees) -> list[str]:
        """Return the orders of ranks that place groups differently on nodes, the default first."""
        differ = degrees.pp > 1 and degrees.copies > 1 and self.ranks > self.cluster.ranks_per_node
        return self._some("order", [Choice.order, *([PIPELINE_INSIDE] if differ else [])])
