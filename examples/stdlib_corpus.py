"""A real corpus without a download: the source code of Python's standard library.

    python examples/stdlib_corpus.py --output-dir runs/stdlib

writes tokenizer.json, stdlib_text_document.{bin,idx} and stdlib.json, the last with the number of
documents and tokens and the entropy of the unigram distribution in nats: the loss of a model that
knows only how frequent each token is. A second call finds the finished corpus and returns at once.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_merak.data.corpus import unigram_entropy
from megatron_merak.data.documents import Raw
from megatron_merak.data.files import atomic_writer
from megatron_merak.data.indexed_dataset import IndexedDataset
from megatron_merak.data.preprocess import EncoderConfig, preprocess_documents
from megatron_merak.data.train_tokenizer import train_byte_bpe
from megatron_merak.errors import DataError, MerakError

TEST_FOLDERS = {"test", "tests", "idle_test"}


def source_files(root: Path, max_bytes: int) -> list[tuple[str, bytes]]:
    """(name, content) of UTF-8 sources below `root`, about `max_bytes` in all: the library first,
    then its tests. The order is that of the names' digests, so that the last documents, the
    validation set, resemble the first."""
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted(name for name in names if "site-packages" not in name.parts)
    names.sort(key=lambda name: bool(TEST_FOLDERS.intersection(name.parts)))
    chosen, size = [], 0
    for name in names:
        content = (root / name).read_bytes()
        if content and is_utf8(content) and size + len(content) <= max_bytes:
            chosen.append((name.as_posix(), content))
            size += len(content)
    if not chosen:
        raise DataError(
            "standard library", root, "it holds no Python source", "Install Python with its library"
        )
    return sorted(chosen, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def build(directory: Path, vocab_size: int, max_bytes: int) -> dict[str, object]:
    """Make the corpus, unless `directory` holds the one of the same options already; return its
    facts.
    """
    facts_path, tokenizer_path = directory / "stdlib.json", directory / "tokenizer.json"
    options = {"python": sys.version.split()[0], "vocab_size": vocab_size, "max_bytes": max_bytes}
    prefix = directory / "stdlib_text_document"
    if (facts := finished(facts_path, tokenizer_path, prefix, options)) is not None:
        return facts
    directory.mkdir(parents=True, exist_ok=True)
    facts_path.unlink(missing_ok=True)
    start = time.monotonic()
    files = source_files(Path(sysconfig.get_path("stdlib")), max_bytes)
    say(start, f"read {len(files)} files, {sum(len(content) for _, content in files) / 1e6:.1f} MB")
    train_byte_bpe((content.decode() for _, content in files), vocab_size, tokenizer_path)
    say(start, f"trained a tokenizer of {vocab_size} tokens")
    config = EncoderConfig(
        "HuggingFaceTokenizer", str(tokenizer_path), None, ("text",), append_eod=True
    )
    documents: Iterator[Raw] = (Raw(name, None, content) for name, content in files)
    counts = preprocess_documents(documents, str(directory / "stdlib"), config)
    dataset = IndexedDataset(prefix)
    facts = {
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "unigram_entropy_nats": unigram_entropy(dataset),
        "fingerprint": dataset.fingerprint(),
        "options": options,
    }
    with atomic_writer(facts_path) as file:
        file.write(json.dumps(facts, indent=2).encode())
    say(start, "done")
    return facts


def finished(
    facts_path: Path, tokenizer_path: Path, prefix: Path, options: dict[str, object]
) -> dict | None:
    """The facts of a corpus that is complete, unchanged and made with `options`; None if there is
    none.
    """
    if not facts_path.exists() or not tokenizer_path.exists():
        return None
    facts = json.loads(facts_path.read_text())
    try:
        unchanged = facts["fingerprint"] == IndexedDataset(prefix).fingerprint()
    except DataError:
        return None
    return facts if unchanged and facts["options"] == options else None


def say(start: float, text: str) -> None:
    print(f"stdlib corpus: [{time.monotonic() - start:4.1f} s] {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--output-dir", type=Path, default=Path("runs/stdlib"))
    flags.add_argument("--vocab-size", type=int, default=8192, help="token ids of the tokenizer")
    flags.add_argument(
        "--max-bytes", type=int, default=16_000_000, help="source code to use, in bytes"
    )
    options = flags.parse_args(arguments)
    try:
        facts = build(options.output_dir, options.vocab_size, options.max_bytes)
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.output_dir}: {facts['documents']:,} documents, {facts['tokens']:,} tokens, "
        f"unigram entropy {facts['unigram_entropy_nats']:.3f} nats"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
