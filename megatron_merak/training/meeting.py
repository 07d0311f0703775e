"""How the ranks of a job meet, whichever door asks for it: they run the same software, were told
the same, and find hosts and links sound where that is to be looked at.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from ..parallel.agree import gather_json
from ..parallel.launch import World
from ..parallel.ranks import Ranks, meet
from ..preflight.stage import passed
from .same_files import check_same_files


def meeting(
    world: World,
    timeout: timedelta,
    settings: Mapping[str, Any],
    files: Mapping[str, str],
    *,
    remedy: str,
    say: Callable[[str], object],
    preflight: str | None = None,
    call: str | None = None,
) -> Ranks:
    """Return the ranks of a job, which have the same settings and files. Collective over all ranks.

    timeout:   of collectives.
    settings:  all that must be equal on every rank, JSON-safe, by the flag or argument.
    files:     paths by the setting that names them; every host may have its own copy.
    remedy:    for settings that differ.
    say:       called on the first rank with a line for the user.
    preflight: the directory that the job saves to, or "" for none: hosts and links are looked at;
               None: they are not.
    call:      see ``meet``.

    Raises LaunchError and ConfigError on every rank.
    """
    ranks = meet(world, timeout, call)
    check_same_settings(settings, ranks.control, remedy)
    check_same_files(files, ranks.control)
    if preflight is not None:
        told = passed(ranks, preflight)
        if ranks.rank == 0:
            say(told)
    return ranks


def check_same_settings(
    settings: Mapping[str, Any], control: dist.ProcessGroup | None, remedy: str
) -> None:
    """Raise ConfigError on every rank for the first setting that differs from the first rank's.

    See ``meeting``; control: all ranks.
    """
    first, *others = gather_json(settings, control, "cpu")
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                reason = f"rank {rank} has it, rank 0 has {first[name]}"
                raise ConfigError(name, value, reason, remedy)
