"""Every kind of input gives the same documents, one row or line in memory at a time."""

import gzip
import json

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_merak.data import documents, table_rows
from megatron_merak.data.documents import Reached, input_files, read_documents
from megatron_merak.data.indexed_dataset import IndexedDataset
from megatron_merak.data.preprocess import EncoderConfig, preprocess
from megatron_merak.errors import DataError

CONFIG = EncoderConfig("NullTokenizer", None, 9999, ("text", "other"), append_eod=True)
ROWS = [{"text": f"{n} {n + 1}", "number": n, "other": str(n)} for n in range(3000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_jsonl(path):
    path.write_bytes(LINES)


def write_gzip(path):
    path.write_bytes(gzip.compress(LINES))


def write_zstd(path):
    packer = zstandard.ZstdCompressor()
    half = len(LINES) // 2
    path.write_bytes(packer.compress(LINES[:half]) + packer.compress(LINES[half:]))


def write_parquet(path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)


def write_arrow_file(path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=900)


def write_saved(path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)


def write_split(path):
    from datasets import Dataset, DatasetDict

    parts = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    DatasetDict(parts).save_to_disk(path)


KINDS = {
    "in.jsonl": write_jsonl,
    "in.jsonl.gz": write_gzip,
    "in.jsonl.zst": write_zstd,
    "in.parquet": write_parquet,
    "in.arrow": write_arrow_file,
    "saved": write_saved,
    "splits": write_split,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    root = tmp_path_factory.mktemp("expected")
    write_jsonl(root / "in.jsonl")
    preprocess([root / "in.jsonl"], str(root / "out"), CONFIG)
    return outputs(root / "out")


def outputs(prefix):
    paths = [
        prefix.with_name(f"{prefix.name}_{key}_document.{suffix}")
        for key in ("text", "other")
        for suffix in ("bin", "idx")
    ]
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_gives_the_same_data_sets(tmp_path, name, expected):
    (tmp_path / "below" / "more").mkdir(parents=True)
    KINDS[name](tmp_path / "below" / "more" / name)
    (tmp_path / "below" / "more" / "ignored.md").write_text("x")
    split = "train" if name == "splits" else None
    preprocess([tmp_path / "below"], str(tmp_path / "out"), CONFIG, split=split)
    assert outputs(tmp_path / "out") == expected


@pytest.mark.parametrize("name", KINDS)
def test_reading_goes_on_from_any_place(tmp_path, name):
    KINDS[name](tmp_path / name)
    files = input_files(tmp_path / name, "train")
    rows = [
        raw
        for number, file in enumerate(files)
        for raw in read_documents(file, CONFIG.json_keys, Reached(number))
    ]
    assert [json.loads(raw.data)["text"] for raw in rows] == [row["text"] for row in ROWS]
    for done in (1, 701, 1499, 1500, 2999):
        place = rows[done - 1].after
        rest = [*read_documents(files[place.file], CONFIG.json_keys, place)]
        for number, file in enumerate(files[place.file + 1 :], start=place.file + 1):
            rest += read_documents(file, CONFIG.json_keys, Reached(number))
        assert rest == rows[done:]
    sizes = [file.stat().st_size for file in files]
    assert 0 <= rows[0].after.end <= rows[-1].after.end <= sizes[-1]


def test_only_a_batch_of_a_table_is_in_memory(tmp_path, monkeypatch):
    decoded = []
    plain = table_rows._parquet

    def counting(*given):
        for batch, *more in plain(*given):
            decoded.append((batch.num_rows, batch.schema.names))
            yield batch, *more

    monkeypatch.setattr(table_rows, "_parquet", counting)
    write_parquet(tmp_path / "in.parquet")
    next(read_documents(tmp_path / "in.parquet", ("text",)))
    assert decoded == [(700, ["text"])]


def test_what_saved_splits_there_are_is_told(tmp_path):
    write_split(tmp_path / "splits")
    with pytest.raises(DataError, match="it has 2 splits. Give --input-split one of train, test."):
        input_files(tmp_path / "splits")
    with pytest.raises(DataError, match="--input-split dev: .* does not have it. Give --input-spl"):
        input_files(tmp_path / "splits", "dev")
    assert len(input_files(tmp_path / "splits", "test")) == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("in.jsonl.zst", zstandard.compress(LINES)[:-9], "it ends inside a frame of zstd"),
        (
            "in.jsonl.zst",
            zstandard.compress(b'{"text": "1", "other": "2"}\n') * 2 + zstandard.compress(b"")[:5],
            "reading failed after line 2 .it ends inside",
        ),
        ("in.jsonl.zst", b"no zstandard", "in.jsonl.zst: reading failed after line 0"),
        ("in.parquet", b"PAR1", "in.parquet: reading failed after row 0"),
        ("in.arrow", b"no arrow", "in.arrow: reading failed after row 0"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        preprocess([tmp_path / name], str(tmp_path / "out"), CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_column_that_is_missing_or_has_no_texts_is_named(tmp_path):
    write_parquet(tmp_path / "in.parquet")
    write_arrow_file(tmp_path / "in.arrow")
    for name in ("in.parquet", "in.arrow"):
        for keys, told in (
            (("body",), "column 'body' of --json-keys is missing, there is 'text', 'number', 'oth"),
            (("number",), f"{name}:1: the value of 'number' is no string"),
        ):
            config = EncoderConfig("NullTokenizer", None, 9999, keys, append_eod=False)
            with pytest.raises(DataError, match=told):
                preprocess([tmp_path / name], str(tmp_path / "out"), config)
    rows = [{"text": "1"}, {"text": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "null.parquet")
    with pytest.raises(DataError, match="null.parquet:2: the value of 'text' is no string"):
        preprocess([tmp_path / "null.parquet"], str(tmp_path / "out"), TEXT)


TEXT = EncoderConfig("NullTokenizer", None, 9999, ("text",), append_eod=False)


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    write_parquet(tmp_path / "in.parquet")
    write_zstd(tmp_path / "in.jsonl.zst")
    for module, name in ((table_rows, "in.parquet"), (documents, "in.jsonl.zst")):
        monkeypatch.setattr(module, "is_installed", lambda library: False)
        with pytest.raises(DataError, match=r"is not installed. Install it: .*\.\[inputs\]"):
            list(read_documents(tmp_path / name))


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n3\n")
    (tmp_path / "b.txt.zst").write_bytes(zstandard.compress(b"4"))
    preprocess([tmp_path], str(tmp_path / "out"), TEXT)
    rows = [row.tolist() for row in IndexedDataset(tmp_path / "out_text_document")[:]]
    assert rows == [[1, 2, 3], [4]]
