"""Lines for the user, which the first rank writes, and saves that say why they wait.

Functions, so that a script's subclass of the trainer may have any method or attribute of these
names.
"""

import sys
from functools import partial

import torch.distributed as dist

from ...checkpoint.full_disk import Saving
from ..arguments.merak_arguments import MerakArguments


def say(args: MerakArguments, text: str) -> None:
    """Write a line, unless ``disable_tqdm``."""
    if not args.disable_tqdm:
        warn(args, text)


def warn(args: MerakArguments, text: str) -> None:
    """Write a line."""
    if args.process_index == 0:
        print(text, file=sys.stderr, flush=True)


def saving_of(args: MerakArguments, group: dist.ProcessGroup | None) -> Saving:
    """Return what runs a save, and waits for space if ``on_full_disk`` says so.

    group: all ranks of the job.
    """
    return Saving(args.on_full_disk, group, partial(warn, args), setting="on_full_disk")
