"""Show a training run as one HTML page: loss, learning rate, gradient norm, throughput, pipeline,
memory, settings.

RUN_DIR is what --run-dir of merak-pretrain or merak-pretrain-hf wrote, or the output_dir of a
HuggingFace trainer (MerakTrainer or transformers.Trainer), whose trainer_state.json is read. The
page needs no network and no other file.

examples:
  merak-pretrain ... --run-dir runs/first
  merak-report runs/first                           # writes runs/first/report.html
  merak-report out --output page.html               # a HuggingFace run
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..config.command_line import CommandParser
from ..errors import MerakError
from .door import command
from .words import described, program


def parser() -> CommandParser:
    """The command line."""
    text = described(__doc__, "merak-report")
    flags = CommandParser(
        prog=program(),
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("directory", metavar="RUN_DIR", type=Path, help="directory of the run")
    flags.add_argument("--output", metavar="FILE", help="HTML file to write [RUN_DIR/report.html]")
    return flags


def write(directory: Path, output: Path) -> None:
    """Write the page of a run. Raises a MerakError."""
    from ..report.facts import facts_of
    from ..report.page import page
    from ..training.outputs import check_file

    facts = facts_of(directory)
    check_file("--output", str(output))
    output.write_text(page(facts), encoding="utf-8")


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run merak-report (tools/report.py)."""
    options = parser().parse_args(arguments)
    output = options.directory / "report.html" if options.output is None else Path(options.output)
    try:
        write(options.directory, output)
    except MerakError as error:
        raise SystemExit(f"{program()}: {error}") from None
    print(f"wrote {output}")
