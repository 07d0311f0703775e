"""The kinds of tokenizers, by Megatron-LM's names, and the flags that each is made from."""

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ConfigError

_SENTENCEPIECE = MappingProxyType({"--tokenizer-model": "Give the .model file of sentencepiece"})
# Kind -> the flags that it needs, and what they are to be given. --tiktoken-* and --vocab-size may
# stand beside any kind, as in Megatron-LM.
TOKENIZERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "HuggingFaceTokenizer": MappingProxyType(
            {"--tokenizer-model": "Give the tokenizer's directory or tokenizer.json"}
        ),
        "GPT2BPETokenizer": MappingProxyType(
            {
                "--vocab-file": "Give the vocab.json of the vocabulary",
                "--merge-file": "Give the merges.txt of the vocabulary",
            }
        ),
        "SentencePieceTokenizer": _SENTENCEPIECE,
        "GPTSentencePieceTokenizer": _SENTENCEPIECE,
        "Llama2Tokenizer": _SENTENCEPIECE,
        "TikTokenizer": MappingProxyType(
            {"--tokenizer-model": "Give the .json file of the vocabulary"}
        ),
        "NullTokenizer": MappingProxyType(
            {"--vocab-size": "Give the number of token ids in the data"}
        ),
    }
)
FILES = ("--tokenizer-model", "--vocab-file", "--merge-file")
TIKTOKEN_PATTERNS = ("v1", "v2")


def check_given(kind: str | None, given: Mapping[str, object]) -> None:
    """Raise ConfigError for a file that no tokenizer of this kind reads.

    given: the value of each flag of `FILES`; None: it was not given.
    """
    for flag in FILES:
        value = given[flag]
        if value is None or (kind is not None and flag in TOKENIZERS[kind]):
            continue
        readers = [name for name, needed in TOKENIZERS.items() if flag in needed]
        *others, last = readers
        several = f"{', '.join(others)} or " if others else ""
        these = "one of these types" if others else "this type"
        reason = f"is read only with --tokenizer-type {several}{last}"
        raise ConfigError(flag, value, reason, f"Give {these}, or leave it out")


def check_needed(kind: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError for a flag that a tokenizer of this kind needs and that is not given."""
    for flag, remedy in TOKENIZERS[kind].items():
        if given[flag] is None:
            reason = f"is needed with --tokenizer-type {kind}"
            raise ConfigError(flag, "(missing)", reason, remedy)
