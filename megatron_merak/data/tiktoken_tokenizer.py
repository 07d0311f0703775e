"""A vocabulary of tiktoken, in the JSON file that Megatron-LM reads: a list of
{"rank": 0, "token_bytes": "AA==", "token_str": ...}, the 256 bytes first.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ..errors import DataError
from ..extras import installed_by, is_installed
from .files import regular_file_size

# Megatron-LM's: the ids from 0 on, as far as they are not <SPECIAL_7> and so on.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
LARGEST = 1 << 17  # ids, where --vocab-size does not say how many

_WORD = r"[^\r\n\p{L}\p{N}]?"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_BLANKS = r"\s+(?!\S)|\s+"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "v1": rf"{_WORD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_BLANKS}",
        "v2": rf"{_WORD}[{_UPPER}]*[{_LOWER}]+|{_WORD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_BLANKS}",
    }
)


class TikTokenizer:
    """Special tokens have the first ids, those of the file follow. A special token's name in a text
    is that token, as in Megatron-LM. Raises `DataError`.

    pattern:    of `PATTERNS`.
    special:    number of ids before those of the file.
    vocab_size: number of all ids; None: as many as the file has, at most `LARGEST`.
    """

    def __init__(self, path: Path, pattern: str, special: int, vocab_size: int | None):
        regular_file_size(path, "--tokenizer-model", "--tokenizer-model")
        if not is_installed("tiktoken"):
            remedy = f"Install it: {installed_by('tokenizers')}"
            raise DataError("--tokenizer-model", path, "tiktoken is not installed", remedy)
        import tiktoken

        if special < len(SPECIAL_TOKENS):
            reason = f"there are the tokens {', '.join(SPECIAL_TOKENS)}"
            remedy = f"Give at least {len(SPECIAL_TOKENS)}"
            raise DataError("--tiktoken-num-special-tokens", special, reason, remedy)
        tokens = _ranked(path)
        self.vocab_size = min(LARGEST, special + len(tokens)) if vocab_size is None else vocab_size
        wanted = self.vocab_size - special
        if not 256 <= wanted <= len(tokens):
            reason = f"{special} special tokens and the {len(tokens)} of {path} are less"
            if wanted < 256:
                reason = f"{special} special tokens leave no place for the 256 bytes"
            remedy = f"Use a value from {special + 256} to {special + len(tokens)}"
            raise DataError("--vocab-size", self.vocab_size, reason, remedy)
        names = list(SPECIAL_TOKENS)
        names += [f"<SPECIAL_{number}>" for number in range(len(names), special)]
        self.eod = names.index("</s>")
        self.pad = names.index("<pad>")
        self._encoding = tiktoken.Encoding(
            path.stem,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: at + special for at, token in enumerate(tokens[:wanted])},
            special_tokens={name: at for at, name in enumerate(names)},
        )

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_batch(list(texts), allowed_special="all")

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(each) for each in ids])


def _ranked(path: Path) -> list[bytes]:
    """Return the tokens of a file in the order of their ranks."""
    try:
        rows = json.loads(path.read_bytes())
        tokens = [base64.b64decode(row["token_bytes"], validate=True) for row in rows]
        ranks = [row["rank"] for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if ranks != list(range(len(rows))):
        raise _unreadable(path, "its ranks are not 0, 1, 2 and so on")
    if tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens):
        raise _unreadable(path, "its tokens are not the 256 bytes and others, each once")
    return tokens


def _unreadable(path: Path, reason: str) -> DataError:
    remedy = (
        "Give the JSON list that Megatron-LM reads, of rank, token_bytes and token_str; for a "
        ".tiktoken file, use HuggingFaceTokenizer with the tokenizer.json of that vocabulary"
    )
    return DataError("--tokenizer-model", path, f"it cannot be read ({reason})", remedy)
