"""Which samples make which batch: accelerate's division, transformers' order, whatever the layout
and the workers.
"""

import importlib.util
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.batches.order import (
    Division,
    Loading,
    epoch_order,
    private_randomness,
)


def taken(loading, epoch=0, skip=0):
    return [batch["x"].tolist() for batch in loading.epoch(epoch, skip)]


def stack(rows):
    return {"x": torch.tensor(rows)}


def noisy(rows):
    return {
        "x": torch.tensor(rows),
        "noise": torch.rand(2),
        "n": np.random.rand(),
        "p": random.random(),
    }


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_the_picture_of_the_module():
    order = [17, 3, 8, 20, 5, 1, 9, 11, 2, 6, 4]
    division = Division(11, 3, 2)
    assert division.batches == 2
    assert [[order[row] for row in division.rows(n)] for n in range(4)] == [
        [17, 3, 8],
        [20, 5, 1],
        [9, 11, 2],
        [6, 4, 17],
    ]
    alone = Division(11, 3)
    assert [len(alone.rows(n)) for n in range(alone.batches)] == [3, 3, 3, 2]


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the reference is accelerate's"
)
@pytest.mark.parametrize("drop_last", (False, True))
@pytest.mark.parametrize("replicas", (1, 2, 3))
def test_division_is_that_of_accelerate(replicas, drop_last):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    for samples in range(1, 26):
        for size in (1, 2, 4):
            plain = BatchSampler(range(samples), size, drop_last)
            division = Division(samples, size, replicas, drop_last)
            for replica in range(replicas):
                theirs = list(
                    BatchSamplerShard(plain, replicas, replica) if replicas > 1 else plain
                )
                ours = [
                    list(division.rows(replica + replicas * n)) for n in range(division.batches)
                ]
                assert ours == theirs, (samples, size, replica)


def test_two_replicas_with_one_batch_take_what_one_takes_with_two():
    def loading(replica, replicas):
        return Loading(
            list(range(16)),
            stack,
            2,
            replica,
            replicas,
            5,
            order=lambda epoch: epoch_order(16, 5, epoch),
        )

    alone, pair = taken(loading(0, 1), 3), [taken(loading(replica, 2), 3) for replica in (0, 1)]
    assert [batch for both in zip(*pair, strict=True) for batch in both] == alone
    assert sorted(sum(alone, [])) == list(range(16))
    assert taken(loading(0, 1), 4) != alone


def test_the_order_of_an_epoch_is_seeded_by_the_seed_plus_the_epoch():
    assert (
        epoch_order(9, 3, 4)
        == torch.randperm(9, generator=torch.Generator().manual_seed(7)).tolist()
    )
    lengths = [5, 1, 9, 3] * 8
    grouped = epoch_order(32, 0, 0, lengths, 4)
    assert sorted(grouped) == list(range(32))
    spread = [np.ptp([lengths[i] for i in grouped[n : n + 4]]) for n in range(0, 32, 4)]
    assert np.mean(spread) < 4  # at random it is above 6


@pytest.mark.parametrize("workers", (0, 2))
def test_what_a_collator_draws_depends_on_the_batch_only(workers):
    def noise(replica, replicas, skip=0, epoch=1):
        loading = Loading(
            list(range(8)), noisy, 2, replica, replicas, 5, options={"num_workers": workers}
        )
        return [
            (b["noise"].tolist(), float(b["n"]), float(b["p"])) for b in loading.epoch(epoch, skip)
        ]

    alone = noise(0, 1)
    assert len({str(draw) for draw in alone}) == 4
    assert noise(0, 1, skip=2) == alone[2:]
    assert noise(1, 2) == alone[1::2]
    assert noise(0, 1, epoch=2) != alone


def test_private_randomness_leaves_the_global_streams_alone():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with private_randomness(1, 2):
        inside = torch.rand(1).item(), np.random.rand(), random.random()
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == before != inside


@pytest.mark.parametrize("drop_last", (False, True))
@pytest.mark.parametrize("count", (3, 11, 12, 16))
def test_a_stream_is_divided_as_a_list_is(count, drop_last):
    for replicas in (1, 2):
        for replica in range(replicas):
            place = (stack, 3, replica, replicas, 0, drop_last)
            division = Division(count, 3, replicas, drop_last)
            wanted = [list(division.rows(replica + replicas * n)) for n in range(division.batches)]
            if replicas == 1 or count >= 6:
                assert taken(Loading(Stream(count), *place)) == wanted
                assert taken(Loading(Stream(count), *place), skip=1) == wanted[1:]


def test_evaluation_takes_every_sample_once():
    loading = [Loading(list(range(11)), stack, 2, replica, 2, 0) for replica in (0, 1)]
    found = [[b["x"].tolist() for b in loading[r].some(range(r, 6, 2))] for r in (0, 1)]
    assert found == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]


@pytest.mark.parametrize(
    ("collate", "told"),
    [
        (lambda rows: rows, "list"),
        (lambda rows: {"x": [rows]}, "x"),
        (lambda rows: {"x": {"y": 1}}, "x"),
    ],
)
def test_a_collator_that_makes_no_tensors_is_told(collate, told):
    with pytest.raises(DataError, match=told):
        taken(Loading([1, 2], collate, 1, 0, 1, 0))


def test_too_few_samples_are_told():
    with pytest.raises(DataError, match="2 replicas"):
        taken(Loading([1, 2, 3], stack, 2, 0, 2, 0, drop_last=True))
