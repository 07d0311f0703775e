"""The .bin/.idx pair: bytes as documented, every damage refused with a typed error."""

import os
import random
import struct

import numpy as np
import pytest

from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, token_dtype
from megatron_merak.errors import DataError

DOCUMENTS = [[5, 6, 7], [], [8], [1, 2, 3, 4]]
# Written out by hand: three sequences of 3, 0 and 2 uint16 tokens, the first two of which make
# document 0.
INDEX = b"".join(
    [
        b"MMIDIDX\x00\x00",
        bytes([1, 0, 0, 0, 0, 0, 0, 0]),
        bytes([8]),
        bytes([3, 0, 0, 0, 0, 0, 0, 0]),
        bytes([3, 0, 0, 0, 0, 0, 0, 0]),
        bytes([3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]),
        bytes([0] * 8 + [6] + [0] * 7 + [6] + [0] * 7),
        bytes([0] * 8 + [2] + [0] * 7 + [3] + [0] * 7),
    ]
)
TOKENS = bytes([1, 0, 2, 0, 3, 0, 255, 255, 0, 1])


def by_hand(tmp_path, index=INDEX, tokens=TOKENS):
    (tmp_path / "hand.idx").write_bytes(index)
    (tmp_path / "hand.bin").write_bytes(tokens)
    return tmp_path / "hand"


def write(prefix, documents, dtype="uint16"):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_reads_bytes_written_by_hand(tmp_path):
    dataset = IndexedDataset(by_hand(tmp_path))
    assert [sequence.tolist() for sequence in dataset[:]] == [[1, 2, 3], [], [65535, 256]]
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert dataset.sequence_modes is None


def test_writes_the_bytes_written_by_hand(tmp_path):
    with IndexedDatasetWriter(tmp_path / "new", np.uint16) as writer:
        writer.add_document([1, 2, 3], lengths=[3, 0])
        writer.add_document(np.array([65535, 256]))
    assert (tmp_path / "new.idx").read_bytes() == INDEX
    assert (tmp_path / "new.bin").read_bytes() == TOKENS
    assert sorted(os.listdir(tmp_path)) == ["new.bin", "new.idx"]


def test_reads_modes(tmp_path):
    dataset = IndexedDataset(by_hand(tmp_path, INDEX + bytes([0, 1, 255])))
    assert dataset.sequence_modes.tolist() == [0, 1, -1]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("mmap", [True, False])
def test_round_trip(tmp_path, dtype, mmap):
    dataset = IndexedDataset(write(tmp_path / "set", DOCUMENTS, dtype), mmap=mmap)
    assert dataset.dtype == dtype
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.get(3, 1, 2).tolist() == [2, 3]
    assert dataset.get(3, 2).tolist() == [3, 4]
    assert dataset.get(3, 4).tolist() == []
    assert [sequence.tolist() for sequence in dataset[1:3]] == [[], [8]]
    with pytest.raises(IndexError):
        dataset.get(3, 2, 3)
    with pytest.raises(ValueError):
        dataset[::2]


def test_empty_dataset(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "set", []))
    assert len(dataset) == 0 and dataset.document_indices.tolist() == [0]


def test_merge_shifts_documents(tmp_path):
    first, second = write(tmp_path / "a", DOCUMENTS), write(tmp_path / "b", [[9, 9], [4]])
    with IndexedDatasetWriter(tmp_path / "ab", "uint16") as writer:
        writer.add_dataset(IndexedDataset(first))
        writer.add_dataset(IndexedDataset(second))
    merged = IndexedDataset(tmp_path / "ab")
    assert [sequence.tolist() for sequence in merged[:]] == [*DOCUMENTS, [9, 9], [4]]
    assert merged.document_indices.tolist() == [0, 1, 2, 3, 4, 5, 6]
    with (
        pytest.raises(DataError, match="int32"),
        IndexedDatasetWriter(tmp_path / "c", "int32") as writer,
    ):
        writer.add_dataset(merged)


def test_writer_refuses_ids_that_do_not_fit(tmp_path):
    for bad in ([65536], [-1]):
        with (
            pytest.raises(DataError, match="do not fit"),
            IndexedDatasetWriter(tmp_path / "x", "uint16") as writer,
        ):
            writer.add_document(bad)
    assert os.listdir(tmp_path) == []


