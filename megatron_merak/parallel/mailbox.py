"""Messages between ranks of a host by the copy engine: the sender copies them into memory of the
receiver.

    sender's own stream      wait for a free slot | copy into it | raise put
    receiver, when it waits  wait for put | copy out | raise taken

A message is split over as many slots as it fills. A receive enqueues nothing on any stream before
the caller waits for it; messages that arrive earlier stay in the slots. For the counters see
csrc/kernels/mailbox.cuh.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import gather_json
from .peer_buffers import PeerBuffers
from .peer_kernels import PATIENCE, PeerKernels, check
from .work import FinishedByWaiting

logger = logging.getLogger(__name__)

SLOTS = 8
SLOT_BYTES = 4 << 20
_MOST_BYTES = 256 << 20  # of a slot
_LINE = 128  # bytes reserved for a counter, a full cache line

Channel = tuple[int, int, Hashable]
"""Source, destination (ranks of the group), and an identifier among the channels between
the two.
"""


class Shape(NamedTuple):
    """The number of slots of a channel, and their size in bytes."""

    slots: int = SLOTS
    size: int = SLOT_BYTES

    @classmethod
    def of(cls, message: int) -> "Shape":
        """Return the shape for messages of so many bytes: one that is larger than a slot would take
        three launches at each end for every slot that it fills, so that there are two such slots.
        """
        if message <= SLOT_BYTES:
            return cls()
        return cls(2, min(message + -message % _LINE, _MOST_BYTES))


def places(channels: Sequence[Channel], rank: int, shape: Shape) -> tuple[dict[Channel, int], int]:
    """Return the offset of each channel in a rank's buffer, and the size of the buffer in bytes.

    A destination has the counter of written slots and the slots, a source the counter of slots that
    were read.
    """
    offsets = {}
    end = 0
    for channel in channels:
        source, destination, _ = channel
        if rank in (source, destination):
            offsets[channel] = end
            end += _LINE + (shape.slots * shape.size if rank == destination else 0)
    return offsets, end


def copy(to: Tensor, tensor: Tensor) -> None:
    """Copy dense bytes between any devices on the current stream; the copy engine does it."""
    to.copy_(tensor, non_blocking=True)


class Machine(NamedTuple):
    """The operations on streams.

    kernels:  to raise and await counters.
    patience: seconds to wait for the other rank before a launch fails.
    api:      the module with Stream, Event, stream and current_stream.
    copy:     (to, from): copies on the current stream.
    """

    kernels: PeerKernels
    patience: float = PATIENCE
    api: Any = torch.cuda
    copy: Callable[[Tensor, Tensor], None] = copy


class Ends:
    """One rank's ends of all channels that it is part of.

    buffers: of all ranks of the group, uint8, of the size given by ``places``, initially zero.
    machine: the operations on streams.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        buffers: Sequence[Tensor],
        machine: Machine,
        shape: Shape | None = None,
    ):
        shape = shape or Shape()
        parts = [places(channels, each, shape)[0] for each in range(len(buffers))]

        def part(owner: int, channel: Channel) -> Tensor:
            return buffers[owner][parts[owner][channel] :]

        self._outboxes: dict[Channel, _Outbox] = {}
        self._inboxes: dict[Channel, _Inbox] = {}
        for channel in channels:
            source, destination, _ = channel
            if rank == source:
                inbox = part(destination, channel)
                self._outboxes[channel] = _Outbox(inbox, part(source, channel), machine, shape)
            elif rank == destination:
                inbox = part(destination, channel)
                self._inboxes[channel] = _Inbox(inbox, part(source, channel), machine, shape)

    def send(self, channel: Channel, tensor: Tensor) -> FinishedByWaiting:
        """Start to send a dense tensor, which must not change until the work was waited for."""
        return self._outboxes[channel].send(tensor)

    def receive(self, channel: Channel, tensor: Tensor) -> FinishedByWaiting:
        """Post the receive of the channel's next message into a dense tensor of the same size in
        bytes.
        """
        return self._inboxes[channel].receive(tensor)


def open_mailboxes(
    channels: Sequence[Channel],
    group: dist.ProcessGroup,
    control: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta | None = None,
    message: int = 0,
) -> Ends | None:
    """Return this rank's ends of the channels of ``group``; None where ranks share no memory, which
    is logged.

    Collective over ``control``, a gloo group that contains several such groups: all of them have
    mailboxes, or none.

    message: bytes of the largest one that is usual; 0: not known.
    """
    shape = Shape.of(message)
    nbytes = max(places(channels, rank, shape)[1] for rank in range(group.size()))
    buffers = PeerBuffers(group, device, lambda _: nbytes)
    if reason := next(filter(None, gather_json(buffers.reason, control, "cpu")), ""):
        logger.info("messages by the process group, not by the copy engine: %s", reason)
        return None
    patience = PATIENCE if timeout is None else timeout.total_seconds()
    assert buffers.kernels is not None, "without them there is a reason"
    machine = Machine(buffers.kernels, patience)
    return Ends(channels, group.rank(), buffers.tensors, machine, shape)


