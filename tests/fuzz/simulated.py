"""The ranks of a layer in one process: their engines take turns run by run, and collectives meet in
between.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_merak.runtime import engine
from megatron_merak.runtime.collectives import RowCounts
from megatron_merak.segment import LayerAxis


class Meeting:
    """What the ranks of a group gave to their collectives, by rank, in order."""

    def __init__(self, size: int):
        self.given: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]


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
        if kinds == {"rows"}:
            self._take_rows()
            return
        parts = torch.stack([given[self.place][1] for given in meeting.given])
        if kinds == {"all-gather"}:
            self.out.copy_(torch.cat([*parts], 1))
        elif kinds == {"reduce-scatter"}:
            self.out.copy_(parts.sum(0).chunk(len(parts), 1)[self.member.rank])
        elif kinds == {"exchange"}:
            self.out.copy_(parts[:, self.member.rank])
        elif kinds in ({"rotation"}, {"rotation back"}):
            by = -1 if kinds == {"rotation"} else 1
            self.out.copy_(parts[(self.member.rank + by) % len(parts)])
        else:
            self.out.copy_(parts if kinds == {"stack"} else parts.sum(0))

    def _take_rows(self) -> None:
        """Take from every rank the rows that are for this one."""
        given = [each[self.place] for each in self.member.meeting.given]
        pieces = [rows.split(sent)[self.member.rank] for _, rows, sent in given]
        self.out.copy_(torch.cat(pieces))


def _exchange_rows(tensor: Tensor, counts: RowCounts, group: Member) -> tuple[Tensor, _Work]:
    given = group.meeting.given[group.rank]
    assert sum(counts.sent) == len(tensor), f"{counts.sent} of {len(tensor)} rows are sent"
    given.append(("rows", tensor.detach().clone(), counts.sent))
    out = tensor.new_full((sum(counts.got), *tensor.shape[1:]), torch.nan)
    return out, _Work(group, len(given) - 1, out)


def _launch(tensor: Tensor, kind: str, group: Member, inplace: bool) -> tuple[Tensor, _Work]:
    given = group.meeting.given[group.rank]
    given.append((kind, tensor.detach().clone()))
    ranks = len(group.meeting.given)
    if kind in ("exchange", "rotation", "rotation back"):
        assert kind != "exchange" or len(tensor) == ranks
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
        value: _Kept(state.take_shard(i.value), value, self._groups[i.axis])
        for i, value in pairs
        if self._gathers_again(segment, i)
    }


@dataclass(frozen=True)
class Place:
    """A rank of a layer, and what it has for groups."""

    tp_rank: int
    cp_rank: int
    tp: Any = None
    groups: Mapping[LayerAxis, Any] = field(default_factory=dict)

    @property
    def without_experts(self) -> dict[LayerAxis, Any]:
        return {axis: group for axis, group in self.groups.items() if axis is not LayerAxis.EP}


@contextmanager
def simulated(tp: int, cp: int = 1, inner: int = 1) -> Iterator[Sequence[Place]]:
    """Inside, engines whose groups are the members given work together (see ``engine.execute``).

    Tensor-parallel ranks lie together; all ranks exchange rows of experts. Of context-parallel ranks
    ``inner`` neighbours are a group, and those at the same place of each.
    """
    of_experts = Meeting(tp * cp)
    of_weights = [Meeting(tp) for _ in range(cp)]
    of_sequences = [Meeting(cp) for _ in range(tp)]
    of_neighbours = [[Meeting(inner) for _ in range(cp // inner)] for _ in range(tp)]
    of_rings = [[Meeting(cp // inner) for _ in range(inner)] for _ in range(tp)]
    with (
        mock.patch.object(engine, "launch", _launch),
        mock.patch.object(engine, "exchange_rows", _exchange_rows),
        mock.patch.object(engine, "own_gradient", _own_gradient),
        mock.patch.object(engine.Interpreter, "_regathers", _regathers),
    ):
        yield [
            Place(
                t,
                c,
                Member(of_weights[c], t),
                {
                    LayerAxis.CP: Member(of_sequences[t], c),
                    LayerAxis.INNER: Member(of_neighbours[t][c // inner], c % inner),
                    LayerAxis.OUTER: Member(of_rings[t][c % inner], c // inner),
                    LayerAxis.EP: Member(of_experts, c * tp + t),
                },
            )
            for c in range(cp)
            for t in range(tp)
        ]
    levels = (meeting for each in (*of_neighbours, *of_rings) for meeting in each)
    for meeting in (*of_weights, *of_sequences, of_experts, *levels):
        assert len({len(given) for given in meeting.given}) == 1, (
            "a rank took part in more collectives than another"
        )
