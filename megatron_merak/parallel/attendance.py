"""Checks calls that every rank must make: reports a rank that waits for others, and raises if
ranks' calls differ.
"""

import sys
import threading

import torch.distributed as dist

from ..errors import ConfigError
from .agree import gather_json

PATIENCE = 30.0  # seconds


def attend(call: str, group: dist.ProcessGroup | None, patience: float = PATIENCE) -> None:
    """Wait until every rank of ``group`` makes the same call.

    Collective. Raises ConfigError on every rank when ranks make different calls.

    call:     its name, for messages.
    group:    all ranks; None for a single process.
    patience: seconds after which a waiting rank reports on stderr what it waits for.
    """
    if group is None:
        return
    rank = dist.get_rank(group)
    text = (
        f"rank {rank} has waited {patience:.0f} s in {call} for ranks that did not call it: "
        "every rank has to\n"
    )
    timer = threading.Timer(patience, lambda: (sys.stderr.write(text), sys.stderr.flush()))
    timer.daemon = True
    timer.start()
    try:
        calls = gather_json(call, group, "cpu")
    finally:
        timer.cancel()
    for other, other_call in enumerate(calls):
        if other_call != calls[0]:
            reason = f"rank 0 is in {calls[0]}, and both need all ranks"
            remedy = (
                "Call it on every rank: not behind is_world_process_zero(), local_rank or a "
                "rank's own condition"
            )
            raise ConfigError(f"rank {other}", other_call, reason, remedy)
