"""Checkpoints that are written while training goes on, one at a time.

    staged = staging.copies(kinds, group, device)   while training waits: what this rank writes, into memory of its own
    behind.start(write)                             writes them, in a thread
    behind.finish()                                 waits for it, and raises what it raised

The thread has a process group of its own: its collectives are in an order of their own. What it
writes becomes a checkpoint as any other does, by the manifest that comes last; a run that ends
before leaves an unfinished directory, as a run that is killed while it saves.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from .shard import Shard, StateKind, Turn, in_turns

_LOOK = 1.0  # seconds between two looks for what the thread says


class Staging:
    """Memory on the host, as large as what this rank writes, that all saves use.

    device: of the state; copies from a GPU are to pinned memory.
    """

    def __init__(self, device: torch.device):
        self._pinned = device.type == "cuda"
        self._buffers: dict[tuple[str, int, str], torch.Tensor] = {}

    def copies(
        self,
        kinds: Mapping[str, StateKind],
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> dict[str, StateKind]:
        """Return copies of what this rank writes, which stay until the next call. Collective.

        group, device: as for ``store.save``.
        """
        turns: dict[str, list[Turn]] = {name: [] for name in kinds}
        for name, number, turn in in_turns(kinds, group, device):
            if number < len(kinds[name].turns):
                parts = [part for part in turn.shards if part.is_written]
                turns[name].append(Turn([self._copy(name, number, part) for part in parts]))
        self._arrive()
        return {name: StateKind(copied) for name, copied in turns.items()}

    def fetched(self, kind: str, shards: Sequence[Shard]) -> list[Shard]:
        """Return copies of those of ``shards`` that this rank writes, each after its ``fetch``,
        which stay until the next call. Collective over ranks that have the same shards.

        kind: under which the memory is kept; not one of ``copies``.
        """
        found = []
        for part in shards:
            if part.fetch is not None:
                part.fetch()
            if part.is_written:
                found.append(self._copy(kind, 0, part))
        self._arrive()
        return found

    def _arrive(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def _copy(self, kind: str, number: int, part: Shard) -> Shard:
        key = kind, number, part.name
        tensor = part.tensor.detach()
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
            self._buffers[key] = buffer
        buffer.copy_(tensor, non_blocking=self._pinned)
        return replace(part, tensor=buffer, fetch=None)


class Behind:
    """Runs what writes checkpoints behind training; a context that ends when the last one is
    written.

    give_up: called where the context is left by an exception: what is under way should wait for
             nothing any more.
    tell:    called every second while somebody waits: prints ``lines``.
    """

    def __init__(
        self,
        give_up: Callable[[], object] = lambda: None,
        tell: Callable[[], object] = lambda: None,
    ):
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # from the thread, for the user
        self._give_up = give_up
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], Path]) -> None:
        """Call ``write`` in a thread, where none is under way."""
        assert self._thread is None, "one at a time: finish the one before"
        self._error = None
        self._thread = threading.Thread(target=self._run, args=[write], name="merak-save")
        self._thread.start()

    @property
    def succeeded(self) -> bool:
        """Whether what was started is written, without an error; nothing was started: True."""
        thread = self._thread
        return thread is None or not thread.is_alive() and self._error is None

    def finish(self) -> None:
        """Wait until what was started is written; raise what it raised, on every rank alike."""
        if self._thread is None:
            return
        while self._thread.is_alive():  # for hours, where it waits for space
            self._thread.join(_LOOK)
            self._tell()
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            write()
        except BaseException as error:  # Interrupted too: whoever waits raises it
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
            return
        self._give_up()
        try:
            self.finish()
        except (Exception, SystemExit) as second:
            error.add_note(f"The checkpoint that was being written was not completed: {second}")
