"""Bash as the judge of merak-from-megatron: a script, and what we make of it, start programs that note
their words and environment.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_merak.cli.launch_script import PROGRAM, Launch, find

# A program notes its words and environment; a wrapper notes its own words and starts the rest.
NOTES = """#!/bin/sh
{ printf 'start\\0'; printf '%s\\0' "${0##*/}" "$@"; printf '\\1\\0'
cat /proc/$$/environ; printf '\\2\\0'; } >> "$JUDGE"
"""
WRAPS = """#!/bin/sh
words=
for word; do
    case $word in bash|sh|torchrun|python*|env|srun|singularity) break;; esac
    words="$words $word"
    shift
done
printf 'wrap\\0%s\\0\\1\\0\\2\\0' "${0##*/}$words" >> "$JUDGE"
"""
CONTAINED = """for name in JUDGE PATH $words; do
    case $name in JUDGE|PATH|[A-Z]*) eval "value=\\$$name"; set -- "$name=$value" "$@";; esac
done
exec env -i "$@"
"""
OWN = ("_", "SHLVL", "OLDPWD", "JUDGE", "PATH")


@dataclass(frozen=True)
class Started:
    """A program that was started: its words, and the environment that is not the script's."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


class Judge:
    """An empty directory, and programs that are first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.tools = folder / "tools"
        self.log = folder / "log"
        self.broken = False  # whether the last script had an error of syntax where it ran
        self.said = ""  # how the last script ended, and what it wrote to stderr
        self.folder.mkdir()
        (self.folder / "sub").mkdir()
        (self.folder / "sub" / "sub").symlink_to(".")  # so that a loop may go there, too
        (self.folder / "blend.txt").write_text("0.5 data/a  0.5 data/b\n")
        self.tools.mkdir()
        for name in ("torchrun", "python", "python3"):
            self._tool(name, NOTES)
        for name in ("srun", "singularity", "mpirun"):
            self._tool(name, f'{WRAPS}exec "$@"\n')
        self._tool("docker", WRAPS + CONTAINED)

    def _tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def run(self, script: str, given: Mapping[str, str]) -> list[Started]:
        """What a script starts."""
        self.log.write_text("")
        (self.folder.parent / "script.sh").write_text(script)
        base = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "HOME": "/home/me",
            "JUDGE": str(self.log),
        }
        done = subprocess.run(
            ["bash", "../script.sh"],
            env=base | given,
            cwd=self.folder,
            capture_output=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
        self.said = f"status {done.returncode} {done.stderr.decode(errors='replace')}"
        self.broken = b"error token" in done.stderr or b"bad substitution" in done.stderr
        notes = self.log.read_text().split("\0")
        started = []
        wraps: list[str] = []
        while len(notes) > 1:
            words = notes[1 : notes.index("\1")]
            environment = notes[notes.index("\1") + 1 : notes.index("\2")]
            if notes[0] == "wrap":
                wraps += words
            else:
                pairs = [each.partition("=") for each in environment]
                kept = sorted((n, v) for n, _, v in pairs if n and n not in (*OWN, *given))
                plain = [PROGRAM if w.endswith(f"/{PROGRAM}") else w for w in words]
                started.append(Started((*wraps, *plain), tuple(kept)))
                wraps = []
            del notes[: notes.index("\2") + 1]
        return [each for each in started if PROGRAM in each.words]


def converted(launch: Launch) -> str:
    """A script that starts what was found, with the words of the original."""
    return launch.script(launch.command([*launch.before, PROGRAM, *launch.flags]))


@dataclass(frozen=True)
class Verdict:
    """What bash started for a script, and for what we made of it; what we said of it."""

    theirs: list[Started]
    ours: list[Started]
    told: tuple[str, ...]
    notes: tuple[str, ...]
    text: str
    broken: bool = False
    said: str = ""  # how bash ended with the script

    @property
    def same(self) -> bool:
        return self.theirs == self.ours

    def __str__(self) -> str:
        parts = [f"theirs {self.theirs}", f"ours   {self.ours}", self.said, self.text]
        parts += [*self.told, *self.notes]
        return "\n".join(parts)


def judged(
    judge: Judge,
    script: str,
    given: Mapping[str, str],
    known: Mapping[str, str | None],
    bash: Verdict | None = None,
) -> Verdict:
    """Compare. given: the environment; known: what of it is told to us; bash: what it starts."""
    theirs = bash.theirs if bash else judge.run(script, given)
    broken = bash.broken if bash else judge.broken
    said = bash.said if bash else judge.said
    launch = find(script, known)
    if launch is None:
        return Verdict(theirs, ours=[], told=(), notes=(), text="", broken=broken, said=said)
    text = converted(launch)
    ours = judge.run(text, given)
    told = [*launch.doubts]
    for name, reasons in launch.needs.items():
        told += [f"{name}: {reason}" for reason in reasons]
    return Verdict(
        theirs,
        ours=ours,
        told=tuple(told),
        notes=launch.notes,
        text=text,
        broken=broken,
        said=said,
    )
