"""How workers of parameter servers agree to stop early: through the job's store, since they share
no collective.
"""

import torch.distributed as dist

_SIGNAL = "signal for which the job stops"
_LAST = "last step before the job stops"


class StopRequest:
    """A request to save and end, which any rank may make and every worker looks for before a step.

    store: the job's
    """

    def __init__(self, store: dist.Store):
        self._store = store

    def make(self, number: int) -> None:
        """Ask all workers to stop for a signal; the first request counts."""
        self._store.compare_set(_SIGNAL, "", str(number))

    def number(self) -> int:
        """Return the signal for which the job stops, 0 for none."""
        # without a request there is nothing to compare with
        return int(self._store.compare_set(_SIGNAL, "0", "0"))

    def last(self, done: int) -> int:
        """Return the step after which workers that take their steps together stop.

        The first worker that asks chooses the next one: no other can have finished that without it.

        done: steps of the worker that asks
        """
        return int(self._store.compare_set(_LAST, "", str(done + 1)))
