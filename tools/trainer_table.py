"""Write docs/trainer.md: what of ``transformers.Trainer`` and ``TrainingArguments`` is the same
here, differs or is refused. The rows are the installed transformers' names, what is said of them is
in the code's own tables.

python tools/trainer_table.py --write
"""

import argparse
import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DOCUMENT = ROOT / "docs" / "trainer.md"
HEAD = "<!-- written by tools/trainer_table.py --write -->"
Row = tuple[str, str, str]


def attributes(kind: type) -> set[str]:
    """The names that methods of ``kind`` set on ``self``."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(kind)))
    body = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    stored = (
        node
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return {
        node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def trainer_rows() -> list[Row]:
    """(name, how it stands, what is said of it) of every public name of ``Trainer`` and its
    instances.
    """
    from transformers import Trainer

    from megatron_merak.hf_trainer import overrides

    parameters = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    names = sorted(
        name
        for name in {*dir(Trainer), *attributes(Trainer), *parameters}
        if not name.startswith("_")
    )
    names += ["_get_train_sampler", "_get_eval_sampler"]
    return [
        _row(name, overrides.REFUSED, overrides.DIFFERENT, name in _refused()) for name in names
    ]


def _refused() -> set[str]:
    from megatron_merak.hf_trainer import overrides
    from megatron_merak.hf_trainer.trainer import MerakTrainer

    return {
        name for name, value in vars(MerakTrainer).items() if isinstance(value, overrides.Refused)
    }


def argument_rows() -> list[Row]:
    """The same of every field of ``TrainingArguments``."""
    from transformers import TrainingArguments

    from megatron_merak.hf_trainer import overrides
    from megatron_merak.hf_trainer.arguments import fields

    reasons = {name: overrides.Reason(*told) for name, told in fields.REFUSED.items()}
    names = sorted(field.name for field in dataclasses.fields(TrainingArguments))
    refused = [name not in fields.HONOURED for name in names]
    return [_row(n, reasons, fields.DIFFERENT, no) for n, no in zip(names, refused, strict=True)]


def _row(name: str, reasons: dict, different: dict[str, str], refused: bool) -> Row:
    from megatron_merak.hf_trainer import overrides

    if refused:
        reason = reasons.get(name, overrides.OTHER)
        return name, "refused", f"{reason.why}. {reason.instead}."
    return (name, "different", different[name]) if name in different else (name, "same", "")


def table(rows: Iterable[Row]) -> str:
    lines = [f"| `{name}` | {how} | {told[:1].upper()}{told[1:]} |" for name, how, told in rows]
    return "\n".join(["| name | | |", "|---|---|---|", *lines])


def document() -> str:
    """All of docs/trainer.md: what is written by hand above ``HEAD``, and the tables."""
    hand = DOCUMENT.read_text(encoding="utf-8").split(HEAD)[0]
    parts = (hand + HEAD, "## transformers.Trainer", table(trainer_rows()))
    return "\n\n".join((*parts, "## transformers.TrainingArguments", table(argument_rows()))) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/trainer.md instead of printing it"
    )
    if parser.parse_args().write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        print(f"wrote {DOCUMENT}")
    else:
        print(document())
