"""Transfers between pipeline stages: pre-posted and non-blocking, matched by tag or by order."""

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.backends import of_group
from ..pipeline_parallel.ops import RECEIVES, Kind, Op, Schedule, ops_of
from .mailbox import Ends, open_mailboxes
from .mesh import Mesh, new_groups
from .peer_group import NAME as PEER_MEMORY

MOST_VALUES = 64  # maximum number of values of one transfer


class Route(NamedTuple):
    """The group, peer (a rank of the group) and tag of a message."""

    group: dist.ProcessGroup
    peer: int
    tag: int


class Pipes:
    """One rank's ends of all transfers of a schedule (with communication ops).

    gloo, and the backends built on it, match messages by tag inside the pipeline group. Other
    backends match by order only, so there each channel (source, destination, direction) has its own
    group, and on CUDA its own stream: no transfer waits for one of another channel. With the
    peer-memory backend each channel has a mailbox where possible.

    message: bytes of the largest value that is usual; 0: not known.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, message: int = 0):
        self.mesh = mesh
        self.schedule = schedule
        backend = None if mesh.pp is None else dist.get_backend(mesh.pp)
        row = None if backend is None else of_group(backend)
        self._by_tag = row is not None and row.by_tag
        self._mailboxes: Ends | None = None
        self._groups: dict[tuple[int, int, Kind], dist.ProcessGroup | None] = {}
        # cached: every step needs them between kernels
        self._routes: dict[tuple[Op, int], Route] = {}
        if backend == PEER_MEMORY and mesh.pp is not None and mesh.control is not None:
            self._mailboxes = open_mailboxes(
                self._channels(),
                mesh.pp,
                mesh.control,
                mesh.device,
                timeout=mesh.timeout,
                message=message,
            )
        if backend is not None and not self._by_tag and self._mailboxes is None:
            self._make_groups()
        self._sent: dict[tuple[Op, int], tuple[dist.Work, Tensor]] = {}

    def _channels(self) -> list[tuple[int, int, Kind]]:
        transfers = [
            op
            for entry in self.schedule.entries()
            for op in ops_of(entry)
            if not op.kind.is_compute
        ]
        return sorted({self.schedule.channel(op) for op in transfers})

    def _make_groups(self) -> None:
        for source, destination, kind in self._channels():
            replicas = self.mesh.grid.groups("pp")
            members = [[ranks[source], ranks[destination]] for ranks in replicas]
            self._groups[source, destination, kind] = new_groups(
                self.mesh.rank, members, self.mesh.timeout, "channel"
            )

    def _route(self, op: Op, index: int) -> Route:
        if (op, index) not in self._routes:
            self._routes[op, index] = self._find_route(op, index)
        return self._routes[op, index]

    def _find_route(self, op: Op, index: int) -> Route:
        source, destination, kind = channel = self.schedule.channel(op)
        group = self.mesh.pp if self._by_tag else self._groups[channel]
        assert group is not None, "messages are between ranks"
        other = self.mesh.peer(source if op.kind in RECEIVES else destination)
        peer = dist.get_group_rank(group, other)
        if not self._by_tag:
            return Route(group, peer, 0)
        stage = op.stage if op.kind not in RECEIVES else op.counterpart().stage
        assert index < MOST_VALUES, f"{op} carries more than {MOST_VALUES} values"
        tag = (
            MOST_VALUES
            * (2 * (op.microbatch * self.schedule.stages + stage) + (kind is Kind.SEND_B))
            + index
        )
        return Route(group, peer, tag)

    def send(self, op: Op, tensor: Tensor, index: int = 0) -> None:
        """Start to send the ``index``-th value of an op; the tensor must not change until it has
        ``arrived``, or until ``finish``.
        """
        tensor = tensor.contiguous()
        work: dist.Work | None
        if self._mailboxes:
            work = self._mailboxes.send(self.schedule.channel(op), tensor)
        else:
            route = self._route(op, index)
            work = dist.isend(tensor, group=route.group, group_dst=route.peer, tag=route.tag)
        for key in [key for key, (sent, _) in self._sent.items() if sent.is_completed()]:
            del self._sent[key]
        assert work is not None, "this rank is in the group"
        self._sent[op, index] = work, tensor

    def arrived(self, ops: Collection[Op]) -> None:
        """Free what was sent by ``ops``, which the receivers have read: gloo does not say that a
        send is over before it is waited for.
        """
        for key in [key for key in self._sent if key[0] in ops]:
            work, _ = self._sent.pop(key)
            work.wait()

    def receive(
        self, op: Op, shape: tuple[int, ...], dtype: torch.dtype, index: int = 0
    ) -> tuple[Tensor, dist.Work]:
        """Post the receive of an op's ``index``-th value; the tensor is valid after waiting for the
        work.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        if self._mailboxes:
            return tensor, self._mailboxes.receive(self.schedule.channel(op), tensor)
        route = self._route(op, index)
        work = dist.irecv(tensor, group=route.group, group_src=route.peer, tag=route.tag)
        assert work is not None, "this rank is in the group"
        return tensor, work

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()
