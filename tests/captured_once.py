"""Captures that several runs of one process share: a run of a small model takes two thirds of its
time for them.

Only for models that are the same if their printed modules, their configs and their parameters are.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.lengths import Lengths
from megatron_merak.stages.traced import Traced, shapes_of


class Captures:
    """What the runs of this process have captured."""

    def __init__(self) -> None:
        self.made = self.again = 0
        self._graphs: dict[Hashable, Captured] = {}
        self._lengths: dict[Hashable, Lengths | None] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Capture nothing again that was captured in such a context before."""
        capture = Traced.capture
        lengths = Traced.lengths

        def capture_once(traced, batch, training, outputs, compute=None):
            key = self._key(traced, batch, training, outputs, compute)
            if key in self._graphs:
                self.again += 1
                traced._share(self._graphs[key])
            else:
                self.made += 1
                self._graphs[key] = capture(traced, batch, training, outputs, compute)
            return self._graphs[key]

        def lengths_once(traced, batch, training, outputs, compute, axes, like, length):
            own = self._key(traced, batch, training, outputs, compute)
            key = own, tuple(axes), like, length
            if key not in self._lengths:
                self._lengths[key] = lengths(
                    traced, batch, training, outputs, compute, axes=axes, like=like, length=length
                )
            return self._lengths[key]

        with (
            mock.patch.object(Traced, "capture", capture_once),
            mock.patch.object(Traced, "lengths", lengths_once),
        ):
            yield

    @staticmethod
    def _key(traced, batch, training, outputs, compute) -> Hashable:
        model = traced.model
        parameters = [
            (name, tuple(p.shape), p.dtype, traced._trains.get(name, p.requires_grad))
            for name, p in model.named_parameters()
        ]
        return (
            repr(model),
            repr(getattr(model, "config", None)),
            tuple(parameters),
            repr(traced._cast),
            traced._loss,
            shapes_of(batch),
            training,
            tuple(outputs),
            compute,
        )
