"""A .model file of sentencepiece."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from ..extras import installed_by, is_installed
from .files import regular_file_size


class SentencePieceTokenizer:
    """The pieces of the file and no others, as megatron-core has them. Raises `DataError`.

    Whatever text says, it is text: the name of a control token in it is cut like any other word.
    """

    def __init__(self, path: Path):
        regular_file_size(path, "--tokenizer-model", "--tokenizer-model")
        if not is_installed("sentencepiece"):
            remedy = f"Install it: {installed_by('tokenizers')}"
            raise DataError("--tokenizer-model", path, "sentencepiece is not installed", remedy)
        import sentencepiece

        self.path = path
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            remedy = "Give the .model file of sentencepiece; a tokenizer.json is read by "
            remedy += "HuggingFaceTokenizer"
            reason = f"it cannot be read ({str(error).strip()})"
            raise DataError("--tokenizer-model", path, reason, remedy) from error
        self.vocab_size = self._processor.get_piece_size()
        pad = self._processor.pad_id()
        self.pad = None if pad < 0 or pad == self._processor.eos_id() else pad

    @property
    def eod(self) -> int:
        end = self._processor.eos_id()
        if end < 0:
            remedy = "Train it with an eos_id, or use HuggingFaceTokenizer"
            reason = "it has no end-of-sequence piece to end a document"
            raise DataError("--tokenizer-model", self.path, reason, remedy)
        return end

    def tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(each) for each in ids])
