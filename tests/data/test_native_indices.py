"""The compiled index builders against their NumPy twins, bit for bit."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak import _native
from megatron_merak.data.blend import blending_indices, exhaustive_blending_indices, normalized
from megatron_merak.data.gpt_index import build_indices, count_tokens, sample_starts, shuffle

host = _native.host()
pytestmark = pytest.mark.skipif(
    host is None, reason=f"the compiled part is not there: {_native.host_problem()}"
)


def twin(function, *arguments):
    """What NumPy makes of the arguments."""
    with mock.patch.dict(os.environ, MERAK_EXT="0"):
        assert _native.host() is None
        return function(*arguments)


def same(ours, theirs):
    assert (
        ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs)
    )


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 511, 512, 513, 1024, 1025, 4097, 70_001])
def test_shuffles_take_the_draws_of_randomstate(size, dtype):
    for seed, before in ((0, 0), (1234, 1), (7, 623), (8, 624), (9, 625)):
        ours, theirs = (np.random.RandomState(seed) for _ in range(2))
        for random in (ours, theirs):
            random.randint(0, 2**32, size=before, dtype=np.uint32)
            random.standard_normal()  # half of a pair: the other half stays in the state
        items = np.arange(size, dtype=dtype)
        expected = items.copy()
        shuffle(items, ours)
        theirs.shuffle(expected)
        same(items, expected)
        assert ours.standard_normal() == theirs.standard_normal()
        assert (
            ours.randint(0, 2**31, size=1300).tolist()
            == theirs.randint(0, 2**31, size=1300).tolist()
        )


def test_shuffles_of_a_part_leave_the_rest():
    items = np.arange(1000, dtype=np.int32)
    shuffle(items[100:900], np.random.RandomState(3))
    expected = np.arange(1000, dtype=np.int32)
    np.random.RandomState(3).shuffle(expected[100:900])
    same(items, expected)


@st.composite
def texts(draw):
    """(lengths, documents in reading order) with at least one token; many documents may be
    empty.
    """
    lengths = draw(
        st.lists(st.integers(0, 9) | st.just(0) | st.integers(0, 200), min_size=1, max_size=30)
    )
    lengths[draw(st.integers(0, len(lengths) - 1))] += 1
    order = draw(st.lists(st.integers(0, len(lengths) - 1), max_size=80)) + [
        int(np.argmax(lengths))
    ]
    order = draw(st.permutations(order))
    kinds = st.sampled_from([np.int32, np.int64])
    return np.array(lengths, draw(kinds)), np.array(order, draw(kinds))


@given(
    texts(),
    st.integers(1, 40) | st.integers(1, 2000),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 40),
)
@settings(max_examples=500, deadline=None)
def test_samples_start_where_they_do_without(text, sequence_length, drop_last, threads, grain):
    expected = twin(sample_starts, *text, sequence_length, drop_last)
    same(host.sample_starts(*text, sequence_length, drop_last, threads, grain), expected)
    same(sample_starts(*text, sequence_length, drop_last), expected)
    assert (
        host.count_tokens(*text, threads, grain) == count_tokens(*text) == twin(count_tokens, *text)
    )


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("lengths", "sequence_length", "dtype"),
    [
        ([2**40, 0, 2**41 + 5, 7], 2**38, np.int64),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1], 2**29, np.int32),
        ([2**31], 2**20, np.int64),
        ([2**62, 1], 2**60 + 1, np.int64),
        ([1], 1, np.int32),
        ([2], 5, np.int32),
    ],
)
def test_lengths_of_any_size_do_not_overflow(lengths, sequence_length, dtype, drop_last):
    lengths, order = np.array(lengths, np.int64), np.arange(len(lengths), dtype=np.int32)
    expected = twin(sample_starts, lengths, order, sequence_length, drop_last)
    assert expected.dtype == dtype
    for threads in (1, 3):
        same(host.sample_starts(lengths, order, sequence_length, drop_last, threads, 1), expected)


def test_columns_of_a_mapped_file_may_lie_anywhere():
    lengths = np.array([3, 0, 8, 5], np.int32)
    odd = np.frombuffer(b"xx" + lengths.tobytes(), np.int32, 4, 2)
    assert not odd.flags.aligned and not odd.flags.writeable
    order = np.array([2, 0, 3, 1, 2], np.int32)
    same(sample_starts(odd, order, 4), twin(sample_starts, lengths, order, 4))
    same(
        sample_starts(lengths.astype(np.uint16), order[::2], 4),
        twin(sample_starts, lengths, order[::2], 4),
    )


@pytest.mark.parametrize("seed", range(20))
def test_whole_indices_are_equal(seed):
    draw = np.random.RandomState(seed)
    lengths = draw.randint(0, 300, size=draw.randint(1, 2000)).astype(np.int32)
    lengths[0] += 1
    documents = np.arange(len(lengths), dtype=np.int32 if seed % 2 else np.int64)
    wanted = None if seed % 5 == 0 else int(draw.randint(1, 30_000))
    arguments = lengths, documents, wanted, int(draw.randint(1, 600)), seed, bool(seed % 3)
    for ours, theirs in zip(
        build_indices(*arguments), twin(build_indices, *arguments), strict=True
    ):
        same(ours, theirs)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([3, 4], [0, 2], 4), IndexError),
        (([3, 4], [0, -1], 4), IndexError),
        (([3, -4], [0, 1], 4), ValueError),
        (([0, 4], [0], 4), ValueError),
        (([0, 4], [], 4), ValueError),
        (([3, 4], [0, 1], 0), ValueError),
        (([[3, 4]], [0], 4), ValueError),
        (([3.0, 4.0], [0], 4), ValueError),
    ],
)
def test_impossible_texts_are_refused(arguments, error):
    lengths, order = (
        np.array(values, None if values and values != [3.0] else np.int32)
        for values in arguments[:2]
    )
    with pytest.raises(error):
        host.sample_starts(lengths, order, arguments[2], True, 1)


def test_what_cannot_be_shuffled_here_is_refused():
    words = np.zeros(624, np.uint32)
    for items in (np.zeros(4, np.int16), np.zeros((2, 2), np.int32), np.zeros(8, np.int32)[::2]):
        with pytest.raises(ValueError):
            host.shuffle(items, words, 0)
    for state, position in ((words[:600], 0), (words, 625), (words, -1)):
        with pytest.raises(ValueError):
            host.shuffle(np.zeros(4, np.int32), state, position)


@given(st.lists(st.floats(1e-6, 1e6) | st.just(1.0), min_size=1, max_size=40), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_blends_are_equal(weights, size):
    weights = normalized(weights)
    for ours, theirs in zip(
        blending_indices(weights, size), twin(blending_indices, weights, size), strict=True
    ):
        same(ours, theirs)


def test_equal_weights_tie_at_every_step():
    for count in (3, 7, 9, 17, 100):
        weights = normalized([1.0] * count)
        for ours, theirs in zip(
            blending_indices(weights, 5000), twin(blending_indices, weights, 5000), strict=True
        ):
            same(ours, theirs)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any))
@settings(max_examples=200, deadline=None)
def test_exhaustive_blends_are_equal(sizes):
    for ours, theirs in zip(
        exhaustive_blending_indices(sizes), twin(exhaustive_blending_indices, sizes), strict=True
    ):
        same(ours, theirs)


def test_impossible_blends_are_refused():
    for shares, sizes, size in (
        ([1.0], [3], 4),
        ([1.0], [], -1),
        ([], [], 1),
        ([1.0], [1, 2], 1),
        ([np.nan], [], 1),
    ):
        with pytest.raises(ValueError):
            host.blend(shares, sizes, size)
    with pytest.raises(ValueError, match="int16"):
        host.blend([1.0] * 2**15, [], 1)
