"""Work of the device that is recorded once and repeated without Python: CUDA graphs, and on a CPU
what behaves like one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError

_FLAG = "--cuda-graph-impl"
# A result, or its size, that the host must read.
_READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # beside them
# Of these the size is known, unless a mask chooses.
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)


class Recording(Protocol):
    """Work that was recorded: whatever it read and wrote is at the same addresses in each replay,
    and what the host decided while it was recorded stays decided.
    """

    def record(self, work: Callable[[], None], known: Sequence[Tensor] = ()) -> None:
        """Record ``work``, and have it done once.

        known: tensors on the host with the same numbers in each replay.
        """

    def replay(self) -> None:
        """Do it again, on what its inputs hold by now."""


def recorder(device: torch.device) -> Callable[[], Recording]:
    """Return what makes the recordings of a device; they share memory, and must be replayed in the
    order in which they were recorded, though some may be left out.
    """
    if device.type != "cuda":
        return CallRecording
    pool = torch.cuda.graph_pool_handle()
    return lambda: GraphRecording(pool)


def enter_own_stream(device: torch.device) -> None:
    """Let this thread use a stream of its own from now on: CUDA records none but such.

    Called before the edges of any autograd graph are made. An edge to a parameter remembers the
    stream of the time when it was made, and autograd lets that stream wait for what produces the
    gradient: the default stream would be drawn into the recording, which CUDA refuses.
    """
    if device.type != "cuda" or torch.cuda.current_stream(device) != torch.cuda.default_stream(
        device
    ):
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(stream)


class GraphRecording:
    """A CUDA graph. Not `torch.cuda.graph`, which collects garbage and empties the allocator's
    cache for each of them.

    pool: memory of what is allocated while work is recorded.
    """

    def __init__(self, pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, work: Callable[[], None], known: Sequence[Tensor] = ()) -> None:
        # Other threads (watchdogs, checkpoints) may call what a recording forbids to its own.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            self._graph.capture_end()
        self._graph.replay()  # nothing has run so far

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def repeat(self) -> None:
        again = self.function(*self.args, **self.kwargs)
        for kept, value in zip(tree_leaves(self.result), tree_leaves(again), strict=True):
            # A view, or what was written in place, is where it was.
            if isinstance(kept, Tensor) and kept.data_ptr() != value.data_ptr():
                kept.copy_(value)


class CallRecording:
    """Calls of operators on a CPU, repeated on the tensors of the first time: numbers are those of a
    CUDA graph, and so are its limits. Nothing is gained but the trial.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def record(self, work: Callable[[], None], known: Sequence[Tensor] = ()) -> None:
        with _Listing(self._calls), _Reading(known):
            work()

    def replay(self) -> None:
        with torch.no_grad():
            for call in self._calls:
                call.repeat()


class _Listing(TorchDispatchMode):
    """Lists every call of an operator while it is active."""

    def __init__(self, calls: list[_Call]):
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(tag in func.tags for tag in _READ_BY_HOST) and not _by_numbers(func, args):
            raise _refused(f"{func} gives the host a number of the batch, which a graph cannot")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused(f"{func} draws random numbers, which each replay would draw again")
        result = func(*args, **(kwargs or {}))
        self._calls.append(_Call(func, args, kwargs or {}, result))
        return result


class _Reading(TorchFunctionMode):
    """Refuses what gives Python numbers past the operators. known: tensors that it may read."""

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self._known = known

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _READS and not any(args[0] is tensor for tensor in self._known):
            raise _refused(
                f"Python reads a tensor by {func.__name__}(), which a graph does not repeat"
            )
        return func(*args, **(kwargs or {}))


def _refused(reason: str) -> ConfigError:
    return ConfigError(_FLAG, "local", reason, "Leave it out")


def _by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call indexes with integers alone."""
    return func in _INDEXING and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
