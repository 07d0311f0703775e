"""A job on several hosts, and the command with which each host starts its ranks."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

LAUNCH = "python3 -m megatron_merak launch"
_PREFLIGHT = "preflight"
_COLUMNS = 96


@dataclass(frozen=True)
class ClusterJob:
    """What the files of a job are written from.

    written:   the command line that writes them.
    words:     what ranks run: a command of ours or a script, and its flags.
    nodes:     number of hosts.
    ranks:     of each.
    gpus:      whether each rank has a GPU.
    name:      of the job.
    image:     container image; empty: the environment of the host.
    seconds:   time limit; 0: none.
    notice:    seconds before it, and after a signal, in which a run may complete its step and save.
    restarts:  how often ranks may start again after a failure.
    interface: network interface between hosts; empty: that of the host's name.
    shared:    directory that all hosts share; empty: unknown.
    claim:     volume claim that holds it, where storage is claimed.
    gpu:       kind of GPU, where one is chosen by name.
    preflight: whether hosts and the links between them are measured before the run.
    save:      directory that it saves to; empty: unknown.
    """

    written: str
    words: tuple[str, ...]
    nodes: int
    ranks: int
    gpus: bool
    name: str
    image: str = ""
    seconds: int = 0
    notice: int = 600
    restarts: int = 3
    interface: str = ""
    shared: str = ""
    claim: str = "shared"
    gpu: str = "H100"
    preflight: bool = False
    save: str = ""


@dataclass(frozen=True)
class Host:
    """How a scheduler says which host of the job this is, as a shell reads it.

    node: its index, from 0.
    head: the address of host 0.
    port: a number, or a variable, of a free port there; the next one is free as well.
    """

    node: str
    head: str
    port: str


def start(job: ClusterJob, host: Host, *before: str) -> str:
    """Return the command of a host that starts its ranks, for a shell.

    before: words in front of it.
    """
    words = [*before, *_launch(job, host, host.port, job.restarts), *map(shlex.quote, job.words)]
    return wrapped(words)


def timed(job: ClusterJob) -> list[str]:
    """Return words in front of a command that give it notice before the time limit, where nothing
    else does; none without a limit.
    """
    if not job.seconds:
        return []
    return ["timeout", "--preserve-status", "--signal=USR1", str(job.seconds - job.notice)]


def check(job: ClusterJob, host: Host) -> str:
    """Return the command of a host that measures the hosts and links before."""
    port = str(int(host.port) + 1) if host.port.isdigit() else f"$(({host.port.strip('$')} + 1))"
    return wrapped([*_launch(job, host, port, restarts=0), *map(shlex.quote, preflight(job))])


def preflight(job: ClusterJob) -> list[str]:
    """Return the command of ours that measures hosts and links, and its flags."""
    return [_PREFLIGHT, *(["--save", job.save] if job.save else [])]


def _launch(job: ClusterJob, host: Host, port: str, restarts: int) -> list[str]:
    words = [*LAUNCH.split(), "--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks)]
    words += ["--node-rank", host.node, "--master-addr", host.head, "--master-port", port]
    if job.interface:
        words += ["--interface", shlex.quote(job.interface)]
    if restarts:
        words += ["--max-restarts", str(restarts)]
    return words


def wrapped(words: Sequence[str], indent: str = "    ") -> str:
    """Return a command on lines of at most ``_COLUMNS`` columns where it can be, a flag and its
    value on one.
    """
    parts: list[str] = []
    for word in words:
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and word[:2] != "--":
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > _COLUMNS:
            lines.append(indent + part)
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def comment(text: str) -> str:
    """Return lines of comment, for a shell or YAML."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def clock(seconds: int) -> str:
    """Return a time as Slurm has it: 1-00:00:00 is a day."""
    days, rest = divmod(seconds, 24 * 3600)
    hours, rest = divmod(rest, 3600)
    text = f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
