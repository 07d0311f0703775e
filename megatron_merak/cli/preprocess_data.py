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
from ..config.settings import nearest
from ..counting import counted
from ..errors import ConfigError, MerakError
from ..megatron_flags import (
    PREPROCESSING_REFUSED,
    PREPROCESSING_TAKEN,
    remedy,
    without_effect,
)
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
    flags = CommandParser(
        answer=_of_megatron,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        help="keys to extract; each key becomes a separate dataset (default: text; with --chat: "
        "messages)",
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
    add(
        "--chat",
        action="store_true",
        help="documents are conversations, lists of messages with role and content: write them by "
        "the tokenizer's chat template for merak-pretrain-hf --sft",
    )
    add(
        "--chat-template",
        metavar="FILE",
        type=Path,
        help="with --chat: a template in place of the tokenizer's",
    )
    add_tokenizer_flags(flags, required=True)
    add(
        "--workers",
        type=int,
        default=1,
        help="number of processes; 1 uses this process with the tokenizer's own threads",
    )
    add(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="write documents in the order that Megatron-LM's tool with N partitions gives: the "
        "first of every N, then the second of every N, and so on; the inputs are read N times",
    )
    add(
        "--keep-sequential-samples",
        action="store_true",
        help="keep the order of the inputs with --partitions, too, and read them once",
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


def _of_megatron(name: str) -> ConfigError | None:
    """Return the error of a flag that Megatron-LM's tool has; None: it has none of that name."""
    if name in PREPROCESSING_TAKEN and name not in PREPROCESSING_REFUSED:
        why = PREPROCESSING_TAKEN[name].why
        return ConfigError(name, "(no value)", "it has one", f"Leave it out: {why}")
    instead = PREPROCESSING_REFUSED.get(name) or remedy(name)
    if instead is None:
        return None
    reason = "is a Megatron-LM flag that megatron_merak does not have yet"
    return ConfigError("flag", name, reason, instead)


def _chat(options: argparse.Namespace) -> str | None:
    """Complete the keys of a command line; return the template that it names. Raises ConfigError."""
    if options.json_keys is None:
        options.json_keys = ["messages" if options.chat else "text"]
    if not options.chat and options.chat_template is not None:
        reason = "has no effect without --chat"
        remedy = "Add --chat, or leave it out"
        raise ConfigError("--chat-template", options.chat_template, reason, remedy)
    if options.chat and len(options.json_keys) > 1:
        reason = "conversations are under one key"
        raise ConfigError("--json-keys", " ".join(options.json_keys), reason, "Give one")
    if options.chat and options.append_eod:
        reason = "the chat template writes the ends of conversations"
        raise ConfigError("--append-eod", "on", reason, "Leave it out")
    if options.chat_template is None:
        return None
    try:
        return options.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(
            "--chat-template", options.chat_template, reason, "Name a file with a template"
        ) from error


@command
def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _TOOLS:
        return _TOOLS[words[0]](words[1:])
    flags = parser()
    if words and not words[0].startswith("-"):
        close = nearest(words[0], _TOOLS)
        remedy = f"The nearest is {close}" if close else "Leave it out to tokenize text"
        flags.end(ConfigError("command", words[0], f"it is none of {', '.join(_TOOLS)}", remedy))
    words, notices = without_effect(words, PREPROCESSING_TAKEN)
    options = flags.parse_args(words)
    print("".join(f"{notice}\n" for notice in notices), end="", file=sys.stderr)
    numbers = (
        ("--workers", options.workers, 1),
        ("--skip-bad", options.skip_bad, 0),
        ("--partitions", options.partitions, 1),
    )
    for flag, value, least in numbers:
        if value < least:
            flags.end(ConfigError(flag, value, f"it is below {least}", f"Give at least {least}"))
    try:
        tokenizer = tokenizer_flags(options)
        template = _chat(options)
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
        chat=options.chat,
        chat_template=template,
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
            partitions=1 if options.keep_sequential_samples else options.partitions,
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
