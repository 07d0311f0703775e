"""Pages of docs/ taken apart, and the commands and Python lines on them answered as they are here.

python -m tests.pages             writes what the commands of a page print into the page, but those of whole jobs,
                                  and the source that a page quotes: <!-- source: FILE NAME, CLASS.NAME, ... -->
                                  before a block
python -m tests.pages extending   of one page; this one has no commands, and takes a second
"""

import argparse
import ast
import contextlib
import io
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_merak.cli.commands import COMMANDS
from megatron_merak.cli.launcher import FLAG, without_flag
from megatron_merak.cli.pretrain import check_command
from megatron_merak.cli.words import error_text
from megatron_merak.errors import MerakError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
WRITTEN = """index quickstart supported install configuration troubleshooting from_megatron_lm from_huggingface
    comparison api report plans several_hosts""".split()
QUOTING = ("extending",)
SOURCE = "source: "
SMALL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4
    --global-batch-size 32 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 1000"""
TRAINING = {"merak-pretrain": "pretrain", "merak-pretrain-hf": "pretrain-hf"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (.+) -->\n\n$")


@dataclass(frozen=True)
class Block:
    """A code block of a page: its language, text, and the comment in front of it; ``start`` is
    where its text is.
    """

    page: str
    language: str
    text: str
    mark: str
    start: int


def blocks(page: str, language: str = "") -> Iterator[Block]:
    """The code blocks of a page, without the indentation that they have inside lists."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        content = re.sub(rf"^{match.group(1)}", "", match.group(3), flags=re.MULTILINE)
        if language in ("", match.group(2)):
            yield Block(
                page, match.group(2), content, mark.group(1) if mark else "", match.start(3)
            )


def commands(text: str) -> list[str]:
    """Command lines of a shell block, those that end in a backslash joined, without comments and
    variables in front.
    """
    joined = re.sub(r"\\\n\s*", "", text)
    return [
        line.strip()
        for line in joined.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]


def answers(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    found = [
        re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", part, re.DOTALL).groups() for part in parts
    ]
    return [(re.sub(r"\\\n\s*", "", command), output) for command, output in found]


def words(command: str) -> list[str]:
    """A command line as its program gets it; ... stands for the flags of a small model."""
    return shlex.split(command.replace(" ... ", f" {SMALL} ").removesuffix(" ..."), comments=True)


def answer(command: str) -> str:
    """What a command says that ends before ranks are started, as its first rank or the command
    itself prints it.
    """
    program, *given = words(command)
    if program in TRAINING:
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(FLAG, type=int, default=1)
        ranks = finder.parse_known_args(given)[0].nproc_per_node
        try:
            check_command(TRAINING[program], without_flag(given), ranks)
        except MerakError as error:
            return f"{error_text(error)}\n"
        return ""
    module, _, function = COMMANDS[program.removeprefix("merak-")].target.partition(":")
    main = getattr(__import__(module, fromlist=[function]), function)
    started = sys.argv
    sys.argv = [program]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(given)
        except SystemExit as end:
            return f"{out.getvalue()}{end.code or ''}\n"
        finally:
            sys.argv = started
    return out.getvalue()


def shown(block: Block) -> str:
    """A console block as it has to be: its commands, with what they say now. A block whose output
    begins with ... has the last lines of it, as many as it has now."""
    lines = []
    for part in re.split(r"^(?=\$ )", block.text, flags=re.MULTILINE)[1:]:
        ((command, output),) = answers(part)
        typed = part.removesuffix(output) if output else part
        now = answer(command)
        if output.startswith("...\n"):
            now = (
                "...\n"
                + "\n".join(now.rstrip("\n").splitlines()[1 - len(output.splitlines()) :])
                + "\n"
            )
        lines.append(typed + now)
    return "".join(lines)


def quoted(block: Block) -> str:
    """The source that a block must show: the definitions that its mark names."""
    file, names = block.mark.removeprefix(SOURCE).split(" ", 1)
    text = (ROOT / file).read_text(encoding="utf-8")
    parts = []
    for name in names.split(", "):
        node = ast.parse(text)
        for part in name.split("."):
            node = next(each for each in node.body if part in _defined(each))
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        last = node.end_lineno + (_help_lines(text, node) if isinstance(node, ast.AnnAssign) else 0)
        parts.append(textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : last])))
    return "\n\n".join(parts)


def _help_lines(text: str, field: ast.AnnAssign) -> int:
    """How many lines the string below a field has."""
    below = "".join(text.splitlines(keepends=True)[field.end_lineno :])
    match = re.match(r' *""".*?"""\n', below, re.DOTALL)
    return match[0].count("\n") if match else 0


def _defined(node: ast.stmt) -> list[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", ())
    return [
        getattr(node, "name", ""),
        *(target.id for target in targets if isinstance(target, ast.Name)),
    ]


def prepare() -> None:
    """Write the files that pages show and name into this folder: those with their names in a
    comment in front, and the plan of the small model on two tensor-parallel ranks x two stages."""
    for block in (block for page in WRITTEN for block in blocks(page)):
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
    layout = "--world-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    answer(f"merak-plan show ... {layout} --save plan.json")


def rewrite(pages: Sequence[str]) -> None:
    """Write what commands print, and the source that is quoted, into these pages."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        if any(page in WRITTEN for page in pages):
            prepare()
        for page in pages:
            path = DOCS / f"{page}.md"
            text = path.read_text(encoding="utf-8")
            for block in reversed([*blocks(page)]):
                if block.mark.startswith(SOURCE):
                    now = quoted(block)
                elif block.language == "console" and not block.mark.startswith("run"):
                    now = shown(block)
                else:
                    continue
                text = text[: block.start] + now + text[block.start + len(block.text) :]
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    every = (*WRITTEN, *QUOTING)
    parser = argparse.ArgumentParser(prog="python -m tests.pages")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(every)} [all]")
    pages = parser.parse_args().pages or every
    if unknown := [page for page in pages if page not in every]:
        parser.error(f"no page {', '.join(unknown)}")
    rewrite(pages)
