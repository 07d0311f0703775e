"""Convert a launch script of Megatron-LM's pretrain_gpt.py: print a command of merak-pretrain, what
changed, and why.

    merak-from-megatron train.sh
    merak-from-megatron train.sh > train_merak.sh     what changed is in comments

The script is read, not run. Variables that it does not set stay as they are written; pipes and
redirections of the command are left out. The exit status is 0 if
merak-pretrain would understand the command, 1 if flags cannot be honoured or lines not followed,
each of which is listed with what follows and what to use instead, and 2 if the script has no line
that starts pretrain_gpt.py.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence

from ..errors import ConfigError, LaunchError, MerakError
from .converted import Converted, converted
from .door import command
from .launch_script import PROGRAM, Launch, find
from .shell_words import LITERAL, SEPARATORS, references
from .words import described, error_text, program

NAME = "merak-from-megatron"
WIDTH = 110
LONGEST = 1 << 18  # bytes of a script that is read


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run merak-from-megatron (tools/from_megatron.py); return its exit status."""
    parser = argparse.ArgumentParser(
        prog=program(),
        description=described(__doc__, NAME),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="the shell script")
    path = parser.parse_args(arguments).script
    try:
        text = _text(path)
        launch = find(text)
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
    if "srun" in (*launch.shell, *launch.before) and not by_torch(launch.before):
        remedy = "let it start torchrun once per node, unless its MPI tells ranks who they are"
        result.notes.append(("srun", f"a rank reads the variables of torchrun or MPI; {remedy}"))
    if "deepspeed" in launch.before:
        result.notes.append(("deepspeed", "its launcher takes a script; use torchrun"))
    print(report(path, launch, result))
    for each in launch.exports:
        name, _, value = each.partition("=")
        print(f"export {name}={quoted(value)}")
    print(command_text(launch, launcher, result))
    return int(bool(result.refused or launch.doubts))


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
    sections = (
        ("renamed", " -> ", result.renamed),
        ("added, since Megatron-LM does so without being asked", ": ", result.added),
        ("left out, since it changes nothing", ": ", result.dropped),
        ("CANNOT BE HONOURED", ": ", result.refused),
        ("note", ": ", result.notes),
    )
    lines = [f"converted from {path}, line {launch.line}, by {NAME}", f"kept: {result.kept} flags"]
    for title, between, entries in sections:
        lines += [f"{title}:"] if entries else []
        lines += [f"  {before}{between}{after}" for before, after in entries]
    lines += ["NOT FOLLOWED, look at it:"] if launch.doubts else []
    lines += [f"  {doubt}" for doubt in launch.doubts]
    lines += [f"note: {note}" for note in launch.notes]
    return "\n".join(f"# {line}" for line in lines)


def command_text(launch: Launch, launcher: Sequence[str], result: Converted) -> str:
    """Our command, over several lines; in one where it is an argument of a shell."""
    read = _quoted_inside if launch.shell else quoted
    groups = [" ".join(map(read, launcher))]
    groups += [
        " ".join([*([each.name] if each.name else []), *map(read, each.values)])
        for each in result.flags
    ]
    if launch.shell:
        text = " ".join(groups)
        plain = len(references(text)) == 1  # nothing that the script's shell replaces
        argument = shlex.quote(text.replace(LITERAL, "$")) if plain else _in_double_quotes(text)
        return " ".join([*map(quoted, launch.shell), argument])
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines) > 1 and len(lines[-1]) + len(group) < WIDTH:
            lines[-1] += f" {group}"
        else:
            lines.append(f"    {group}")
    return " \\\n".join(lines)


def quoted(word: str) -> str:
    """A word as a shell has to read it, so that references in it are still replaced, and LITERAL is
    a dollar sign.
    """
    if word in SEPARATORS or re.fullmatch(
        r"[\w@%+=:,./${}-]+|\$\{\w+\[@\]\}|\$@", word.replace(LITERAL, " ")
    ):
        return f'"{word}"' if word == "$@" else word
    return (
        _in_double_quotes(word)
        if len(references(word)) > 1
        else shlex.quote(word.replace(LITERAL, "$"))
    )


def _quoted_inside(word: str) -> str:
    """A word as the shell has to read it whose argument the command is: LITERAL is a dollar sign
    that it replaces.
    """
    if len(references(word)) == 1:
        return quoted(word.replace(LITERAL, "$")).replace("$", LITERAL)
    return _in_double_quotes(word, LITERAL)


def _in_double_quotes(text: str, dollar: str = r"\$") -> str:
    """A text in double quotes, its references as they are; dollar: what LITERAL becomes."""
    parts = references(text)
    parts[::2] = [re.sub(r'(["\\])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(parts)}"'.replace(LITERAL, dollar)
