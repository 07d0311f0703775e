"""Tokenize raw text into the indexed datasets that --data-path reads.

    merak-preprocess --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --workers 8
"""

import argparse
import sys
from pathlib import Path

from ..errors import MerakError
from .words import described


def parser() -> argparse.ArgumentParser:
    text = described(__doc__, "merak-preprocess")
    flags = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        help="files of one JSON object per line, .txt files of one document each, either with .gz; or directories",
    )
    add("--json-keys", nargs="+", default=["text"], help="keys to extract; each makes a dataset of its own")
    add("--output-prefix", required=True, help="writes {prefix}_{key}_document.bin and .idx")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--tokenizer-type", required=True, choices=["HuggingFaceTokenizer", "NullTokenizer"])
    add("--tokenizer-model", help="tokenizer.json, or a directory as save_pretrained writes it")
    add("--vocab-size", type=int, help="number of token ids, for NullTokenizer")
    add("--workers", type=int, default=1, help="processes; 1 is this process, with the tokenizer's own threads")
    add("--skip-bad", type=int, default=0, metavar="N", help="leave out up to N documents that cannot be read")
    return flags


def main(arguments: list[str] | None = None) -> int:
    flags = parser()
    options = flags.parse_args(arguments)
    if options.workers < 1 or options.skip_bad < 0:
        flags.error("--workers is at least 1 and --skip-bad at least 0")
    from ..data.preprocess import EncoderConfig, preprocess

    config = EncoderConfig(
        options.tokenizer_type,
        options.tokenizer_model,
        options.vocab_size,
        tuple(options.json_keys),
        options.append_eod,
    )
    try:
        counts = preprocess(options.input, options.output_prefix, config, options.workers, options.skip_bad)
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{counts['documents']} documents, {counts['tokens']} tokens, {counts['skipped']} skipped")
    return 0