class _MailboxEnd:
    """The common part of both ends: the slots, the counter raised by this end, and the one raised
    by the other.
    """

    def __init__(
        self, inbox: Tensor, awaited: Tensor, raised: Tensor, machine: Machine, shape: Shape
    ):
        self.slots = inbox[_LINE : _LINE + shape.slots * shape.size].view(shape.slots, shape.size)
        self.awaited = awaited
        self.raised = raised
        self.shape = shape
        self.kernels, self.patience, self.api, self.copy = machine
        self.count = 0  # slots that this end has written or read

    def pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        flat = tensor.detach().view(-1).view(torch.uint8)
        return flat.split(self.shape.size) if flat.numel() else ()

    def slot(self, piece: Tensor) -> Tensor:
        return self.slots[self.count % self.shape.slots, : piece.numel()]

    def wait_for(self, count: int, stream: Any) -> None:
        pointer = self.awaited.data_ptr()
        check(
            "await_counter",
            self.kernels.await_counter(pointer, count, self.patience, stream.cuda_stream),
        )

    def count_up(self, stream: Any) -> None:
        self.count += 1
        check(
            "raise_counter",
            self.kernels.raise_counter(self.raised.data_ptr(), self.count, stream.cuda_stream),
        )


class _Outbox(_MailboxEnd):
    def __init__(self, inbox: Tensor, taken: Tensor, machine: Machine, shape: Shape):
        super().__init__(inbox, taken, inbox, machine, shape)
        self.stream = self.api.Stream()

    def send(self, tensor: Tensor) -> "MailboxSend":
        ready = self.api.Event()
        done = self.api.Event()
        ready.record(self.api.current_stream())
        with self.api.stream(self.stream):
            self.stream.wait_event(ready)
            for piece in self.pieces(tensor):
                if self.count >= self.shape.slots:
                    self.wait_for(self.count + 1 - self.shape.slots, self.stream)
                self.copy(self.slot(piece), piece)
                self.count_up(self.stream)
            done.record(self.stream)
        tensor.record_stream(self.stream)
        return MailboxSend([tensor], done, self.api)


class _Inbox(_MailboxEnd):
    def __init__(self, inbox: Tensor, taken: Tensor, machine: Machine, shape: Shape):
        super().__init__(inbox, inbox, taken, machine, shape)
        self.announced: deque[Received] = deque()
        self.last: Any = None  # the event of the last message read, perhaps on another stream

    def receive(self, tensor: Tensor) -> "Received":
        ready = self.api.Event()
        ready.record(self.api.current_stream())
        self.announced.append(Received([tensor], self, ready))
        return self.announced[-1]

    def take(self, last: "Received") -> None:
        """Read messages in order, up to that of ``last``."""
        while last.done is None:
            message = self.announced.popleft()
            stream = self.api.current_stream()
            # the tensor may still be in use on the stream that posted the receive
            stream.wait_event(message.ready)
            if self.last is not None:
                stream.wait_event(self.last)
            for piece in self.pieces(tensor := message.outputs[0]):
                self.wait_for(self.count + 1, stream)
                self.copy(piece, self.slot(piece))
                self.count_up(stream)
            tensor.record_stream(stream)
            done = self.api.Event()
            done.record(stream)
            message.done = self.last = done


class MailboxSend(FinishedByWaiting):
    """The work of a send."""

    def __init__(self, outputs: list[Tensor], done: Any, api: Any):
        super().__init__(outputs)
        self._done = done
        self._api = api

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait until the tensor may be modified."""
        self._api.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def is_success(self) -> bool:
        return self.is_completed()


class Received(FinishedByWaiting):
    """The work of a receive. ``done``: an event, None before the message was read from its
    mailbox.
    """

    def __init__(self, outputs: list[Tensor], inbox: _Inbox, ready: Any):
        super().__init__(outputs)
        self.ready = ready
        self.done = None
        self._inbox = inbox

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the message; receives posted before it are completed,
        too.
        """
        self._inbox.take(self)
        self._inbox.api.current_stream().wait_event(self.done)
        return True

    def is_completed(self) -> bool:
        return self.done is not None and self.done.query()

    def is_success(self) -> bool:
        return self.is_completed()
