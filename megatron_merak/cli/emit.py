"""Write the files of a job on several hosts; the command that its ranks run is checked before.

The files go to standard output, or to --output. Each host runs one launcher, which starts its ranks
again after a failure; with --save and --load of one directory that all hosts share they go on from
the newest checkpoint. See docs/several_hosts.md.

examples:
  # four hosts of eight GPUs under Slurm
  merak-launch --emit slurm --nodes 4 --gpus-per-node 8 --time 24:00:00 --output job.slurm -- \\
      pretrain-hf --model /shared/model ... --save /shared/run --load /shared/run

  # the same on Kubernetes
  merak-launch --emit k8s --nodes 4 --gpus-per-node 8 --image IMAGE --shared-dir /shared -- \\
      pretrain-hf --model /shared/model ... --save /shared/run --load /shared/run
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arguments import expanded
from ..config import RunConfig, nearest
from ..config.command_line import CommandParser
from ..durable import replaced
from ..errors import LaunchError
from ..job_files.job import ClusterJob, wrapped
from ..job_files.schedulers import SCHEDULERS, Scheduler
from .launcher import EMIT
from .pretrain import check_command
from .supervised import TRAINING
from .words import command_of, described, program

_SOME = ("--image", "--shared-dir", "--claim", "--gpu")  # which not all schedulers take
_NOTICE = 600
_RESTARTS = 3
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_NAME = re.compile(r"[\w.-]+")
_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
# flags of training commands that name files without which their other flags are not known
_FILES = ("--plan", "--config")


def emit(words: Sequence[str]) -> int:
    """Run merak-launch --emit."""
    own, given = _divided(words)
    options = _arguments(own)
    options.words = [*options.words, *given]
    options.words[:1] = [command_of(word, TRAINING) for word in options.words[:1]]
    scheduler = _scheduler(options.emit)
    _check_options(options, scheduler)
    text = scheduler.write(_job(options, own))
    if options.output == "-":
        sys.stdout.write(text)
    else:
        path = Path(options.output)
        with replaced(path) as file:
            file.write(text.encode())
    return 0


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first "--", and those behind it."""
    if "--" not in words:
        return [*words], []
    at = list(words).index("--")
    return [*words[:at]], [*words[at + 1 :]]


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog=f"{program()} {EMIT}",
        description=described(__doc__, "merak-launch"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(EMIT, required=True, metavar="SCHEDULER", help=", ".join(SCHEDULERS))
    add("--nodes", type=int, required=True, help="number of hosts")
    add("--gpus-per-node", type=int, default=None, help="GPUs of a host; each has a rank")
    add("--nproc-per-node", type=int, default=None, help="ranks of a host without GPUs, instead")
    add("--image", default=None, help="container image; see examples/multi_node/Dockerfile")
    add("--time", default=None, help="time limit, as 24:00:00 or 2-00:00:00 (default: none)")
    text = f"seconds to save in, before the limit and after a signal (default: {_NOTICE})"
    add("--notice", type=int, default=_NOTICE, help=text)
    add("--job-name", default=None, help="name of the job (default: that of the command)")
    add("--output", default="-", help="file to write (default: -, standard output)")
    add("--interface", default=None, help="network interface between the hosts, as eth0 or ib0")
    text = f"how often the job may start again after a failure (default: {_RESTARTS})"
    add("--restarts", type=int, default=_RESTARTS, help=text)
    add("--shared-dir", default=None, help="directory that all hosts share, at the same path")
    add("--claim", default=None, help="volume claim that holds it (default: shared)")
    add("--gpu", default=None, help="kind of GPU, for skypilot (default: H100)")
    text = "measure hosts and links before the run, and end where one is slow"
    add("--preflight", action="store_true", help=text)
    add("words", nargs=argparse.REMAINDER, metavar="-- command", help="what ranks run")
    return parser.parse_args([*words])


def _scheduler(name: str) -> Scheduler:
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    close = nearest(name, SCHEDULERS)
    known = ", ".join(SCHEDULERS)
    remedy = f"The nearest is {close}" if close else f"Use one of {known}"
    raise LaunchError(EMIT, name, "is no scheduler for which files are written", remedy)


def _check_options(options: argparse.Namespace, scheduler: Scheduler) -> None:
    """Raise LaunchError for options that make no job of this scheduler."""
    ranks = (options.gpus_per_node, options.nproc_per_node)
    if ranks.count(None) != 1:
        reason = "one of the two says how many ranks a host has"
        value = "and --nproc-per-node" if None not in ranks else "(missing)"
        raise LaunchError("--gpus-per-node", value, reason, "Give one of them")
    for flag, least in (
        ("--nodes", 1),
        ("--gpus-per-node", 1),
        ("--nproc-per-node", 1),
        ("--restarts", 0),
        ("--notice", 1),
    ):
        value = _value(options, flag)
        if value is not None and value < least:
            raise LaunchError(flag, value, f"it is below {least}", f"Use at least {least}")
    for flag in _SOME:
        value = _value(options, flag)
        if value is None and flag in scheduler.needs:
            reason = f"{scheduler.title} starts containers"
            remedy = "Name an image, such as one of examples/multi_node/Dockerfile"
            raise LaunchError(flag, "(missing)", reason, remedy)
        if value is not None and flag not in scheduler.takes:
            reason = f"{scheduler.title} has no use for it"
            raise LaunchError(flag, value, reason, "Leave it out")
    if options.shared_dir is not None and not options.shared_dir.startswith("/"):
        reason = "hosts share an absolute path"
        raise LaunchError("--shared-dir", options.shared_dir, reason, "Begin it with /")
    if not options.words:
        raise LaunchError("command", "(missing)", "ranks have nothing to run", "Write it behind --")


def _value(options: argparse.Namespace, flag: str) -> Any:
    return getattr(options, flag[2:].replace("-", "_"))


def _job(options: argparse.Namespace, own: Sequence[str]) -> ClusterJob:
    gpus = options.gpus_per_node is not None
    ranks = options.gpus_per_node if gpus else options.nproc_per_node
    checked = _check_words(options, ranks)
    if checked is not None:
        for text in _remarks(options, checked, ranks):
            print(f"{program()}: {text}", file=sys.stderr)
    return ClusterJob(
        written=_written(own, options.words),
        words=tuple(options.words),
        nodes=options.nodes,
        ranks=ranks,
        gpus=gpus,
        name=_name(options),
        image=options.image or "",
        seconds=_seconds(options),
        notice=options.notice,
        restarts=options.restarts,
        interface=options.interface or "",
        shared=(options.shared_dir or "").rstrip("/"),
        claim=options.claim or ClusterJob.claim,
        gpu=options.gpu or ClusterJob.gpu,
        preflight=options.preflight,
        save=(_given(options.words[1:], "--save") or "") if options.words[0] in TRAINING else "",
    )


def _written(own: Sequence[str], command: Sequence[str]) -> str:
    """Return the command line that writes a job, on several lines."""
    kept = [*own[: len(own) - len(command)]] if own[-len(command) :] == [*command] else [*own]
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    kept = [word for word in kept if not word.startswith("--output=")]
    words = ["merak-launch", *map(shlex.quote, kept), "--", *map(shlex.quote, command)]
    return wrapped(words)


def _name(options: argparse.Namespace) -> str:
    """Return the name of a job. Raises LaunchError for one that its scheduler does not take."""
    labels = SCHEDULERS[options.emit].labels
    pattern = _LABEL if labels else _NAME
    if options.job_name is None:
        word = Path(options.words[0]).stem.lower()
        return f"merak-{re.sub(r'[^a-z0-9]+', '-', word).strip('-')[:40]}".rstrip("-")
    if not pattern.fullmatch(options.job_name):
        kept = "lower-case letters, digits and dashes" if labels else "letters, digits, - _ and ."
        reason = f"{SCHEDULERS[options.emit].title} takes names of {kept}"
        raise LaunchError("--job-name", options.job_name, reason, "Choose another name")
    return options.job_name


def _seconds(options: argparse.Namespace) -> int:
    """Return the time limit, 0 without. Raises LaunchError."""
    if options.time is None:
        return 0
    found = _TIME.fullmatch(options.time)
    if found is None:
        remedy = "Write hours:minutes:seconds, as 24:00:00, or days in front, as 2-00:00:00"
        raise LaunchError("--time", options.time, "it is no time", remedy)
    numbers = [int(number or 0) for number in found.groups()]
    seconds = ((numbers[0] * 24 + numbers[1]) * 60 + numbers[2]) * 60 + numbers[3]
    if seconds <= options.notice:
        reason = f"ranks have notice {options.notice} s before it"
        remedy = "Give more time, or a shorter --notice"
        raise LaunchError("--time", options.time, reason, remedy)
    return seconds


def _check_words(options: argparse.Namespace, ranks: int) -> RunConfig | None:
    """Return the configuration of a training command. Raises a MerakError for a command that cannot
    run; None for one that only the cluster can check.
    """
    command = options.words[0]
    flags = options.words[1:]
    if command not in TRAINING:
        _check_script(command)
        _refuse_servers(options, flags)
        return None
    for flag in _FILES:
        path = _given(flags, flag)
        if path is not None and not Path(path).is_file():
            text = f"{flag} {path} is not on this machine, so the command was not checked"
            print(f"{program()}: {text}", file=sys.stderr)
            _refuse_servers(options, flags)
            return None
    _refuse_servers(options, expanded(flags))
    return check_command(command, flags, options.nodes * ranks)


def _check_script(script: str) -> None:
    if Path(script).is_file():
        return
    if script.endswith(".py"):
        text = f"{script} is not on this machine: it has to be on every host"
        print(f"{program()}: {text}", file=sys.stderr)
        return
    close = nearest(script, TRAINING)
    remedy = f"Use {', '.join(TRAINING)} or the path of a script"
    if close:
        remedy = f"The nearest command is {close}"
    raise LaunchError("command", script, "it is none that ranks run", remedy)


def _refuse_servers(options: argparse.Namespace, flags: Sequence[str]) -> None:
    words = {part for flag in flags for part in flag.split("=")}
    if not words.isdisjoint(("ps-sync", "ps-async", "--num-parameter-servers")):
        reason = "the ranks of a job with parameter servers start again one by one"
        remedy = "Start merak-launch --node-rank on every host yourself"
        raise LaunchError(EMIT, options.emit, reason, remedy)


def _given(flags: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag of a command line, the last one; None where it is not given."""
    value = None
    for at, word in enumerate(flags):
        if word == flag:
            value = "".join(flags[at + 1 : at + 2])
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _remarks(options: argparse.Namespace, config: RunConfig, ranks: int) -> list[str]:
    """Return what a job should have and lacks."""
    found = []
    degree = config.parallel.tensor_model_parallel_size
    if ranks % degree:
        found.append(
            f"--tensor-model-parallel-size {degree} does not divide the {ranks} ranks of a host: "
            "its collectives will cross hosts, which is slow"
        )
    save = config.checkpoint.save
    load = config.checkpoint.load
    if options.restarts and (save is None or save != load):
        found.append(
            "without --save and --load of one directory, a start after a failure begins anew"
        )
    shared = options.shared_dir
    if save is not None and shared is not None and not Path(save).is_relative_to(shared):
        found.append(f"--save {save} is not in --shared-dir {shared}: all hosts have to share it")
    return found
