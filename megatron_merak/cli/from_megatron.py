"""Convert a launch script of Megatron-LM's pretrain_gpt.py: print a command of merak-pretrain, what
changed, and why.

    merak-from-megatron train.sh
    merak-from-megatron train.sh > train_merak.sh     what changed is in comments
    merak-from-megatron train.sh 2 out --set NODES=4  with its arguments, and what it finds set

The script is read, not run. Variables that it does not set stay as they are written; where one of
them decides which command there is, it is listed, and --set gives it a value. Pipes and
redirections of the command are left out. The exit status is 0 if merak-pretrain would understand
the command and computes the same numbers, also where logging or the like is lost. It is 1 if flags
that change numbers cannot be honoured, values are needed or lines not followed, each of which is
listed with what follows and what to use instead, and 2 if the script has no line that starts
pretrain_gpt.py.
"""

import argparse
import re
import sys
from collections.abc import Sequence

from ..config.command_line import CommandParser
from ..errors import ConfigError, LaunchError, MerakError
from .converted import Converted, ScriptFlag, converted
from .door import command
from .launch_script import ARGUMENTS, PROGRAM, Launch, find
from .words import described, error_text, program

NAME = "merak-from-megatron"
WIDTH = 110
LONGEST = 1 << 18  # bytes of a script that is read


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-from-megatron (tools/from_megatron.py); return its exit status."""
    parser = CommandParser(
        prog=program(),
        description=described(__doc__, NAME),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", help="the shell script")
    parser.add_argument("argument", nargs="*", help="what the script is started with")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable of the environment, and its value; NAME: it is not set. May be repeated",
    )
    options = parser.parse_args(arguments)
    path = options.script
    try:
        text = _text(path)
        launch = find(text, _given(options.set), options.argument or None)
        if launch is None:
            other = next(
                (name for name in re.findall(r"pretrain_\w+\.py", text) if name != PROGRAM), None
            )
            remedy = "Name the script that starts the ranks"
            remedy = f"There is no counterpart of {other}" if other else remedy
            raise LaunchError("script", path, f"it has no command that starts {PROGRAM}", remedy)
    except MerakError as error:
        print(f"{program()}: {error_text(error)}", file=sys.stderr)
        return 2
    except RecursionError:
        nested = ConfigError(
            "script", path, "it is nested too deep to be followed", "Write the command by itself"
        )
        print(f"{program()}: {nested}", file=sys.stderr)
        return 2
    launcher, changes = launcher_of(launch)
    result = converted(launch.flags, ranks_of(launch.before))
    result.renamed[:0] = changes
    if "deepspeed" in launch.before:
        result.notes.append(("deepspeed", "its launcher takes a script; use torchrun"))
    print(report(path, launch, result))
    print(launch.script(command_text(launch, launcher, result.flags)))
    return int(bool(result.refused or launch.doubts or launch.needs))


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes")
        return text.decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError("script", path, reason, "Name a shell script") from error


def _given(settings: Sequence[str]) -> dict[str, str | None]:
    """The variables of --set. Raises ConfigError."""
    given: dict[str, str | None] = {}
    for each in settings:
        name, equals, value = each.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError("--set", each, "has no name of a variable", "Write NAME=VALUE")
        given[name] = value if equals else None
    return given


def launcher_of(launch: Launch) -> tuple[list[str], list[tuple[str, str]]]:
    """The words that start our program in place of theirs, and what changed in them: (before,
    after).
    """
    words = list(launch.before)
    changes = []
    for at in range(len(words) - 2):
        python = re.fullmatch(r"(.*/)?python[\d.]*", words[at])
        if python and words[at + 1 : at + 3] == ["-m", "torch.distributed.launch"]:
            changes.append(
                (
                    " ".join(words[at : at + 3]),
                    "torchrun: the former passes --local-rank to the program",
                )
            )
            words[at : at + 3] = ["torchrun"]
            words = [word for word in words if word.replace("_", "-") != "--use-env"]
            break
    changes.append((PROGRAM, "-m megatron_merak pretrain"))
    return [*words, "-m", "megatron_merak", "pretrain"], changes


def by_torch(words: Sequence[str]) -> bool:
    """Whether a launcher is torch's."""
    return any(
        word.rsplit("/", 1)[-1] == "torchrun" or word.startswith("torch.distributed.")
        for word in words
    )


def ranks_of(words: Sequence[str]) -> int | None:
    """The number of ranks that a launcher starts; None if that is not known."""
    if not by_torch(words):
        return None
    numbers = {"nproc-per-node": "1", "nnodes": "1"}
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if word.startswith("-") and name in numbers:
            numbers[name] = value if equals else next(iter(words[place + 1 :]), "")
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in numbers.values()):
        return None
    return int(numbers["nproc-per-node"]) * int(numbers["nnodes"])


def report(path: str, launch: Launch, result: Converted) -> str:
    """What changed and why, as comments of a shell script."""
    remedies = [
        ("the script's arguments", f"{reason}. Give them behind the script's name")
        if name == ARGUMENTS
        else (name, f"{reason}. Give --set {name}=VALUE")
        for name, reasons in launch.needs.items()
        for reason in reasons
    ]
    sections = (
        ("renamed", " -> ", result.renamed),
        ("added, since Megatron-LM does so without being asked", ": ", result.added),
        ("changes nothing, and is left out", ": ", result.dropped),
        ("changes no numbers, and is lost", ": ", result.lost),
        ("CHANGES NUMBERS", ": ", result.refused),
        ("NEEDS A VALUE", ": ", remedies),
        ("NOT FOLLOWED, look at it", "", [(doubt, "") for doubt in launch.doubts]),
        ("note", ": ", result.notes),
    )
    lines = [f"converted from {path}, line {launch.line}, by {NAME}", f"kept: {result.kept} flags"]
    for title, between, entries in sections:
        lines += [f"{title}:"] if entries else []
        lines += [f"  {before}{between}{after}" for before, after in entries]
    lines += [f"note: {note}" for note in launch.notes]
    shown = (launch.marks.shown(line).replace("\n", "\\n") for line in lines)
    return "\n".join(f"# {line}" for line in shown)


def command_text(launch: Launch, launcher: Sequence[str], flags: Sequence[ScriptFlag]) -> str:
    """Our command, over several lines; in one where it is an argument of a shell."""
    level = len(launch.shells)
    groups = [launch.command(launcher)]
    for each in flags:
        values = [launch.marks.quoted(value, level) for value in each.values]
        groups.append(" ".join([each.name, *values] if each.name else values))
    if launch.shells:
        return " ".join(groups)
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines) > 1 and len(lines[-1]) + len(group) < WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)
