"""The commands of docs/data.md print what is shown, on files of every kind.

python -m tests.test_data_page    writes what they print into the page
"""

import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from tests.pages import DOCS, TRAINING, answer, answers, blocks, words

TEXTS = [
    f"Line {number} says that text becomes tokens.\n" * (1 + number % 9) for number in range(40)
]


def prepare() -> None:
    """Write the files that the page names into this folder."""
    import pyarrow
    import sentencepiece
    import zstandard
    from datasets import Dataset, DatasetDict
    from pyarrow import parquet
    from tokenizers import ByteLevelBPETokenizer

    from megatron_merak.data.train_tokenizer import train_byte_bpe

    rows = [{"text": text} for text in TEXTS]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("text.jsonl").write_text(lines)
    Path("text.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    Path("book.txt").write_text("".join(TEXTS))
    Path("numbers.jsonl").write_text('{"text": "1 2 3"}\n{"text": "4"}\n')
    parquet.write_table(pyarrow.Table.from_pylist(rows), "text.parquet")
    with contextlib.redirect_stderr(io.StringIO()):
        Dataset.from_list(rows).save_to_disk("saved")
        parts = {"train": Dataset.from_list(rows[4:]), "test": Dataset.from_list(rows[:4])}
        DatasetDict(parts).save_to_disk("splits")
    Path("folder/more").mkdir(parents=True)
    Path("folder/more/a.jsonl").write_text(lines)
    Path("folder/b.txt").write_text(TEXTS[0])
    train_byte_bpe(TEXTS, 300, Path("tokenizer.json"))
    gpt2 = ByteLevelBPETokenizer()
    gpt2.train_from_iterator(TEXTS, 310, special_tokens=["<|endoftext|>"], show_progress=False)
    gpt2.save_model(".")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix="pieces", vocab_size=32, minloglevel=2
    )
    tokens = [bytes([byte]) for byte in range(256)] + [b"in", b"on"]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    Path("ranks.json").write_text(json.dumps(ranks))


def says(command: str) -> str:
    """What a command prints, of stderr what no progress is."""
    from megatron_merak.cli.preprocess_data import main

    program, *given = words(command)
    if program in TRAINING:
        return answer(command)
    assert program == "merak-preprocess"
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(given)
    told = [line for line in err.getvalue().splitlines() if not line.startswith("preprocess: ")]
    return out.getvalue() + "".join(f"{line}\n" for line in told)


def shown(text: str) -> str:
    """A console block with what its commands say now."""
    typed = text
    for command, output in answers(text):
        lines = typed.split("$ ")
        at = next(i for i, part in enumerate(lines) if _joined(part).startswith(command))
        lines[at] = lines[at].removesuffix(output) if output else lines[at]
        lines[at] += says(command)
        typed = "$ ".join(lines)
    return typed


def _joined(part: str) -> str:
    import re

    return re.sub(r"\\\n\s*", "", part)


def test_commands_say_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()
    commands = [each for block in blocks("data", "console") for each in answers(block.text)]
    assert len(commands) > 14
    for command, output in commands:
        assert says(command) == output, command


def rewrite() -> None:
    path = DOCS / "data.md"
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        prepare()
        now = [(block, shown(block.text)) for block in blocks("data", "console")]
    for block, new in reversed(now):
        text = text[: block.start] + new + text[block.start + len(block.text) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite())
