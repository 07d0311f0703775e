"""What a job does when the disk is full while it saves: wait for space and save again, or end.

Every failed attempt has left earlier checkpoints as they were, and has removed what it wrote
itself. All ranks wait, and agree every second on whether to go on waiting: a signal may reach one
of them only.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_merak.errors import CheckpointError, FullDiskError
from megatron_merak.parallel.agree import broadcast_json
from megatron_merak.parallel.interruption import Interrupted

STOP = "stop"
PATIENCE = 12 * 3600.0  # seconds after which waiting ends like "stop": a night
INTERVAL = 600.0  # seconds between two lines about it
# seconds between two attempts, which double from the first to the longest
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
_LOOK = 1.0  # seconds between two exchanges of signals

Result = TypeVar("Result")


class Saving:
    """Runs what writes a checkpoint, again and again if the disk is full, and once more if its
    directory was removed.

    policy:   one of ``config.ON_FULL_DISK``.
    group:    all ranks of the job; None for a single process.
    say:      called with lines for the user, on every rank.
    received: returns a signal that this rank received and because of which waiting ends, 0 for
              none.
    setting:  the name of the policy, for messages.
    patience: seconds of waiting after which the error is raised.
    """

    def __init__(
        self,
        policy: str,
        group: dist.ProcessGroup | None,
        say: Callable[[str], object],
        received: Callable[[], int] = lambda: 0,
        setting: str = "--on-full-disk",
        patience: float = PATIENCE,
    ):
        self.policy = policy
        self.group = group
        self.say = say
        self.received = received
        self.setting = setting
        self.patience = patience
        self._told = 0.0  # when the user was told last
        self._given_up = False
        self._first = group is None or dist.get_rank(group) == 0

    def give_up(self) -> None:
        """Wait for space no longer, on any rank; called by another thread than that which
        waits.
        """
        self._given_up = True

    def run(self, directory: Path | str, write: Callable[[], Result]) -> Result:
        """Return what ``write`` returns.

        directory: in which it writes.
        write:     collective; raises the same error on every rank, and may be repeated after one.

        Raises on every rank what ``write`` raises, and Interrupted for a signal while it waits.
        """
        began: float | None = None
        pause = FIRST_PAUSE
        may_be_made = True
        while True:
            try:
                result = write()
                if began is not None:
                    self.say(
                        "there is space again: saved after a wait of "
                        f"{_minutes(time.monotonic() - began)}"
                    )
                return result
            except FullDiskError as error:
                if self.policy == STOP:
                    raise
                began = self._waited(error, began, pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except CheckpointError:
                removed = broadcast_json(not Path(directory).is_dir(), self.group, "cpu")
                if not (removed and may_be_made):
                    raise
                may_be_made = False

    def _waited(self, error: FullDiskError, began: float | None, pause: float) -> float:
        """Wait before another attempt; return when the wait for space began. Collective."""
        now = time.monotonic()
        if began is None:
            began = self._told = now
            text = (
                f"{error} Nothing is lost yet: the run waits for space and saves again by itself, "
            )
            self.say(
                text + f"for at most {_hours(self.patience)}; Ctrl-C or SIGTERM ends it "
                f"({self.setting} wait)"
            )
        elif now - self._told >= INTERVAL:
            self._told = now
            self.say(f"the run still waits for space, for {_minutes(now - began)} now: {error}")
        end = now + pause
        while True:
            number, again, over, given_up = self._agreed(
                time.monotonic() >= end, time.monotonic() - began > self.patience
            )
            if number:
                name = signal.Signals(number).name
                text = (
                    f"interrupted by {name} while it waited for space, so nothing was saved: "
                    f"{error}"
                )
                raise Interrupted(number, text)
            if given_up:
                error.reason += "; the run ends, and waits for space no longer"
                raise error
            if over:
                error.reason += f"; the run waited for space for {_hours(self.patience)}"
                raise error
            if again:
                return began
            time.sleep(_LOOK)

    def _agreed(self, again: bool, over: bool) -> tuple[int, bool, bool, bool]:
        """Return the signal that any rank received, what the first rank's clock says, and whether
        any rank gave up. Collective.
        """
        flags = torch.tensor(
            [self.received(), again and self._first, over and self._first, self._given_up],
            dtype=torch.int32,
        )
        if self.group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        number, *others = flags.tolist()
        is_again, is_over, given_up = map(bool, others)
        return number, is_again, is_over, given_up


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else _minutes(seconds)
