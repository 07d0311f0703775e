"""The ranks of a layer in one process: their engines take turns run by run, and collectives meet in
between.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_merak.runtime import engine


class Meeting:
    """What the ranks of a group gave to their collectives, by rank, in order."""

    def __init__(self, size: int):
        self.given: list[list[tuple[str, Tensor]]] = [[] for _ in range(size)]


@dataclass(frozen=True)
class Member:
    """What one rank has for a process group."""

    meeting: Meeting
    rank: int


class _Work:
    def __init__(self, member: Member, place: int, out: Tensor):
        self.member, self.place, self.out = member, place, out

    def wait(self) -> None:
        meeting = self.member.meeting
        kinds = {given[self.place][0] for given in meeting.given}
        assert len(kinds) == 1, f"the ranks' collectives differ: {kinds}"
        parts = torch.stack([given[self.place][1] for given in meeting.given])
        if kinds == {"all-gather"}:
            self.out.copy_(torch.cat([*parts], 1))
        elif kinds == {"reduce-scatter"}:
            self.out.copy_(parts.sum(0).chunk(len(parts), 1)[self.member.rank])
        elif kinds == {"exchange"}:
            self.out.copy_(parts[:, self.member.rank])
        else:
            self.out.copy_(parts if kinds == {"stack"} else parts.sum(0))


def _launch(tensor: Tensor, kind: str, group: Member, inplace: bool) -> tuple[Tensor, _Work]:
    given = group.meeting.given[group.rank]
    given.append((kind, tensor.detach().clone()))
    ranks = len(group.meeting.given)
    if kind == "exchange":
        assert len(tensor) == ranks
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    elif kind == "stack":
        out = tensor.new_empty(ranks, *tensor.shape)
    elif kind in ("all-gather", "reduce-scatter"):
        samples, length, *rest = tensor.shape
        assert kind == "all-gather" or length % ranks == 0
        out = tensor.new_empty(
            samples, length * ranks if kind == "all-gather" else length // ranks, *rest
        )
    else:
        out = (
            tensor if inplace and tensor.is_contiguous() else torch.empty_like(tensor.contiguous())
        )
    # for whoever reads it before it has arrived
    out.fill_(torch.nan if out.is_floating_point() else -1)
    return out, _Work(group, len(given) - 1, out)


def _own_gradient(grad: Tensor, kind: str, group: Member) -> Tensor:
    return grad[group.rank] if kind == "stack" else grad


class _Kept:
    """A value that is gathered again, which ranks that take turns cannot do within a turn."""

    def __init__(self, shard: Tensor, full: Tensor, group: Member):
        ranks = len(group.meeting.given)
        assert torch.equal(shard, full.chunk(ranks, 1)[group.rank]), (
            "another shard is kept than was gathered"
        )
        self.shard, self.full = shard, full.detach()

    def start(self, launch) -> None:
        pass

    def __call__(self) -> Tensor:
        return self.full


def _regathers(self, state, segment, values) -> dict[Tensor, _Kept]:
    pairs = zip(segment.ins, values, strict=True)
    return {
        value: _Kept(state.shards.pop(i.value), value, self._groups[i.axis])
        for i, value in pairs
        if i.regather
    }


@dataclass(frozen=True)
class Place:
    """A rank of a layer, and what it has for groups."""

    tp_rank: int
    cp_rank: int
    tp: Any = None
    cp: Any = None


@contextmanager
def simulated(tp: int, cp: int = 1) -> Iterator[Sequence[Place]]:
    """Inside, engines whose groups are the members given work together (see ``engine.execute``).

    Tensor-parallel ranks lie together.
    """
    of_weights = [Meeting(tp) for _ in range(cp)]
    of_sequences = [Meeting(cp) for _ in range(tp)]
    with (
        mock.patch.object(engine, "launch", _launch),
        mock.patch.object(engine, "own_gradient", _own_gradient),
        mock.patch.object(engine.Interpreter, "_regathers", _regathers),
    ):
        yield [
            Place(t, c, Member(of_weights[c], t), Member(of_sequences[t], c))
            for c in range(cp)
            for t in range(tp)
        ]
    for meeting in (*of_weights, *of_sequences):
        assert len({len(given) for given in meeting.given}) == 1, (
            "a rank took part in more collectives than another"
        )
