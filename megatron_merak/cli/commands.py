"""Every command by name, and ``python -m megatron_merak``, which lists and starts them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from .. import __version__
from ..config import nearest
from ..errors import ConfigError
from .door import command

MODULE = "python -m megatron_merak"


@dataclass(frozen=True)
class Command:
    """A command: the function that it runs, as "module:function", and a short description."""

    target: str
    text: str


# The entry point of each command is merak-NAME (pyproject.toml).
COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "pretrain": Command("megatron_merak.cli.pretrain:gpt", "pretrain a GPT (pretrain_gpt.py)"),
        "pretrain-hf": Command(
            "megatron_merak.cli.pretrain:hf", "train a HuggingFace language model (pretrain_hf.py)"
        ),
        "preprocess": Command(
            "megatron_merak.cli.preprocess_data:main", "tokenize text into indexed datasets"
        ),
        "launch": Command(
            "megatron_merak.cli.launch:main",
            "start the ranks of a script or job; one with parameter servers survives failed ranks",
        ),
        "plan": Command(
            "megatron_merak.cli.plan:main",
            "search the fastest plan; show how a training command would run, or a stored plan",
        ),
        "memory": Command(
            "megatron_merak.cli.report_memory:main", "show what fills the memory of every rank"
        ),
        "simulate": Command(
            "megatron_merak.cli.simulate:main", "simulate pipeline schedules and plans"
        ),
        "from-megatron": Command(
            "megatron_merak.cli.from_megatron:main",
            "convert a launch script of Megatron-LM, and say what changed",
        ),
        "report": Command("megatron_merak.cli.report:main", "show a training run as one HTML page"),
        "verify": Command(
            "megatron_merak.cli.verify:main", "compare checkpoints with their manifests"
        ),
        "inspect": Command(
            "megatron_merak.cli.inspect_checkpoint:main",
            "show what is in a checkpoint, or what differs between two",
        ),
        "convert": Command(
            "megatron_merak.cli.convert:main", "convert weights from and to HuggingFace directories"
        ),
        "preflight": Command(
            "megatron_merak.cli.preflight:main",
            "let all ranks of a job meet before it starts: slow hosts and links, clocks, versions",
        ),
        "probe": Command(
            "megatron_merak.cli.probe:main",
            "measure products, attention, passes and links of this machine, for plans",
        ),
        "doctor": Command(
            "megatron_merak.cli.doctor:main",
            "show which kernels and backends are active, and why others are not",
        ),
    }
)


def listing() -> str:
    """Return the list of commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.text}" for name, command in COMMANDS.items()]
    head = [
        f"megatron_merak {__version__}",
        "",
        f"usage: {MODULE} COMMAND ...      (or merak-COMMAND ...)",
        "",
    ]
    return "\n".join([*head, *lines, "", f"{MODULE} COMMAND --help shows the flags of a command."])


@command
def _list(_words: Sequence[str] | None) -> None:
    print(listing())


@command
def _version(_words: Sequence[str] | None) -> None:
    print(__version__)


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command named by the first argument with the other arguments; return its
    exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        return _list([])
    if words[0] == "--version":
        return _version([])
    if words[0] not in COMMANDS:
        close = nearest(words[0], COMMANDS)
        remedy = f"The nearest is {close}" if close else f"{MODULE} lists them"
        sys.stderr.write(f"{ConfigError('command', words[0], 'is not known', remedy)}\n")
        return 2
    module, _, function = COMMANDS[words[0]].target.partition(":")
    sys.argv = [f"{MODULE} {words[0]}", *words[1:]]
    return getattr(import_module(module), function)(words[1:])
