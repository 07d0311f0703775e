"""What Slurm tells the tasks of a job step: which variables mean that ``srun`` started this process,
how many tasks its node has, and where the first one is.

A batch script, and the shell of ``salloc``, have a rank and a number of tasks as well; only a step
has a number of its own.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import LaunchError

STEP = "SLURM_STEP_ID"
RANK = "SLURM_PROCID"
SIZE = "SLURM_STEP_NUM_TASKS"
LOCAL_RANK = "SLURM_LOCALID"
TASKS_OF_NODES = "SLURM_STEP_TASKS_PER_NODE"
NODES = "SLURM_STEP_NODELIST"
NODE = "SLURM_NODEID"
JOB = "SLURM_JOB_ID"
TASK = "SLURM_TASK_PID"
TERMINAL = "SLURM_PTY_PORT"  # set by srun --pty
_PREFIX = "megatron_merak-slurm"
_OLD = 86400.0  # seconds after which no step still uses its directory
# Numbers from here on are Slurm's own steps: of the batch script, and of an interactive shell.
_FIRST_RESERVED = 0xFFFFFFF0


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is, or descends from, a task of a numbered step."""
    step = environment.get(STEP, "")
    return step.isdigit() and int(step) < _FIRST_RESERVED and {RANK, SIZE} <= environment.keys()


def check_task(environment: Mapping[str, str]) -> None:
    """Raise LaunchError in a terminal that is one of several tasks, where no other task would come."""
    tasks = environment.get(SIZE, "1")
    typed = TERMINAL in environment and environment.get(TASK) != str(os.getpid())
    if typed and tasks != "1":
        reason = "this terminal of srun --pty is one of that many tasks, and the others run no rank"
        remedy = (
            f"Open it by srun --ntasks 1 --pty, or unset {STEP}: then a process is alone, and "
            "torchrun or --nproc-per-node starts ranks"
        )
        raise LaunchError(f"environment variable {SIZE}", tasks, reason, remedy)


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on this node, 0 where unknown."""
    counts = tasks_of_nodes(environment.get(TASKS_OF_NODES, ""))
    node = environment.get(NODE, "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0


def tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks of each node, written as "4(x2),3"; nothing if it is not so."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first of a list of hosts, written as "rack[02-04,7]n[1-8],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def directory(environment: Mapping[str, str]) -> Path | None:
    """Return a directory of this step on this host, made by the first task that asks; None where
    there can be none.
    """
    counts = (JOB, "SLURM_RESTART_COUNT", STEP)
    name = ".".join(environment.get(count, "0") for count in counts)
    found = Path(tempfile.gettempdir()) / f"{_PREFIX}-{os.geteuid()}-{name}"
    try:
        found.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return None
    else:
        _remove_old(found)
    owned = found.is_dir() and found.stat().st_uid == os.geteuid()
    return found if owned else None


def _remove_old(new: Path) -> None:
    """Remove what earlier steps of this user left."""
    for other in new.parent.glob(f"{_PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < time.time() - _OLD:
                shutil.rmtree(other)
