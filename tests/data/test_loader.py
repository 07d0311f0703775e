"""Order of samples: the same for every layout, resumable anywhere, with and without threads."""

import threading

import pytest
import torch

from megatron_merak.data.loader import BatchLoader


class Numbers:
    """Sample i holds i."""

    def __init__(self, size, fails_at=None):
        self.size, self.fails_at = size, fails_at

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.fails_at:
            raise RuntimeError(f"sample {index}")
        return {"tokens": torch.tensor([index, index]), "loss_mask": torch.ones(2)}


def ids(step):
    return [microbatch["tokens"][:, 0].tolist() for microbatch in step]


def loader_of(dataset, micro_batch_size, dp_rank, dp_size, num_microbatches, *others, **named):
    """A loader whose steps all have so many micro-batches."""
    samples = micro_batch_size * dp_size * num_microbatches
    return BatchLoader(
        dataset, micro_batch_size, dp_rank, dp_size, lambda consumed: samples, *others, **named
    )


def global_steps(size, micro_batch_size, dp_size, num_microbatches, consumed=0, workers=0):
    """Per step, the samples of all ranks, micro-batch by micro-batch."""
    loaders = [
        loader_of(
            Numbers(size), micro_batch_size, rank, dp_size, num_microbatches, consumed, workers
        )
        for rank in range(dp_size)
    ]
    steps = []
    for parts in zip(*loaders, strict=True):
        steps.append(
            [i for rows in zip(*map(ids, parts), strict=True) for row in rows for i in row]
        )
    for loader in loaders:
        loader.close()
    return steps


def test_positions_are_megatrons():
    step = next(loader_of(Numbers(100), 2, 1, 3, 2, consumed_samples=12))
    assert ids(step) == [[14, 15], [20, 21]]
    assert step[0]["tokens"].shape == (2, 2) and step[0]["loss_mask"].dtype == torch.float32


@pytest.mark.parametrize(
    "micro_batch_size, dp_size, num_microbatches",
    [(12, 1, 1), (1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 2, 2), (1, 4, 3)],
)
@pytest.mark.parametrize("workers", [0, 3])
def test_global_order_does_not_depend_on_the_layout(
    micro_batch_size, dp_size, num_microbatches, workers
):
    steps = global_steps(50, micro_batch_size, dp_size, num_microbatches, workers=workers)
    assert steps == [list(range(12 * t, 12 * t + 12)) for t in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_continues_anywhere_in_any_layout(workers):
    loader = loader_of(Numbers(60), 2, 0, 1, 3, workers=workers)
    seen = [ids(next(loader)) for _ in range(4)]
    assert seen[-1] == [[18, 19], [20, 21], [22, 23]]
    assert loader.consumed_samples == 24
    loader.close()
    assert global_steps(60, 1, 3, 4, consumed=loader.consumed_samples)[0] == list(range(24, 36))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_steps_may_differ_in_size(workers):
    """What a step takes follows from the samples consumed before it, also where threads prepare
    several ahead.
    """

    def sizes(consumed):
        return 4 if consumed < 10 else 8

    loaders = [BatchLoader(Numbers(45), 2, rank, 2, sizes, workers=workers) for rank in range(2)]
    first, second = ([ids(step) for step in loader] for loader in loaders)
    assert [len(step) for step in first] == [1, 1, 1, 2, 2, 2, 2] and first[3] == [
        [12, 13],
        [16, 17],
    ]
    merged = [
        i
        for pair in zip(first, second, strict=True)
        for rows in zip(*pair, strict=True)
        for row in rows
        for i in row
    ]
    assert merged == list(range(44)) and loaders[0].consumed_samples == 44
    resumed = BatchLoader(Numbers(45), 2, 0, 2, sizes, 12, workers)
    assert ids(next(resumed)) == first[3]
    for loader in (*loaders, resumed):
        loader.close()


def test_stops_before_a_partial_batch():
    loader = loader_of(Numbers(20), 2, 0, 2, 2)
    assert len(list(loader)) == 2 and loader.consumed_samples == 16
    with pytest.raises(StopIteration):
        next(loader)
    assert list(loader_of(Numbers(20), 2, 0, 2, 2, consumed_samples=20)) == []
    assert list(loader_of(Numbers(0), 2, 0, 2, 2)) == []


def test_error_of_a_thread_is_raised_by_its_step():
    loader = loader_of(Numbers(20, fails_at=9), 2, 0, 1, 2, workers=2)
    assert len([next(loader), next(loader)]) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sample 9"):
            next(loader)
    assert loader.consumed_samples == 8
    loader.close()


def test_close_ends_the_threads():
    before = threading.active_count()
    loader = loader_of(Numbers(2000), 2, 0, 1, 2, workers=3)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_every_tensor_is_pinned_for_a_gpu(monkeypatch, workers):
    """By the thread that prepares a step, not by the one that trains."""
    pinned, threads = [], set()

    def pin(tensor):
        threads.add(threading.current_thread() is threading.main_thread())
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    loader = loader_of(Numbers(20), 2, 0, 1, 2, workers=workers, pinned=True)
    step = next(loader)
    loader.close()
    held = {id(tensor) for tensor in pinned}
    assert step and all(id(value) in held for batch in step for value in batch.values())
    assert ids(step) == [[0, 1], [2, 3]] and threads == {workers == 0}
    plain = loader_of(Numbers(20), 2, 0, 1, 2, workers=workers)
    count = len(pinned)
    next(plain)
    plain.close()
    assert len(pinned) == count
