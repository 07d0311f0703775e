"""What is in flight: the handle of an asynchronous collective or copy, torch's own or one of
several steps.
"""

from typing import Protocol


class Work(Protocol):
    """The handle of an asynchronous collective or copy; wait for it exactly once."""

    def wait(self) -> object:
        """Block until the result is valid (on CUDA: for work on the current stream)."""


class Done:
    """The handle of what has already completed."""

    def wait(self) -> None:
        pass
