"""What merak-preprocess does with datasets that are tokenized already: merge, inspect, verify."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config.command_line import CommandParser
from ..counting import counted
from ..errors import ConfigError, DataError
from .tokenizer_flags import add_tokenizer_flags, details, tokenizer_flags
from .words import program

_WIDTH = 40  # of the longest bar


def merge(words: Sequence[str]) -> int:
    """Run merak-preprocess merge."""
    parser = _parser("merge", "Write several indexed datasets as one, document after document.")
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="prefixes of .bin and .idx files, or directories of them, in this order",
    )
    add("--output-prefix", required=True, help="prefix of the files that are written")
    options = parser.parse_args(words)
    from ..data.dataset_facts import dataset_facts
    from ..data.merge import dataset_prefixes
    from ..data.merge import merge as merged
    from ..training.outputs import check_directory

    prefix = options.output_prefix
    check_directory("--output-prefix", prefix, Path(prefix).parent, "its directory")
    prefixes = dataset_prefixes(options.input)
    facts = dataset_facts(merged(prefixes, prefix))
    told = f"{counted(facts['documents'], 'document')}, {counted(facts['tokens'], 'token')}"
    print(f"{told} of {counted(len(prefixes), 'dataset')}")
    print(f"wrote {prefix}.bin and .idx")
    return 0


def inspect(words: Sequence[str]) -> int:
    """Run merak-preprocess inspect."""
    parser = _parser("inspect", "Show what is in an indexed dataset; with a tokenizer, as text.")
    parser.add_argument("prefix", metavar="PREFIX", help="of its .bin and .idx files")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_tokenizer_flags(parser, required=False)
    options = parser.parse_args(words)
    try:
        tokenizer = tokenizer_flags(options)
    except ConfigError as error:
        parser.end(error)
    from ..data.dataset_facts import dataset_facts
    from ..data.indexed_dataset import IndexedDataset
    from ..data.prefixes import check_dataset
    from ..data.tokenizer import build_tokenizer

    check_dataset(options.prefix, "PREFIX")
    facts = dataset_facts(IndexedDataset(options.prefix))
    if tokenizer.kind is not None:
        built = build_tokenizer(
            tokenizer.kind, tokenizer.model, tokenizer.vocab_size, details(tokenizer)
        )
        ids = facts["first_document"]
        largest = max(ids, default=-1)
        if largest >= built.vocab_size:
            reason = f"the first document has id {largest}, it has {built.vocab_size} ids"
            remedy = "Give the tokenizer that wrote the data"
            raise DataError("--tokenizer-type", tokenizer.kind, reason, remedy)
        facts["first_document_text"] = built.detokenize(ids)
    if options.json:
        print(json.dumps(facts))
        return 0
    size = f"{facts['dtype']}, {facts['bytes']:,} bytes"
    print(
        f"{options.prefix}: {counted(facts['documents'], 'document')}, "
        f"{counted(facts['sequences'], 'sequence')}, {counted(facts['tokens'], 'token')} ({size})"
    )
    most = max((count for _, _, count in facts["lengths"]), default=1)
    print("tokens of a sequence")
    for low, high, count in facts["lengths"]:
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        print(f"  {span:>24}  {count:>12,}  {'#' * max(1, round(_WIDTH * count / most))}")
    print("first document")
    text = facts.get("first_document_text")
    shown = " ".join(map(str, facts["first_document"])) if text is None else text
    print("\n".join(f"  {line}" for line in shown.splitlines()))
    return 0


def verify(words: Sequence[str]) -> int:
    """Run merak-preprocess verify."""
    parser = _parser(
        "verify",
        "Read indexed datasets as a whole: sizes, pointers, and ids. The exit status is 1 if one "
        "is damaged.",
    )
    parser.add_argument("prefix", nargs="+", metavar="PREFIX", help="of .bin and .idx files")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="every id is to be below it")
    parser.add_argument("--chat", action="store_true", help="they have conversations")
    options = parser.parse_args(words)
    if options.vocab_size is not None and options.vocab_size < 1:
        parser.end(ConfigError("--vocab-size", options.vocab_size, "it is below 1", "Give more"))
    from ..data.dataset_check import MOST, faults
    from ..data.indexed_dataset import IndexedDataset

    status = 0
    for prefix in options.prefix:
        found = faults(prefix, options.vocab_size, options.chat)
        for fault in found:
            print(f"{prefix}: {fault}", file=sys.stderr)
        if len(found) == MOST:
            print(f"{prefix}: and perhaps more: {MOST} places are named", file=sys.stderr)
        if found:
            status = 1
        else:
            dataset = IndexedDataset(prefix)
            documents = counted(len(dataset.document_indices) - 1, "document")
            print(f"{prefix}: sound, {documents}, {counted(len(dataset), 'sequence')}")
    return status


def _parser(name: str, text: str) -> CommandParser:
    return CommandParser(
        prog=f"{program()} {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
