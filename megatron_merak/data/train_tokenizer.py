"""Make a tokenizer out of a corpus."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .fast_tokenizer import EOD_TOKENS
from .files import atomic_writer


def train_byte_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Write to `path` a tokenizer.json of byte-level byte-pair encoding (as GPT-2's: every text has
    an encoding that decodes to it) with at most `vocab_size` ids, of which id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    with atomic_writer(path) as file:
        file.write(tokenizer.to_str().encode())
