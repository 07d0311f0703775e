"""Start the ranks of a job on this host, like torchrun, which it runs without the reports of its
own.

A job that is interrupted ends with the line that its ranks say and with the signal's status. A job
with parameter servers keeps running if ranks fail: if a worker dies, the others continue, and a
killed parameter server is restarted from its last snapshot (--save, --ps-snapshot-interval). See
docs/parameter_server.md.

examples:
  # a script with a MerakTrainer, on eight ranks
  merak-launch --nproc-per-node 8 train.py ... (its arguments)

  # three workers and one server on this host
  merak-launch --nproc-per-node 4 pretrain --data-parallel-strategy ps-async \\
      --num-parameter-servers 1 --save runs/served ... (the flags of merak-pretrain)

  # two hosts with eight ranks each; use --node-rank 1 on the second
  merak-launch --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr host0 pretrain-hf ...

  # the batch script of a job on four hosts
  merak-launch --emit slurm --nodes 4 --gpus-per-node 8 --output job.slurm -- pretrain-hf ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import expanded
from ..config import nearest
from ..config.command_line import CommandParser
from ..errors import LaunchError, MerakError
from ..parallel.position import INTERFACES, pass_to_ranks
from .door import command
from .launcher import EMIT, FLAG, STANDALONE, run_agent
from .pretrain import check_command
from .supervised import TRAINING, supervised
from .words import command_of, described, error_text, program

if TYPE_CHECKING:
    from .hosts import HostPlace

PREFLIGHT = "preflight"
STARTED = (*TRAINING, PREFLIGHT)  # commands of ours that ranks run
_PORT = 29500
# seconds that ranks have to complete a step and save after a signal, as long as a collective may
# take
_PATIENCE = 600


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog=program(),
        description=described(__doc__, "merak-launch"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc-per-node", type=int, required=True, help="number of ranks on this host"
    )
    parser.add_argument(
        "--nnodes",
        type=int,
        default=1,
        help="number of hosts, each with this many ranks (default: 1)",
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, help="index of this host, from 0 (default: 0)"
    )
    parser.add_argument(
        "--master-addr", default="127.0.0.1", help="address of the first host (default: this host)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=_PORT,
        help=f"free port on the first host (default: {_PORT})",
    )
    parser.add_argument(
        EMIT,
        metavar="SCHEDULER",
        help="write the files of a job for slurm, k8s, kubeflow, skypilot, ray or shell instead; "
        f"{EMIT} slurm --help has its flags",
    )
    parser.add_argument(
        "--interface",
        default=None,
        help="network interface between the hosts, such as eth0 or ib0 (default: that of the "
        "host's name)",
    )
    restarts = (
        "restarts allowed per parameter server (default: 3); without servers, of all "
        "ranks (default: 0)"
    )
    parser.add_argument("--max-restarts", type=int, default=None, help=restarts)
    parser.add_argument("script", help="pretrain, pretrain-hf, preflight, or a script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")
    options = parser.parse_args(words)
    options.script = command_of(options.script, STARTED)
    return options


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return ``options``; raise LaunchError if its numbers do not describe a job."""
    for flag, value, least in (
        ("--nproc-per-node", options.nproc_per_node, 1),
        ("--nnodes", options.nnodes, 1),
        ("--node-rank", options.node_rank, 0),
        ("--max-restarts", options.max_restarts or 0, 0),
    ):
        if value < least:
            raise LaunchError(flag, value, f"it is below {least}", f"Use at least {least}")
    if options.node_rank >= options.nnodes:
        raise LaunchError(
            "--node-rank",
            options.node_rank,
            f"there are {options.nnodes} hosts",
            "Count them from 0",
        )
    if not 0 < options.master_port < 1 << 16:
        remedy = "Use a free port from 1 to 65535"
        raise LaunchError("--master-port", options.master_port, "it is not a valid port", remedy)
    if options.script not in STARTED and not Path(options.script).is_file():
        close = nearest(options.script, STARTED)
        remedy = f"Use {', '.join(STARTED)} or the path of a script"
        if close:
            remedy = f"The nearest command is {close}"
        raise LaunchError("script", options.script, "the file does not exist", remedy)
    return options


def _served(script: str, flags: Sequence[str]) -> bool:
    """Whether flags name parameter servers; those in the --config file of a script are not known,
    so it may.
    """
    words = {part for flag in flags for part in flag.split("=")}
    unknown = script not in STARTED and "--config" in words
    return unknown or not words.isdisjoint(("ps-sync", "ps-async", "--num-parameter-servers"))


def _torchrun(options: argparse.Namespace) -> list[str]:
    """Return torchrun's command line for the same ranks, without where their hosts meet."""
    words = [f"{FLAG}={options.nproc_per_node}", f"--max-restarts={options.max_restarts or 0}"]
    if not _meets(options):
        words.append(STANDALONE)  # at any free port
    script = (
        ["-m", "megatron_merak", options.script] if options.script in STARTED else [options.script]
    )
    return [*words, *script, *options.flags]


def _meets(options: argparse.Namespace) -> bool:
    """Whether hosts meet where they are told, or ranks more than once."""
    return options.nnodes > 1 or options.master_port != _PORT or bool(options.max_restarts)


def _place(options: argparse.Namespace) -> "HostPlace | None":
    """Return where this host is among those that meet; None: its ranks meet once, at any port."""
    from .hosts import HostPlace

    if not _meets(options):
        return None
    alone = options.nnodes == 1 and options.master_port == _PORT
    port = 0 if alone else options.master_port
    return HostPlace(options.node_rank, options.nnodes, options.master_addr, port)


def _emits(words: Sequence[str]) -> bool:
    """Whether files are asked for, by a word in front of what ranks run."""
    for word in words:
        if word == "--" or command_of(word, STARTED) in STARTED or word.endswith(".py"):
            return False
        if word.partition("=")[0] == EMIT:
            return True
    return False


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-launch (tools/launch.py); return the exit status of the job."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if _emits(words):
        from .emit import emit

        return emit(words)
    try:
        options = _checked(_arguments(words))
        from ..parameter_server.supervisor import Hosts, servers_of

        hosts = Hosts(
            options.nproc_per_node,
            options.nnodes,
            options.node_rank,
            options.master_addr,
            port=options.master_port,
        )
        if options.script in TRAINING:
            check_command(options.script, options.flags, hosts.size)
        flags = expanded(options.flags) if options.script in TRAINING else options.flags
        if options.interface is not None:
            for name in INTERFACES:
                pass_to_ranks(name, options.interface)
        if not _served(options.script, flags):
            return run_agent(_torchrun(options), _PATIENCE, _place(options))
        restarts = 3 if options.max_restarts is None else options.max_restarts
        return supervised(
            options.script, options.flags, hosts, servers_of(flags), restarts=restarts
        )
    except MerakError as error:
        print(f"{program()}: {error_text(error)}", file=sys.stderr)
        return 1
