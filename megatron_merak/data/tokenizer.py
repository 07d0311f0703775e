"""Text to token ids and back. Tokenizers are read from local files; nothing here reaches for a
network.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..config import DataConfig
from ..config.tokenizers import TOKENIZERS
from ..errors import DataError
from .fast_tokenizer import FileTokenizer, gpt2_tokenizer
from .files import regular_file_size
from .sentencepiece_tokenizer import SentencePieceTokenizer
from .tiktoken_tokenizer import TikTokenizer

Value = TypeVar("Value")
NUMBERS = "NullTokenizer"
_TEXTS = (".json", ".txt", ".model")  # in a directory of transformers, what a tokenizer reads
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


@dataclass(frozen=True)
class TokenizerDetails:
    """What some tokenizers are made from beside a model and a size.

    vocab_file, merge_file: of GPT2BPETokenizer.
    tiktoken_pattern, tiktoken_special_tokens: of TikTokenizer; ids before those of its file.
    """

    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_special_tokens: int = 1000


DEFAULTS = TokenizerDetails()


class Tokenizer(Protocol):
    """`vocab_size` is one more than the largest id; `pad` is None where there is none or where it
    is also `eod`, so that padding can never hide a document's end. `eod` raises `DataError` where
    the tokenizer has none."""

    vocab_size: int

    @property
    def pad(self) -> int | None: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`, without any special token added."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


def build_tokenizer(
    tokenizer_type: str | None,
    tokenizer_model: str | Path | None,
    vocab_size: int | None,
    details: TokenizerDetails = DEFAULTS,
) -> Tokenizer:
    """Return the tokenizer that the flags of a command describe. Raises `DataError`."""
    if tokenizer_type == NUMBERS:
        return NullTokenizer(_given("--vocab-size", vocab_size, NUMBERS))
    if tokenizer_type == "GPT2BPETokenizer":
        return gpt2_tokenizer(
            Path(_given("--vocab-file", details.vocab_file, tokenizer_type)),
            Path(_given("--merge-file", details.merge_file, tokenizer_type)),
        )
    if tokenizer_type is None or tokenizer_type not in TOKENIZERS:
        remedy = f"Use {' or '.join(TOKENIZERS)}"
        raise DataError("--tokenizer-type", tokenizer_type, "it is unknown", remedy)
    model = None if tokenizer_model is None else str(tokenizer_model)
    path = Path(_given("--tokenizer-model", model, tokenizer_type))
    if tokenizer_type in _SENTENCEPIECE:
        return SentencePieceTokenizer(path)
    if tokenizer_type == "TikTokenizer":
        pattern = details.tiktoken_pattern
        return TikTokenizer(path, pattern, details.tiktoken_special_tokens, vocab_size)
    file = tokenizer_file(path)
    return HuggingFaceTokenizer(path) if file is None else FileTokenizer(file)


def _given(flag: str, value: Value | None, kind: str) -> Value:
    if value is None:
        remedy = TOKENIZERS[kind][flag]
        raise DataError(flag, "(missing)", f"{kind} needs it", remedy)
    return value


def details_of(data: DataConfig) -> TokenizerDetails:
    """Return what a run's tokenizer is made from beside --tokenizer-model and --vocab-size."""
    return TokenizerDetails(
        data.vocab_file,
        data.merge_file,
        data.tiktoken_pattern,
        data.tiktoken_num_special_tokens,
    )


def tokenizer_paths(
    tokenizer_type: str | None, tokenizer_model: str | Path | None, details: TokenizerDetails
) -> list[Path]:
    """Return the files that say how text is cut and numbered. Raises `DataError` where one is
    missing.
    """
    if tokenizer_type == "HuggingFaceTokenizer" and tokenizer_model is not None:
        file = tokenizer_file(Path(tokenizer_model))
        if file is not None:
            return [file]
        entries = sorted(Path(tokenizer_model).iterdir())
        return [each for each in entries if each.is_file() and each.suffix in _TEXTS]
    named = (
        ("--tokenizer-model", tokenizer_model),
        ("--vocab-file", details.vocab_file),
        ("--merge-file", details.merge_file),
    )
    needed = {} if tokenizer_type is None else TOKENIZERS[tokenizer_type]
    paths = [(flag, Path(path)) for flag, path in named if path is not None and flag in needed]
    for flag, path in paths:
        regular_file_size(path, flag, flag)
    return [path for _, path in paths]


def tokenizer_file(path: Path) -> Path | None:
    """Return the bare tokenizer.json that ``--tokenizer-model`` names; None: a directory of
    transformers. Raises `DataError` where neither is there.
    """
    settings = ("tokenizer_config.json", "config.json")
    if path.is_dir() and any((path / name).exists() for name in settings):
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    regular_file_size(file, "--tokenizer-model", "--tokenizer-model")
    return file


class HuggingFaceTokenizer:
    """A tokenizer directory, through `transformers.AutoTokenizer`; code in the directory is not
    run.
    """

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self.path = path
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a damaged file makes the library raise
            raise DataError(
                "--tokenizer-model",
                path,
                f"it cannot be read ({error})",
                "Use a directory written by save_pretrained",
            ) from error
        ids = self._tokenizer.get_vocab().values()
        self.vocab_size = max(ids, default=-1) + 1
        self.of_transformers: Any = self._tokenizer  # which has a chat template
        pad = self._tokenizer.pad_token_id
        self.pad = None if pad == self._tokenizer.eos_token_id else pad

    @property
    def eod(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                "--tokenizer-model",
                self.path,
                "it has no eos_token to end a document",
                "Name one in its tokenizer_config.json",
            )
        return self._tokenizer.eos_token_id

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return (
            self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            if texts
            else []
        )

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class NullTokenizer:
    """Text is already token ids, in decimal and between blanks. As in Megatron-LM, `vocab_size` ids
    plus one for the end of a document: the model's vocabulary is one larger than `--vocab-size`."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.pad = None

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not word.isascii() or not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(
                    "token",
                    json.dumps(word[:40]),
                    f"it is not a number below {self.vocab_size}",
                    "Raise --vocab-size, or use a tokenizer that reads text",
                )
            ids.append(int(word))
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)
