"""Run a training command, unmodified, with a fault in one of its ranks, and say what became of it.

The command may be any that starts Python processes: torchrun, merak-pretrain, python. The fault comes

  --step N        in the N-th update of weights by that rank, from 1 (of torch's optimizers, or of megatron_merak)
  --disk-call N   at the N-th call after that, or without --step after the start, that opens a file to write, renames,
                  removes or makes a directory
  --seconds T     so many seconds after --step, or after the start of the process

and --seed draws what is not given of rank and step. A script that python starts alone is rank 0, and needs --step.
Faults, by the names of nvidia-resiliency-ext where it has them:

{faults}

examples:
  python tools/inject_faults.py --fault SIGSTOP --rank 1 --step 5 -- torchrun --nproc-per-node 2 train.py
  python tools/inject_faults.py --fault DISK_FULL --target runs/x --disk-size 64m --step 3 -- merak-pretrain ...
  python tools/inject_faults.py --fault SIGKILL --seed 7 --ranks 4 --steps 20 -- torchrun --nproc-per-node 4 train.py

The exit status is 0 if the fault came and the command then ended, whatever its status, 1 if no fault came, and 2 if the
command was still running --limit seconds after it; it is ended then, stopped processes included.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.faults.hook.injected_fault import FAULTS, IN_A_STEP, Order  # noqa: E402
from tools.faults.watch import run, unmount  # noqa: E402


def _parser() -> argparse.ArgumentParser:
    faults = "\n".join(f"  {name:<16} {what}" for name, (what, _) in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(faults=faults),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--fault", required=True, choices=FAULTS, metavar="FAULT", help="one of those above"
    )
    parser.add_argument(
        "--rank", type=int, help="the rank that has it (default: drawn by --seed, else 0)"
    )
    parser.add_argument(
        "--step", type=int, help="update of weights in which it comes (default: drawn by --seed)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="seconds to wait behind that (default: 0)"
    )
    parser.add_argument(
        "--disk-call", type=int, default=0, help="calls that touch the disk to wait for behind that"
    )
    parser.add_argument(
        "--seed", type=int, help="draws rank and step where they are not given, and an element"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="number of ranks that --seed draws from (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="number of steps that --seed draws from (default: 10)"
    )
    parser.add_argument(
        "--times", type=int, default=1, help="in how many starts of the rank it comes (default: 1)"
    )
    parser.add_argument("--target", default="", help="directory that is filled or removed")
    parser.add_argument(
        "--disk-size", help="mount memory of this size at --target meanwhile; for root"
    )
    parser.add_argument(
        "--lasts",
        type=float,
        default=0.0,
        help="seconds until DISK_FULL, SIGSTOP end; of SLOW: a step",
    )
    parser.add_argument(
        "--bit", type=int, default=30, help="bit of 32 that BIT_FLIP turns (default: 30)"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds until it counts as hung (default: 120)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of a sentence"
    )
    parser.add_argument("--quiet", action="store_true", help="do not show what the command prints")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="behind --")
    return parser


def _order(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Order:
    draw = random.Random(options.seed)
    rank = options.rank
    step = options.step
    if options.seed is not None:
        drawn_rank = draw.randrange(options.ranks)
        drawn_step = draw.randint(1, options.steps)
        rank = drawn_rank if rank is None else rank
        step = drawn_step if step is None else step
    if not (step or options.seconds or options.disk_call):
        parser.error("say when it comes: --step, --seconds, --disk-call or --seed")
    if options.fault in IN_A_STEP and (not step or options.disk_call):
        parser.error(f"{options.fault} comes in a step: give --step, without --disk-call")
    if options.fault in ("DISK_FULL", "DIRECTORY_GONE") and not options.target:
        parser.error(f"{options.fault} needs --target")
    return Order(
        fault=options.fault,
        rank=rank or 0,
        directory="",
        step=step or 0,
        seconds=options.seconds,
        disk_call=options.disk_call,
        times=options.times,
        target=options.target,
        lasts=options.lasts,
        bit=options.bit,
        seed=options.seed or 0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give a command behind --")
    order = _order(options, parser)
    outcome = run(command, order, options.limit, disk_size=options.disk_size)
    if options.disk_size is not None:
        unmount(Path(options.target))
    if not options.quiet:
        sys.stderr.write(outcome.output)
    print(
        outcome.json()
        if options.json
        else f"{order.fault} in step {order.step} of rank {order.rank}: {outcome}"
    )
    return 2 if not outcome.ended else int(not outcome.came)


if __name__ == "__main__":
    sys.exit(main())
