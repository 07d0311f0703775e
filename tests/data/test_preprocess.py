"""Raw text to indexed datasets: every process count writes the same bytes, every bad line
is named.
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from megatron_merak.cli import preprocess_data as command
from megatron_merak.data.documents import input_files, read_documents
from megatron_merak.data.indexed_dataset import IndexedDataset
from megatron_merak.data.preprocess import EncoderConfig, preprocess
from megatron_merak.data.train_tokenizer import train_byte_bpe
from megatron_merak.errors import DataError

NULL = EncoderConfig("NullTokenizer", None, 1000, ("text",), append_eod=True)


def jsonl(path: Path, documents) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_documents_and_keys(tmp_path):
    path = jsonl(
        tmp_path / "in.jsonl", [{"text": "1 2", "other": "7"}, {"text": "", "other": "8 9"}]
    )
    config = EncoderConfig("NullTokenizer", None, 1000, ("text", "other"), append_eod=True)
    assert preprocess([path], str(tmp_path / "out"), config) == {
        "documents": 2,
        "tokens": 8,
        "skipped": 0,
    }
    assert [row.tolist() for row in IndexedDataset(tmp_path / "out_text_document")[:]] == [
        [1, 2, 1000],
    ]
    assert IndexedDataset(tmp_path / "out_text_document").document_indices.tolist() == [0, 1, 1]
    assert [row.tolist() for row in IndexedDataset(tmp_path / "out_other_document")[:]] == [
        [7, 1000],
        [8, 9, 1000],
    ]


def test_every_worker_count_writes_the_same_bytes(tmp_path):
    documents = [{"text": f"def f{i}(x): return {i} * x\n" * (i % 50)} for i in range(2500)]
    path = jsonl(tmp_path / "in.jsonl", documents)
    train_byte_bpe(
        [document["text"] for document in documents[:200]], 300, tmp_path / "tokenizer.json"
    )
    config = EncoderConfig(
        "HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), None, ("text",), append_eod=True
    )
    for workers in (1, 2):
        assert (
            preprocess([path], str(tmp_path / f"w{workers}"), config, workers)["documents"] == 2500
        )
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"w{workers}_text_document.{suffix}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()


def test_directories_text_files_gzip_and_windows_lines(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "a.jsonl.gz").write_bytes(
        gzip.compress(b'\xef\xbb\xbf{"text": "1"}\r\n\r\n{"text": "2 3"}')
    )
    (folder / "b" / "c.txt").write_bytes(b"4 5\n6\n")
    (folder / "b" / "d.txt.gz").write_bytes(gzip.compress(b"7"))
    (folder / "ignored.bin").write_bytes(b"\xff")
    preprocess([folder], str(tmp_path / "out"), NULL)
    rows = [row[:-1].tolist() for row in IndexedDataset(tmp_path / "out_text_document")[:]]
    assert rows == [[1], [2, 3], [4, 5, 6], [7]]


BAD_LINES = {
    b"{": "not JSON",
    b"[1]": "not a JSON object",
    b'{"txt": "1"}': "key 'text' of --json-keys is missing, there is 'txt'",
    b'{"text": 1}': "no string",
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "\\ud800"}': "surrogate",
    b'{"text": "1001"}': "below 1001",
    b"[" * 200_000: "not JSON",
}


@pytest.mark.parametrize("line, reason", BAD_LINES.items(), ids=list(BAD_LINES.values()))
def test_bad_line_is_named(tmp_path, line, reason):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    with pytest.raises(DataError, match=reason) as caught:
        preprocess([tmp_path / "in.jsonl"], str(tmp_path / "out"), NULL)
    assert caught.value.value == f"{tmp_path / 'in.jsonl'}:3"
    assert os.listdir(tmp_path) == ["in.jsonl"]
    assert (
        preprocess([tmp_path / "in.jsonl"], str(tmp_path / "out"), NULL, skip_bad=1)["skipped"] == 1
    )
    assert [row[0] for row in IndexedDataset(tmp_path / "out_text_document")[:]] == [1, 2]


def test_first_line_beyond_the_allowance_is_named(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n{\n{\n{\n')
    with pytest.raises(DataError) as caught:
        preprocess([tmp_path / "in.jsonl"], str(tmp_path / "out"), NULL, skip_bad=1)
    assert caught.value.value.endswith(":3")


def test_truncated_gzip_is_named(tmp_path):
    packed = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(900)))
    (tmp_path / "in.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"in\.jsonl\.gz: reading failed after line \d+"):
        list(read_documents(tmp_path / "in.jsonl.gz"))


def test_error_in_a_process_arrives_here(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", [{"text": "1"}])
    (tmp_path / "tokenizer.json").write_text("{}")
    config = EncoderConfig(
        "HuggingFaceTokenizer", str(tmp_path / "tokenizer.json"), None, ("text",), append_eod=True
    )
    with pytest.raises(DataError, match="--tokenizer-model"):
        preprocess([path], str(tmp_path / "out"), config, workers=2)


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no file below"):
        input_files(tmp_path / "empty")
    with pytest.raises(DataError, match="No such file"):
        input_files(tmp_path / "absent")
    with pytest.raises(DataError, match="nothing to write"):
        preprocess([tmp_path / "empty.jsonl"], str(tmp_path / "out"), NULL)


def test_an_output_that_cannot_be_written_is_told_before_anything_is_read(capsys):
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--input", "nowhere.jsonl"]
    assert command.main([*flags, "--output-prefix", "/proc/x/y"]) == 1
    assert "--output-prefix /proc/x/y: its directory cannot be written" in capsys.readouterr().err
