"""Tokenize raw text into the indexed datasets that --data-path reads.

    merak-preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json \\
        --append-eod --workers 8

A run that was killed goes on where it was, started again with the same command.

    merak-preprocess merge --input a b --output-prefix c    indexed datasets as one
    merak-preprocess inspect PREFIX                         what is in one
    merak-preprocess verify PREFIX                          whether one is sound
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from ..config.command_line import CommandParser
from ..counting import counted
from ..errors import ConfigError, MerakError
from . import datasets
from .door import command
from .tokenizer_flags import add_tokenizer_flags, details, tokenizer_flags
from .words import described

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended
_TOOLS = MappingProxyType(
    {"merge": datasets.merge, "inspect": datasets.inspect, "verify": datasets.verify}
)


def parser() -> CommandParser:
    text = described(__doc__, "merak-preprocess")
    flags = CommandParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        help="files with one JSON object per line, .txt files with one document each (both may be "
        ".gz or .zst), .parquet files, directories that save_to_disk of datasets wrote, or "
        "directories of these",
    )
    add(
        "--input-split",
        metavar="NAME",
        help="which split of a saved DatasetDict; needed where it has several",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys to extract; each key becomes a separate dataset",
    )
    add(
        "--output-prefix",
        required=True,
        help="prefix of the output files {prefix}_{key}_document.bin and .idx",
    )
    add(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to every document",
    )
    add_tokenizer_flags(flags, required=True)
    add(
        "--workers",
        type=int,
        default=1,
        help="number of processes; 1 uses this process with the tokenizer's own threads",
    )
    add(
        "--skip-bad",
        type=int,
        default=0,
        metavar="N",
        help="skip up to N documents that cannot be read",
    )
    add(
        "--overwrite",
        action="store_true",
        help="begin anew, whatever another command left unfinished under this prefix",
    )
    return flags


@command
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _TOOLS:
        return _TOOLS[words[0]](words[1:])
    flags = parser()
    options = flags.parse_args(words)
    numbers = (("--workers", options.workers, 1), ("--skip-bad", options.skip_bad, 0))
    for flag, value, least in numbers:
        if value < least:
            flags.end(ConfigError(flag, value, f"it is below {least}", f"Give at least {least}"))
    try:
        tokenizer = tokenizer_flags(options)
    except ConfigError as error:
        flags.end(error)
    from ..data.preprocess import EncoderConfig, preprocess
    from ..training.outputs import check_directory

    config = EncoderConfig(
        tokenizer.kind,
        tokenizer.model,
        tokenizer.vocab_size,
        tuple(options.json_keys),
        append_eod=options.append_eod,
        details=details(tokenizer),
    )
    try:
        prefix = options.output_prefix
        check_directory("--output-prefix", prefix, Path(prefix).parent, "its directory")
        counts = preprocess(
            options.input,
            options.output_prefix,
            config,
            options.workers,
            skip_bad=options.skip_bad,
            split=options.input_split,
            overwrite=options.overwrite,
        )
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from what is sealed", file=sys.stderr)
        return INTERRUPTED
    documents = counted(counts["documents"], "document")
    tokens = counted(counts["tokens"], "token")
    print(f"{documents}, {tokens}, {counts['skipped']:,} skipped")
    for key in options.json_keys:
        print(f"wrote {options.output_prefix}_{key}_document.bin and .idx")
    return 0
