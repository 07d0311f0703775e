"""Measure what this machine reaches, for plans: matrix products by shape, attention, memory-bound
passes, and between ranks messages and collectives by size. At most a minute.

    merak-probe --into profile.json                        one rank
    merak-probe --into profile.json --nproc-per-node 8     eight ranks of this host at once, and their links
    merak-probe --into profile.json --shape 4096:4096:32:8:14336:128256     at the shapes of a model
    srun -N 2 --ntasks-per-node 8 merak-probe --into profile.json           links between hosts, too
    merak-plan show --device-profile profile.json ...

Start it with as many ranks on a host as a job will have: they share its memory and its power. Training
commands, MerakArguments and merak-plan plan with the file.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import durable
from ..errors import ConfigError
from ..parallel.position import position
from .door import command
from .measuring import check_ranks, measured, measuring, measuring_parser

if TYPE_CHECKING:
    from ..cluster import Profile

_PATIENCE = 120  # seconds
_SECONDS = 20.0
_LEAST, _MOST = 1.0, 50.0  # seconds: the links of several ranks take some more
_DTYPES = ("float32", "bfloat16", "float16")


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    backend = "backend of the messages and collectives, as the job will have it (default: auto)"
    parser = measuring_parser(__doc__ or "", "merak-probe", backend)
    parser.add_argument("--into", metavar="FILE", help="write the profile here [required]")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="T:H:N:G:F:V[:S]",
        help="measure at the shapes of a model, not at a grid: tokens of a micro-batch, hidden size, "
        "heads, query groups, FFN size, vocabulary, and sequence length where that is not all tokens; "
        "may be given several times",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        choices=_DTYPES,
        help="of products and attention, the first also of passes; may be given several times "
        "(default: bfloat16 on GPUs, else float32)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        help=f"that a rank measures, about, before links (default: {_SECONDS:.0f})",
    )
    parser.add_argument("--use-cpu", action="store_true", help="do not use GPUs")
    return parser.parse_args(words)


def _checked(words: Sequence[str]) -> argparse.Namespace:
    """Return what the flags say; raise ConfigError for what cannot be."""
    from ..probe.shapes import ModelShape

    options = _arguments(words)
    if options.into is None:
        raise ConfigError("--into", "(missing)", "it is where the profile goes", "Name a file")
    check_ranks(options.nproc_per_node)
    if not _LEAST <= options.seconds <= _MOST:
        reason = f"it is not from {_LEAST:.0f} to {_MOST:.0f}"
        raise ConfigError(
            "--seconds", options.seconds, reason, f"Use {_SECONDS:.0f}, or leave it out"
        )
    options.shape = [ModelShape.of(text) for text in options.shape]
    if position()[0] == 0:
        from ..training.outputs import check_file

        check_file("--into", options.into)
    return options


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-probe; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return measured("probe", words, _checked, _probed)


def _probed(options: argparse.Namespace) -> int:
    """The part of one rank."""
    from ..probe.measure import probe

    began = time.monotonic()
    backend = options.distributed_backend
    with measuring("probe", backend, _PATIENCE, use_cpu=options.use_cpu) as ranks:
        found = probe(
            ranks.world,
            ranks.control,
            ranks.nodes,
            shapes=options.shape,
            dtypes=options.dtype,
            seconds=options.seconds,
            say=ranks.progress,
        )
        ranks.progress.done()
        if ranks.world.rank == 0:
            _write(found, Path(options.into), time.monotonic() - began)
    return 0


def _write(found: "Profile", path: Path, seconds: float) -> None:
    from ..probe.table import table

    print(table(found))
    with durable.replaced(path) as file:
        file.write(found.to_json().encode())
    print(f"\n{seconds:.0f} s; wrote {path}")
