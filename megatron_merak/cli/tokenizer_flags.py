"""The flags of a tokenizer, for the commands that have no configuration of a run."""

import argparse
from typing import TYPE_CHECKING, NamedTuple

from ..config.sections import DataConfig
from ..config.tokenizers import (
    TIKTOKEN_PATTERNS,
    TOKENIZERS,
    check_given,
    check_needed,
)

if TYPE_CHECKING:
    from ..data.tokenizer import TokenizerDetails


class TokenizerFlags(NamedTuple):
    """The values of a command's flags, as `data.tokenizer.build_tokenizer` takes them."""

    kind: str | None
    model: str | None
    vocab_size: int | None
    vocab_file: str | None
    merge_file: str | None
    pattern: str
    special: int


def add_tokenizer_flags(parser: argparse.ArgumentParser, required: bool) -> None:
    add = parser.add_argument
    add(
        "--tokenizer-type",
        required=required,
        choices=list(TOKENIZERS),
        help="kind of tokenizer, by Megatron-LM's names",
    )
    add(
        "--tokenizer-model",
        help="tokenizer.json, or a directory written by save_pretrained; a .model file of "
        "sentencepiece; a .json vocabulary for TikTokenizer",
    )
    add("--vocab-file", help="vocab.json, for GPT2BPETokenizer")
    add("--merge-file", help="merges.txt, for GPT2BPETokenizer")
    add("--vocab-size", type=int, help="number of token ids, for NullTokenizer and TikTokenizer")
    add(
        "--tiktoken-pattern",
        choices=TIKTOKEN_PATTERNS,
        default=DataConfig.tiktoken_pattern,
        help="how TikTokenizer cuts text into words",
    )
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        default=DataConfig.tiktoken_num_special_tokens,
        metavar="N",
        help="ids before those of TikTokenizer's vocabulary",
    )


def tokenizer_flags(options: argparse.Namespace) -> TokenizerFlags:
    """Return the values of the flags. Raises `ConfigError` for one too few or too many."""
    flags = TokenizerFlags(
        options.tokenizer_type,
        options.tokenizer_model,
        options.vocab_size,
        options.vocab_file,
        merge_file=options.merge_file,
        pattern=options.tiktoken_pattern,
        special=options.tiktoken_num_special_tokens,
    )
    given = {
        "--tokenizer-model": flags.model,
        "--vocab-file": flags.vocab_file,
        "--merge-file": flags.merge_file,
    }
    check_given(flags.kind, given)
    if flags.kind is not None:
        check_needed(flags.kind, {**given, "--vocab-size": flags.vocab_size})
    return flags


def details(flags: TokenizerFlags) -> "TokenizerDetails":
    """Return what the tokenizer is made from beside a model and a size."""
    from ..data.tokenizer import TokenizerDetails

    return TokenizerDetails(flags.vocab_file, flags.merge_file, flags.pattern, flags.special)
