"""Starts the ranks of a job with parameter servers on this host, as torchrun does, but lets the job outlive its ranks.

A worker that dies is left, and the others go on; a parameter server that is killed is started again and goes on from
its last snapshot (--save, --ps-snapshot-interval). See docs/parameter_server.md.

examples:
  # three workers and one server on this host
  merak-launch --nproc-per-node 4 pretrain --data-parallel-strategy ps-async \\
      --num-parameter-servers 1 --save runs/served ... (the flags of merak-pretrain)

  # two hosts of eight ranks; the same on the other one with --node-rank 1
  merak-launch --nproc-per-node 8 --nnodes 2 --node-rank 0 --master-addr host0 pretrain-hf ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import LaunchError, MerakError
from .pretrain import check_command
from .supervised import TRAINING, supervised
from .words import described, program, told


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program(),
        description=described(__doc__, "merak-launch"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nproc-per-node", type=int, required=True, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts, each with as many ranks (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this host is (default: 0)")
    parser.add_argument("--master-addr", default="127.0.0.1", help="the first host (default: this one)")
    parser.add_argument("--master-port", type=int, default=29500, help="a port of it that is free (default: 29500)")
    parser.add_argument("--max-restarts", type=int, default=3, help="of each parameter server (default: 3)")
    parser.add_argument("script", help="pretrain, pretrain-hf, or a script like pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="its flags")
    return parser.parse_args(given)


def _checked(asked: argparse.Namespace) -> argparse.Namespace:
    """Raises LaunchError for numbers that make no job."""
    for flag, value, least in (
        ("--nproc-per-node", asked.nproc_per_node, 1),
        ("--nnodes", asked.nnodes, 1),
        ("--node-rank", asked.node_rank, 0),
        ("--max-restarts", asked.max_restarts, 0),
    ):
        if value < least:
            raise LaunchError(flag, value, f"it is below {least}", f"Use {least} or more")
    if asked.node_rank >= asked.nnodes:
        raise LaunchError("--node-rank", asked.node_rank, f"there are {asked.nnodes} hosts", "Count them from 0")
    if not 0 < asked.master_port < 1 << 16:
        remedy = "Name one that is free, from 1 to 65535"
        raise LaunchError("--master-port", asked.master_port, "ranks cannot meet at such a port", remedy)
    if asked.script not in TRAINING and not Path(asked.script).is_file():
        raise LaunchError("script", asked.script, "there is no such file", f"Name {' or '.join(TRAINING)}")
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """The command merak-launch, and tools/launch.py; the exit status is that of the job."""
    try:
        asked = _checked(_arguments(sys.argv[1:] if arguments is None else arguments))
        from ..parameter_server.supervisor import Hosts, servers_of

        hosts = Hosts(asked.nproc_per_node, asked.nnodes, asked.node_rank, asked.master_addr, asked.master_port)
        if asked.script in TRAINING:
            check_command(asked.script, asked.flags, hosts.size)
        return supervised(asked.script, asked.flags, hosts, servers_of(asked.flags), asked.max_restarts)
    except MerakError as error:
        print(f"{program()}: {told(error)}", file=sys.stderr)
        return 1
