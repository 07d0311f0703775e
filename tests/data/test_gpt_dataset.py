"""Samples of a GPTDataset against Megatron's rules, written down again the slow way."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_merak.data.blend import BlendedDataset
from megatron_merak.data.gpt_dataset import GPTDataset
from megatron_merak.data.gpt_index import build_indices, count_epochs, split_bounds
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_merak.data.mock import MockIndexedDataset
from megatron_merak.data.source_part import GPTDatasetConfig
from megatron_merak.errors import DataError

EOD = 99


def greedy_samples(lengths, order, sequence_length, samples):
    """Rows (position, offset) found by walking the documents token by token."""
    rows = [(0, 0)]
    stream = [
        (position, offset)
        for position, document in enumerate(order)
        for offset in range(lengths[document])
    ]
    for sample in range(1, samples + 1):
        rows.append(stream[sample * sequence_length])
    return rows


def slow_indices(lengths, documents, wanted, sequence_length, seed):
    """Megatron-LM's index building, step by step."""
    per_pass = sum(lengths[d] for d in documents)
    passes, tokens = 1, per_pass
    while tokens < wanted * sequence_length + 1:
        passes += 1
        tokens += per_pass
    separate, before_last = False, 0
    if passes > 1:
        before_last = ((passes - 1) * per_pass - 1) // sequence_length
        separate = wanted - before_last < int(0.8 * ((per_pass - 1) // sequence_length))
    random = np.random.RandomState(seed)

    def shuffled(values, dtype):
        array = np.array(values, dtype=dtype)
        random.shuffle(array)
        return array.tolist()

    if separate:
        order = shuffled(list(documents) * (passes - 1), np.int32)
        order += shuffled(list(documents), np.int32)
    else:
        order = shuffled(list(documents) * passes, np.int32)
    samples = (passes * per_pass - 1) // sequence_length
    if separate:
        picks = shuffled(range(before_last), np.uint32) + shuffled(
            range(before_last, samples), np.uint32
        )
    else:
        picks = shuffled(range(samples), np.uint32)
    return order, greedy_samples(lengths, order, sequence_length, samples), picks, separate


@pytest.mark.parametrize("seed", range(40))
def test_indices_equal_the_slow_rule(seed):
    draw = np.random.RandomState(1000 + seed)
    lengths = draw.randint(0 if seed % 2 else 1, 30, size=draw.randint(2, 40)).astype(np.int32)
    lengths[0] = 1 + seed
    documents = np.arange(0, max(1, len(lengths) - seed % 5))
    sequence_length, wanted = int(draw.randint(1, 20)), int(draw.randint(1, 150))
    order, rows, picks, _ = slow_indices(
        lengths.tolist(), documents.tolist(), wanted, sequence_length, seed
    )
    built = build_indices(lengths, documents, wanted, sequence_length, seed)
    assert built.document_index.tolist() == order and built.document_index.dtype == np.int32
    assert [
        tuple(row) for row in built.sample_index.tolist()
    ] == rows and built.sample_index.dtype == np.int32
    assert built.shuffle_index.tolist() == picks and built.shuffle_index.dtype == np.uint32
    assert len(built.shuffle_index) >= wanted


def test_both_kinds_of_last_pass_occur():
    """The cases above would be worth little if one branch never ran."""
    kinds = {count_epochs(1000, wanted, 10).sans_last for wanted in (100, 150, 190)}
    assert kinds == {99, None}
    assert count_epochs(1000, 100, 10) == (2, 99)
    assert count_epochs(1000, 99, 10).passes == 1
    assert count_epochs(1000, None, 10) == (1, None)


def test_random_stream_is_pinned():
    """Values of numpy's frozen RandomState: a change here changes the data order of every resumed
    run.
    """
    built = build_indices(np.array([5, 3, 9, 4], dtype=np.int32), np.arange(4), 8, 4, 1234)
    assert built.document_index.tolist() == PINNED[0]
    assert built.sample_index.tolist() == PINNED[1]
    assert built.shuffle_index.tolist() == PINNED[2]


PINNED = (
    [0, 1, 2, 3, 1, 2, 3, 0],
    [[0, 0], [0, 4], [2, 0], [2, 4], [2, 8], [3, 3], [5, 0], [5, 4], [5, 8], [6, 3], [7, 3]],
    [0, 2, 4, 3, 1, 5, 9, 8, 7, 6],
)


def test_split_bounds():
    assert split_bounds((969, 30, 1), 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert split_bounds((1, 0, 1), 5) == [(0, 2), None, (2, 5)]
    assert split_bounds((99, 1, 0), 10) == [(0, 10), (10, 10), None]


def corpus(tmp_path, lengths, name="set"):
    """Documents whose tokens count on through the whole corpus, each ended by EOD."""
    documents, start = [], 0
    for length in lengths:
        documents.append([(start + i) % EOD for i in range(length - 1)] + [EOD] * (length > 0))
        start += max(length - 1, 0)
    with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(tmp_path / name), documents


def config(**changes):
    return GPTDatasetConfig(
        **{"sequence_length": 7, "random_seed": 3, "vocab_size": 100, **changes}
    )


def test_samples_read_the_stream(tmp_path):
    source, documents = corpus(tmp_path, [4, 0, 11, 1, 25, 2, 9])
    dataset = GPTDataset(source, (0, 7), 30, "train", config())
    order = dataset.document_index.tolist()
    stream = [token for document in order for token in documents[document]]
    for item in range(len(dataset)):
        start = int(dataset.shuffle_index[item]) * 7
        sample = dataset[item]
        assert sample["tokens"].tolist() == stream[start : start + 7]
        assert sample["labels"].tolist() == stream[start + 1 : start + 8]
        assert sample["position_ids"].tolist() == list(range(7))
        assert sample["loss_mask"].tolist() == [1.0] * 7
    assert {key: value.dtype for key, value in dataset[0].items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }


def test_mapped_and_file_readers_agree(tmp_path):
    source, _ = corpus(tmp_path, [4, 6, 11, 1, 25, 2, 9])
    other = IndexedDataset(source.prefix, mmap=False)
    first, second = (GPTDataset(s, (0, 7), 30, "train", config()) for s in (source, other))
    for i in range(len(first)):
        assert torch.equal(first[i]["tokens"], second[i]["tokens"])


def test_eod_mask_hides_the_position_after_the_document(tmp_path):
    source, _ = corpus(tmp_path, [4, 6, 11, 1, 25, 2, 9])
    dataset = GPTDataset(source, (0, 7), 8, "train", config(masked_eod=EOD))
    masked = 0
    for i in range(len(dataset)):
        sample = dataset[i]
        assert torch.equal(sample["loss_mask"] == 0, sample["tokens"] == EOD)
        masked += int((sample["loss_mask"] == 0).sum())
    assert masked > 0


@pytest.mark.parametrize("pad", [-1, 50])
def test_partial_sample_is_padded_and_masked(tmp_path, pad):
    source, documents = corpus(tmp_path, [10, 8])
    dataset = GPTDataset(
        source, (0, 2), None, "valid", config(drop_last_partial_sequence=False, pad=pad)
    )
    assert len(dataset) == 3  # 18 tokens: 17 labels in samples of 7
    last = dataset[dataset.shuffle_index.tolist().index(2)]
    stream = [
        token for document in dataset.document_index.tolist() for token in documents[document]
    ]
    assert last["tokens"].tolist() == [*stream[14:], 0, 0, 0]
    assert last["labels"].tolist() == [*stream[15:], 0, 0, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_bounds_keep_splits_apart(tmp_path):
    source, documents = corpus(tmp_path, [5] * 10)
    train = GPTDataset(source, (0, 8), 20, "train", config())
    valid = GPTDataset(source, (8, 10), 20, "valid", config())
    assert set(train.document_index.tolist()) == set(range(8))
    assert set(valid.document_index.tolist()) == {8, 9}


def test_errors_are_typed(tmp_path):
    source, _ = corpus(tmp_path, [5, 0, 9])
    for bounds in ((1, 2), (3, 3)):
        with pytest.raises(DataError, match="has no tokens"):
            GPTDataset(source, bounds, 1, "valid", config())
    dataset = GPTDataset(source, (0, 3), 1, "train", config(vocab_size=EOD))
    with pytest.raises(DataError, match=r"document \d holds token ids .* vocabulary ends at 98"):
        dataset[0]


def test_cache_is_read_back(tmp_path):
    source, _ = corpus(tmp_path, [4, 6, 11, 1, 25, 2, 9])
    cache = tmp_path / "cache"
    fresh = GPTDataset(source, (0, 7), 30, "train", config())
    built = GPTDataset(source, (0, 7), 30, "train", config(path_to_cache=cache))
    stamps = {path: path.stat().st_mtime_ns for path in cache.glob("*.npy")}
    mapped = GPTDataset(source, (0, 7), 30, "train", config(path_to_cache=cache))
    assert len(stamps) == 3 and stamps == {
        path: path.stat().st_mtime_ns for path in cache.glob("*.npy")
    }
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(fresh, name), getattr(built, name))
        assert np.array_equal(getattr(fresh, name), getattr(mapped, name))
        assert isinstance(getattr(mapped, name), np.memmap)
    names = sorted(path.name.split("-", 1)[1] for path in cache.iterdir())
    assert names == [
        "GPTDataset-train-description.txt",
        "GPTDataset-train-document_index.npy",
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-train-shuffle_index.npy",
        "GPTDataset-train.lock",
    ]


def test_cache_of_a_changed_dataset_is_not_used(tmp_path):
    cached = config(path_to_cache=tmp_path / "cache")
    GPTDataset(corpus(tmp_path, [4, 6, 11])[0], (0, 3), 30, "train", cached)
    source, _ = corpus(tmp_path, [4, 6, 12])
    dataset = GPTDataset(source, (0, 3), 30, "train", cached)
    assert np.array_equal(
        dataset.sample_index, GPTDataset(source, (0, 3), 30, "train", config()).sample_index
    )


def test_unfinished_cache_is_built_again_and_damage_is_refused(tmp_path):
    source, _ = corpus(tmp_path, [4, 6, 11])
    cached = config(path_to_cache=tmp_path / "cache")
    expected = GPTDataset(source, (0, 3), 30, "train", cached).shuffle_index.tolist()
    (description,) = (tmp_path / "cache").glob("*description.txt")
    (array,) = (tmp_path / "cache").glob("*shuffle_index.npy")
    array.write_bytes(b"half a fi")
    with pytest.raises(DataError, match="index cache"):
        GPTDataset(source, (0, 3), 30, "train", cached)
    description.unlink()
    assert GPTDataset(source, (0, 3), 30, "train", cached).shuffle_index.tolist() == expected


def test_cache_that_cannot_be_written(tmp_path):
    source, _ = corpus(tmp_path, [4, 6, 11])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        GPTDataset(source, (0, 3), 30, "train", config(path_to_cache=tmp_path / "file" / "cache"))


def test_mock_documents_are_consistent():
    source = MockIndexedDataset(vocab_size=64, eod=10)
    for document in (0, 1, 9_999):
        whole = source.get(document)
        assert len(whole) == source.sequence_lengths[document] >= 2
        assert whole.tolist().count(10) == 1 and whole[-1] == 10
        assert 0 <= whole.min() and whole.max() < 64
        for offset, length in ((0, 1), (1, None), (len(whole) - 1, 1), (len(whole) // 2, 1)):
            part = source.get(document, offset, length)
            assert (
                part.tolist()
                == whole[offset : None if length is None else offset + length].tolist()
            )


def _spawned_items(kind: str, path, cached: bool, mmap: bool):
    """A data set of each kind, and what the spawned worker of a loader reads of it."""
    with IndexedDatasetWriter(path / "x", np.uint16) as writer:
        for number in range(9):
            writer.add_document(range(number, number + 12))
    source = IndexedDataset(path / "x", mmap=mmap)
    config = GPTDatasetConfig(8, 3, 50, path_to_cache=path / "cache" if cached else None)
    dataset = GPTDataset(source, (0, 9), 20, "train", config)
    if kind == "blend":
        dataset = BlendedDataset(
            [dataset, dataset], [0.3, 0.7], 12, path / "cache" if cached else None
        )
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    return dataset, list(loader)


@pytest.mark.parametrize("kind, cached, mmap", [("blend", True, True), ("single", False, False)])
def test_a_spawned_loader_worker_reads_the_same_samples(tmp_path, kind, cached, mmap):
    dataset, arrived = _spawned_items(kind, tmp_path, cached, mmap)
    assert len(arrived) == len(dataset) > 10
    for index, item in enumerate(arrived):
        assert all(torch.equal(item[name], value) for name, value in dataset[index].items())
    if cached:
        part = dataset.datasets[0]
        assert len(pickle.dumps(part)) < 2000
        assert isinstance(pickle.loads(pickle.dumps(part)).shuffle_index, np.memmap)
