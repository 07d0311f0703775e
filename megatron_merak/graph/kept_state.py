"""The size of the optimizer state of a unit's parameters, where it differs between parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .capture.captured import Captured

# (name, shape) of a parameter -> bytes of optimizer state per element.
StateOf = Callable[[str, tuple[int, ...]], float]


def kept_state(
    own: Iterable[str],
    shared: Iterable[str],
    sizes: Mapping[str, int],
    captured: Captured,
    state_of: StateOf | None,
) -> dict[str, Any]:
    """Return the ``Unit`` fields for the optimizer state of its trained parameters; empty if
    ``state_of`` is None.

    own, shared: names of its own parameters, and of those that an earlier unit uses too.
    sizes:       name -> number of elements on this rank.
    """
    if state_of is None:
        return {}
    trained = [name for name in own if name in captured.trainable]
    state_bytes = sum(sizes[name] * state_of(name, captured.shapes[name]) for name in trained)
    numel = sum(sizes[name] for name in trained)
    tied = (
        (name, state_of(name, captured.shapes[name]))
        for name in shared
        if name in captured.trainable
    )
    return {"state_bytes": state_bytes / numel if numel else None, "tied_state_bytes": tuple(tied)}
