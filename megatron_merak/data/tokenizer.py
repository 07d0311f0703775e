"""Text to token ids and back. Tokenizers are read from local files; nothing here reaches for a
network.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as TokenizerFile

from ..errors import DataError
from .files import regular_file_size

# The token that ends a document, where a bare tokenizer.json leaves unsaid which one does: the
# first that it has.
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


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
    tokenizer_type: str | None, tokenizer_model: str | Path | None, vocab_size: int | None
) -> Tokenizer:
    """The tokenizer that `--tokenizer-type`, `--tokenizer-model` and `--vocab-size` describe.
    Raises `DataError`.
    """
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise DataError(
                "--vocab-size",
                "(missing)",
                "a NullTokenizer needs it",
                "Give the number of token ids",
            )
        return NullTokenizer(vocab_size)
    if tokenizer_type != "HuggingFaceTokenizer":
        raise DataError(
            "--tokenizer-type",
            tokenizer_type,
            "it is unknown",
            "Use HuggingFaceTokenizer or NullTokenizer",
        )
    if tokenizer_model is None:
        raise DataError(
            "--tokenizer-model",
            "(missing)",
            "HuggingFaceTokenizer needs it",
            "Give a tokenizer.json, or a directory that contains one",
        )
    path = Path(tokenizer_model)
    file = tokenizer_file(path)
    return HuggingFaceTokenizer(path) if file is None else FileTokenizer(file)


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


class FileTokenizer:
    """A bare tokenizer.json, through the `tokenizers` library."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._tokenizer = TokenizerFile.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                "--tokenizer-model",
                path,
                f"it cannot be read ({error})",
                "Use a tokenizer.json saved by the tokenizers library",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.pad = None
        self._eod = next((vocabulary[token] for token in EOD_TOKENS if token in vocabulary), None)

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise DataError(
                "--tokenizer-model",
                self.path,
                f"it has none of {', '.join(EOD_TOKENS)} to end a document",
                "Give a directory whose tokenizer_config.json names the eos_token",
            )
        return self._eod

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


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
