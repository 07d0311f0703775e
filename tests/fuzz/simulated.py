"""Tensor-parallel ranks in one process: their engines take turns run by run, and collectives meet in between."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        self.out.copy_(parts if kinds == {"stack"} else parts.sum(0))


def _launch(tensor: Tensor, kind: str, group: Member, inplace: bool) -> tuple[Tensor, _Work]:
    given = group.meeting.given[group.rank]
    given.append((kind, tensor.detach().clone()))
    if kind == "stack":
        out = tensor.new_empty(len(group.meeting.given), *tensor.shape)
    else:
        out = tensor if inplace and tensor.is_contiguous() else torch.empty_like(tensor.contiguous())
    out.fill_(torch.nan if out.is_floating_point() else -1)  # for whoever reads it before it has arrived
    return out, _Work(group, len(given) - 1, out)


def _own_gradient(grad: Tensor, kind: str, group: Member) -> Tensor:
    return grad[group.rank] if kind == "stack" else grad


@contextmanager
def simulated(size: int) -> Iterator[Sequence[Member]]:
    """Inside, engines whose groups are the members given work together (see ``engine.execute``)."""
    meeting = Meeting(size)
    with mock.patch.object(engine, "launch", _launch), mock.patch.object(engine, "own_gradient", _own_gradient):
        yield [Member(meeting, rank) for rank in range(size)]
    assert len({len(given) for given in meeting.given}) == 1, "a rank took part in more collectives than another"
