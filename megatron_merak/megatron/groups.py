"""The process groups of a rank under the names of Megatron-LM's ``parallel_state``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..config.rank_order import DEFAULT
from ..errors import LaunchError
from ..plan import Grid

# The group of each name, as axes of the grid of ranks; those of experts are of a grid of their own,
# on which expert parallelism (ep) has the place of context parallelism.
DENSE = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "dp-cp": "cp-dp",
    "cp": "cp",
    "mp": "tp-pp",
    "tp-cp": "tp-cp",
    "tp-dp": "tp-dp",
    "tp-dp-cp": "tp-cp-dp",
}
EXPERT = {
    "ep": "cp",
    "etp": "tp",
    "tp-ep": "tp-cp",
    "tp-ep-pp": "tp-cp-pp",
    "expert-dp": "dp",
}
EMBEDDING = "embedding"
POSITIONS = "position embedding"
Members = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Membership:
    """A process group of this rank and its members, ascending."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Grids:
    """How a job's ranks are numbered: outside experts, and among them.

    experts: with the expert-parallel ranks in the place of context-parallel ones.
    """

    dense: Grid
    experts: Grid


@dataclass(frozen=True)
class Groups:
    """What a rank knows of its groups.

    named:  the groups that this rank is in, by name.
    host:   the data-parallel groups once more, over a backend for CPU tensors, by name.
    """

    grids: Grids
    named: dict[str, Membership]
    host: dict[str, Membership]


def grids(
    size: int,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    order: str = DEFAULT,
) -> Grids:
    """Return how ``size`` ranks are numbered, as Megatron-LM numbers them. Raises LaunchError where
    they do not divide.

    etp:   tensor-parallel ranks of an expert; None: as elsewhere.
    order: of the axes tp, cp, ep, dp and pp, the first varying fastest.
    """
    etp = tp if etp is None else etp
    axes = order.lower().split("-")
    dense_axes = [axis for axis in axes if axis != "ep"]
    expert_axes = ["cp" if axis == "ep" else axis for axis in axes if axis != "cp"]
    if ep > 1 and "ep" not in axes:
        raise LaunchError("order", order, f"there are {ep} expert-parallel ranks", "Name ep in it")
    dense = _grid(size, tp, cp, pp, names="tp x cp x pp", order="-".join(dense_axes))
    experts = _grid(size, etp, ep, pp, names="etp x ep x pp", order="-".join(expert_axes))
    if dense.groups("pp") != experts.groups("pp"):
        reason = "experts would be on the ranks of other stages"
        raise LaunchError("order", order, reason, "Place pp last")
    return Grids(dense, experts)


def _grid(size: int, tp: int, cp: int, pp: int, names: str, order: str) -> Grid:
    ranks = tp * cp * pp
    if size % ranks:
        reason = f"{names} is {ranks}, which does not divide it"
        raise LaunchError("number of ranks", size, reason, f"Use a multiple of {ranks}")
    return Grid(tp=tp, cp=cp, dp=size // ranks, pp=pp, order=order)


def first_and_last(stages: list[int]) -> list[int]:
    """The ranks of a pipeline that have the embedding: the first, and the last, whose head may be
    tied to it.
    """
    return [stages[0]] if len(stages) == 1 else [stages[0], stages[-1]]


def first(stages: list[int]) -> list[int]:
    """The ranks of a pipeline that have the embedding of positions: the first."""
    return [stages[0]]


def make_groups(
    numbered: Grids,
    rank: int,
    timeout: timedelta | None,
    embedding: Members = first_and_last,
    positions: Members = first,
    host: bool = True,
) -> Groups:
    """Make the groups of all ranks, and return those of ``rank``. Collective.

    embedding: of the ranks of a pipeline, those that have the embedding.
    positions: likewise, of the embedding of positions.
    host:      whether data-parallel ranks have a group for CPU tensors too.
    """
    maker = _Maker(rank, timeout)
    named = {}
    for name, axes in DENSE.items():
        named[name] = maker.own(numbered.dense.groups(axes))
    pipelines = numbered.dense.groups("pp")
    named[EMBEDDING] = maker.own([embedding(stages) for stages in pipelines])
    named[POSITIONS] = maker.own([positions(stages) for stages in pipelines])
    for name, axes in EXPERT.items():
        named[name] = maker.own(numbered.experts.groups(axes))
    on_host = {}
    if host:
        backend = None if dist.get_backend() == "gloo" else "gloo"
        hosts = maker if backend is None else _Maker(rank, timeout, backend)
        on_host["dp"] = hosts.own(numbered.dense.groups("dp"))
        on_host["dp-cp"] = hosts.own(numbered.dense.groups("cp-dp"))
        on_host["expert-dp"] = hosts.own(numbered.experts.groups("dp"))
    return Groups(
        grids=numbered,
        named={name: group for name, group in named.items() if group},
        host={name: group for name, group in on_host.items() if group},
    )


class _Maker:
    """Makes process groups, each once, whatever it is called."""

    def __init__(self, rank: int, timeout: timedelta | None, backend: str | None = None):
        self.rank = rank
        self.timeout = timeout
        self.backend = backend
        self._made: dict[tuple[int, ...], Membership] = {}

    def own(self, members: Iterable[Sequence[int]]) -> Membership | None:
        """Make a group of each list of ranks; return that of this rank, None where no list has it.
        Collective.
        """
        own = None
        for ranks in members:
            key = tuple(sorted(ranks))
            if key not in self._made:
                group = dist.new_group(list(key), timeout=self.timeout, backend=self.backend)
                self._made[key] = Membership(group, key)
            if self.rank in key:
                own = self._made[key]
        return own
