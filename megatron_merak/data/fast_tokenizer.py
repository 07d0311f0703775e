"""Tokenizers of the `tokenizers` library: a tokenizer.json, or the two files of GPT-2's."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

from ..errors import DataError
from .files import regular_file_size

# The token that ends a document, where a bare tokenizer.json leaves unsaid which one does: the
# first that it has.
EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class FastTokenizer:
    """A tokenizer of the library.

    path: what it was made from, for errors.
    """

    pad = None

    def __init__(self, tokenizer: TokenizerFile, path: Path):
        self.path = path
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
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
        # `encode` would find the place of each token in the text too, at two thirds of the speed
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class FileTokenizer(FastTokenizer):
    """A bare tokenizer.json."""

    def __init__(self, path: Path):
        try:
            tokenizer = TokenizerFile.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                "--tokenizer-model",
                path,
                f"it cannot be read ({error})",
                "Use a tokenizer.json saved by the tokenizers library",
            ) from error
        super().__init__(tokenizer, path)


def gpt2_tokenizer(vocab_file: Path, merge_file: Path) -> FastTokenizer:
    """Return the byte-level tokenizer of a vocab.json and a merges.txt, as transformers'
    GPT2Tokenizer makes it. Raises `DataError`.
    """
    for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        regular_file_size(path, flag, flag)
    try:
        ids = json.loads(vocab_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_gpt2("--vocab-file", vocab_file, str(error)) from error
    if not isinstance(ids, dict) or EOD_TOKENS[0] not in ids:
        reason = f"it is no table of tokens that has {EOD_TOKENS[0]}"
        raise _not_gpt2("--vocab-file", vocab_file, reason)
    try:
        vocabulary, merges = models.BPE.read_file(str(vocab_file), str(merge_file))
        model = models.BPE(
            vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
    except Exception as error:  # the library raises nothing narrower
        raise _not_gpt2("--merge-file", merge_file, f"with {vocab_file}: {error}") from error
    tokenizer = TokenizerFile(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOD_TOKENS[0], normalized=False, special=True)])
    return FastTokenizer(tokenizer, vocab_file)


def _not_gpt2(flag: str, path: Path, reason: str) -> DataError:
    remedy = "Give the vocab.json and the merges.txt of one byte-level vocabulary, as GPT-2's"
    return DataError(flag, path, f"it cannot be read ({reason})", remedy)
