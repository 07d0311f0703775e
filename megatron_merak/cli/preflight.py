"""Let every rank of a job meet every other, before a job does: messages and collectives, matrix
products, clocks, versions, and the directory of checkpoints; and say which host or link is slow.

    merak-preflight --nproc-per-node 8 --save DIRECTORY     eight ranks of this host
    srun -N 4 --ntasks-per-node 8 merak-preflight --save DIRECTORY
    torchrun --nnodes 4 --nproc-per-node 8 ... -m megatron_merak preflight --save DIRECTORY
    merak-launch --nproc-per-node 8 preflight --json FILE

Start it as the job will be started. The exit status is 1 if something is wrong; each finding is a line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import durable
from ..counting import counted
from ..errors import ConfigError
from .door import command
from .measuring import check_ranks, measured, measuring, measuring_parser

if TYPE_CHECKING:
    from ..errors import LaunchError
    from ..preflight.findings import Findings

_PATIENCE = 120  # seconds


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    backend = "backend of the messages and collectives (default: auto, nccl on GPUs, else gloo)"
    parser = measuring_parser(__doc__ or "", "merak-preflight", backend)
    parser.add_argument(
        "--save", default="", metavar="DIRECTORY", help="the directory that a job will save to"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was measured")
    parser.add_argument(
        "--timeout",
        type=int,
        default=_PATIENCE,
        metavar="SECONDS",
        help=f"how long to wait for ranks that do not come or do not answer (default: {_PATIENCE})",
    )
    parser.add_argument(
        "--least-bandwidth",
        type=float,
        default=0.05,
        metavar="GB/S",
        help="what a link between hosts has to reach, in either direction (default: 0.05)",
    )
    return parser.parse_args(words)


def _checked(words: Sequence[str]) -> argparse.Namespace:
    """Return what the flags say; raise ConfigError for numbers that cannot be."""
    options = _arguments(words)
    check_ranks(options.nproc_per_node)
    if options.timeout < 1:
        raise ConfigError("--timeout", options.timeout, "it is below 1", "Use at least 1 second")
    if not 0 <= options.least_bandwidth < float("inf"):
        value = options.least_bandwidth
        raise ConfigError("--least-bandwidth", value, "it is no bandwidth", "Use 0 or more")
    return options


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-preflight; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return measured("preflight", words, _checked, _looked)


def _looked(options: argparse.Namespace) -> int:
    """The part of one rank."""
    from ..preflight.judge import judge
    from ..preflight.look import look

    least = options.least_bandwidth * 1e9
    with measuring("preflight", options.distributed_backend, options.timeout) as ranks:
        found = look(
            ranks.world,
            ranks.control,
            ranks.nodes,
            options.save,
            least_rate=least,
            say=ranks.progress,
        )
        ranks.progress.done()
        problems = judge(found, least)
        if ranks.world.rank == 0:
            _show(found, problems)
            if options.json:
                _write(found, problems, Path(options.json))
    return int(bool(problems))


def _show(found: "Findings", problems: "list[LaunchError]") -> None:
    from ..preflight.table import table

    print(table(found))
    print()
    for problem in problems:
        print(problem)
    hosts = counted(len(found.host_names), "host")
    ranks = counted(len(found.ranks), "rank")
    print(
        f"{ranks} on {hosts}: {counted(len(problems), 'problem') if problems else 'nothing is wrong'}"
    )


def _write(found: "Findings", problems: "list[LaunchError]", path: Path) -> None:
    values = found.to_json() | {"problems": [str(problem) for problem in problems]}
    with durable.replaced(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())
