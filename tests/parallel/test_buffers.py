import pytest
import torch

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer

GROUPS = [
    [BufferEntry("a.weight", (10, 13), 0), BufferEntry("a.bias", (13,), 1)],
    [
        BufferEntry("b.norm", (5,), 1),
        BufferEntry("b.weight", (64,), 0),
        BufferEntry("b.gate", (3, 3), 0),
    ],
    [BufferEntry("c.scale", (), 1, counted=False)],
]


def test_layout_by_hand():
    buffer = ParameterBuffer(GROUPS, torch.bfloat16, "cpu")
    spans = {name: (slot.start, slot.stop) for name, slot in buffer.slots.items()}
    assert spans == {
        "a.weight": (0, 130),
        "a.bias": (192, 205),
        "b.weight": (256, 320),
        "b.gate": (320, 329),
        "b.norm": (384, 389),
        "c.scale": (448, 449),
    }
    assert buffer.size == 512
    assert [tuple(r) for r in buffer.ranges] == [
        (0, 192, 0),
        (192, 256, 1),
        (256, 384, 0),
        (384, 512, 1),
    ]
    assert not buffer.slots["c.scale"].counted and buffer.slots["b.gate"].counted


def test_views_share_the_flat_storage():
    buffer = ParameterBuffer(GROUPS, torch.bfloat16, "cpu")
    assert buffer.data.dtype == torch.bfloat16 and buffer.main_grad.dtype == torch.float32
    for number, (name, slot) in enumerate(buffer.slots.items(), 1):
        assert buffer.parameter(name).shape == slot.shape and buffer.parameter(name).is_contiguous()
        buffer.parameter(name).fill_(number)
        buffer.grad(name).fill_(-number)
    expected = torch.zeros(512)
    for number, slot in enumerate(buffer.slots.values(), 1):
        expected[slot.start : slot.stop] = number
    assert torch.equal(buffer.data.float(), expected)  # padding stayed zero
    assert torch.equal(buffer.main_grad, -expected)
    buffer.main_grad.zero_()
    assert torch.equal(buffer.main_grad, torch.zeros(512))
    assert torch.equal(buffer.data.float(), expected)


@pytest.mark.parametrize("bucket_elements", [None, 1, 65, 129, 300, 10_000])
def test_buckets_tile_the_buffer_from_the_end(bucket_elements):
    buffer = ParameterBuffer(GROUPS, torch.float32, "cpu", bucket_elements)
    stop = buffer.size
    for bucket in buffer.buckets:
        assert bucket.stop == stop
        stop = bucket.start
        inside = [
            n
            for n, slot in buffer.slots.items()
            if bucket.start <= slot.start and slot.stop <= bucket.stop
        ]
        assert sorted(inside) == sorted(bucket.names)
        if bucket is not buffer.buckets[-1]:
            assert bucket.stop - bucket.start >= (bucket_elements or buffer.size)
    assert stop == 0
    assert sum(len(bucket.names) for bucket in buffer.buckets) == len(buffer.slots)
    assert len(buffer.buckets) == {None: 1, 1: 6, 65: 3, 129: 2, 300: 2, 10_000: 1}[bucket_elements]
    assert buffer.buckets[0].names[0] == "c.scale"


def test_adjacent_groups_of_one_kind_merge_into_one_range():
    groups = [[BufferEntry(f"layer.{i}.weight", (8, 8), 0)] for i in range(3)]
    assert [tuple(r) for r in ParameterBuffer(groups, torch.float32, "cpu").ranges] == [(0, 192, 0)]


def test_a_rank_without_parameters():
    for shards in (1, 2):
        buffer = ParameterBuffer([[], []], torch.bfloat16, "cpu", 10, shards)
        assert (buffer.size, buffer.slots, buffer.buckets, buffer.ranges) == (0, {}, (), ())
        assert buffer.master.numel() == buffer.spread(buffer.master).numel() == 0
    buffer.main_grad.zero_()


def test_a_name_used_twice_is_caught():
    entry = BufferEntry("w", (2,), 0)
    with pytest.raises(AssertionError, match="w is listed twice"):
        ParameterBuffer([[entry], [entry]], torch.float32, "cpu")


MIXED = [
    [BufferEntry("embed", (10, 13), 0, tied=True), BufferEntry("a.weight", (40, 13), 0)],
    [
        BufferEntry("b.router", (9,), 0, fp32=True),
        BufferEntry("b.norm", (5,), 1),
        BufferEntry("b.w", (64,), 0),
    ],
    [BufferEntry("c.scale", (), 1, counted=False), BufferEntry("c.weight", (300,), 0)],
]


@pytest.mark.parametrize("bucket_elements", [None, 1, 65, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_tile_the_buffer(shards, dtype, bucket_elements):
    """Every rank lays parameters out alike, and each element that is not replicated has
    one owner.
    """
    ranks = [
        ParameterBuffer(MIXED, dtype, "cpu", bucket_elements, shards, shard)
        for shard in range(shards)
    ]
    first = ranks[0]
    assert all(
        (rank.slots, rank.size, rank.buckets) == (first.slots, first.size, first.buckets)
        for rank in ranks
    )
    assert {*first.slots} == {entry.name for group in MIXED for entry in group}
    owners = torch.zeros(first.size, dtype=torch.int64)
    for rank in ranks:
        assert rank.owned_size == sum(stop - start for start, stop, _ in rank.owned)
        for start, stop, _ in rank.owned:
            owners[start:stop] += 1
    stop = first.size
    for bucket in first.buckets:
        assert bucket.stop == stop and (bucket.stop - bucket.start) % shards == 0
        stop = bucket.start
        assert {n for n, s in first.slots.items() if bucket.start <= s.start < bucket.stop} == {
            *bucket.names
        }
        assert (owners[bucket.start : bucket.stop] == (1 if bucket.sharded else shards)).all()
    assert stop == 0
    apart = [bucket.names for bucket in first.buckets if not bucket.sharded]
    assert apart == ([("b.router",)] if dtype == torch.bfloat16 else [])
    assert ("embed",) in [bucket.names for bucket in first.buckets], (
        "its shards do not depend on its neighbours"
    )
    covered = sum(stop - start for start, stop, _ in first.ranges)
    assert covered == first.size


@pytest.mark.parametrize("shard", [0, 1])
def test_the_state_of_a_shard_goes_to_its_places_and_back(shard):
    buffer = ParameterBuffer(MIXED, torch.bfloat16, "cpu", 65, 2, shard)
    buffer.data.copy_(torch.arange(buffer.size) % 251)
    assert buffer.master.shape == (buffer.owned_size,) and buffer.master.dtype == torch.float32
    assert torch.equal(buffer.master, buffer.own(buffer.data).float())
    buffer.main_grad.fill_(-1)
    flat = buffer.spread(buffer.master)
    assert flat is buffer.main_grad and torch.equal(buffer.own(flat), buffer.master)
    assert (flat != -1).sum() == buffer.owned_size
    router = buffer.parameter("b.router")
    assert router.dtype == torch.float32 and router.data_ptr() == buffer.master.data_ptr()
    router.fill_(0.1)
    buffer.data.fill_(3)
    buffer.refresh_master()
    for name, slot in buffer.slots.items():
        own = buffer.view(buffer.spread(buffer.master), name)
        mine = torch.tensor(
            [any(a <= i < b for a, b, _ in buffer.owned) for i in range(slot.start, slot.stop)]
        )
        assert (own.flatten()[mine] == (torch.tensor(0.1) if name == "b.router" else 3.0)).all(), (
            name
        )