def test_failed_writer_keeps_the_old_dataset(tmp_path):
    write(tmp_path / "set", DOCUMENTS)
    with (
        pytest.raises(KeyboardInterrupt),
        IndexedDatasetWriter(tmp_path / "set", "uint16") as writer,
    ):
        writer.add_document([1])
        raise KeyboardInterrupt
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "set")[:]] == DOCUMENTS


def test_dtype_rule():
    assert [token_dtype(size).name for size in (8192, 65499, 65500)] == [
        "uint16",
        "uint16",
        "int32",
    ]


def edited(offset, layout, *values):
    data = bytearray(INDEX)
    struct.pack_into(layout, data, offset, *values)
    return bytes(data)


DAMAGE = {
    "empty": b"",
    "header cut": INDEX[:33],
    "table cut": INDEX[:-1],
    "bytes appended": INDEX + b"\0",
    "magic": b"MMIDIDY" + INDEX[7:],
    "version": edited(9, "<Q", 2),
    "dtype 0": edited(17, "<B", 0),
    "dtype 9": edited(17, "<B", 9),
    "float dtype": edited(17, "<B", 7),
    "huge sequence count": edited(18, "<Q", 2**63),
    "sequence count that overflows": edited(18, "<Q", 2**64 - 1),
    "no document index": edited(26, "<Q", 0),
    "huge document count": edited(26, "<Q", 2**61),
    "negative length": edited(34, "<i", -1),
    "length past the end": edited(34 + 8, "<i", 3),
    "largest length": edited(34 + 8, "<i", 2**31 - 1),
    "pointer past the end": edited(46 + 16, "<q", 8),
    "largest pointer": edited(46 + 16, "<q", 2**63 - 2),
    "negative pointer": edited(46, "<q", -2),
    "odd pointer": edited(46 + 16, "<q", 5),
    "first document": edited(70, "<q", 1),
    "descending documents": edited(78, "<q", 4),
    "last document": edited(86, "<q", 2),
}


@pytest.mark.parametrize("index", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_index_is_refused(tmp_path, index):
    with pytest.raises(DataError) as caught:
        IndexedDataset(by_hand(tmp_path, index))
    assert caught.value.what == "index file" and str(tmp_path) in str(caught.value)


def test_short_data_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="sequence 2"):
        IndexedDataset(by_hand(tmp_path, tokens=TOKENS[:-1]))
    with pytest.raises(DataError):
        IndexedDataset(by_hand(tmp_path, tokens=b""))


def test_missing_and_strange_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        IndexedDataset(tmp_path / "absent")
    prefix = by_hand(tmp_path)
    (tmp_path / "hand.bin").unlink()
    os.mkfifo(tmp_path / "hand.bin")
    with pytest.raises(DataError, match="regular file"):
        IndexedDataset(prefix)
    with pytest.raises(DataError, match="null"):
        IndexedDataset("a\0b")


def test_data_file_that_shrinks_while_open(tmp_path):
    dataset = IndexedDataset(by_hand(tmp_path), mmap=False)
    os.truncate(tmp_path / "hand.bin", 7)
    with pytest.raises(DataError, match="shrank"):
        dataset[2]


def test_random_damage_is_typed_or_harmless(tmp_path):
    """Whatever the bytes of the index are: a DataError, or a dataset all of whose sequences can be
    read.
    """
    choose = random.Random(7)
    prefix = by_hand(tmp_path)
    for _ in range(500):
        data = bytearray(INDEX)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        (tmp_path / "hand.idx").write_bytes(data)
        try:
            dataset = IndexedDataset(prefix)
        except DataError:
            continue
        assert [len(sequence) for sequence in dataset[:]] == dataset.sequence_lengths.tolist()


def test_fingerprint_tells_datasets_apart(tmp_path):
    contents = (
        DOCUMENTS,
        [[1]],
        [[1, 2]],
        [[1, 3]],
        [[1, 2], [1]],
        [[*range(40_000), 1]],
        [[*range(40_000), 2]],
    )
    prints = {
        IndexedDataset(write(tmp_path / "x", documents)).fingerprint() for documents in contents
    }
    assert len(prints) == len(contents)
    assert IndexedDataset(tmp_path / "x", mmap=False).fingerprint() in prints
    assert IndexedDataset(write(tmp_path / "y", [[1, 2]])).fingerprint() in prints
