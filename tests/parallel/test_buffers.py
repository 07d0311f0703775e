import pytest
import torch

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer

GROUPS = [
    [BufferEntry("a.weight", (10, 13), True), BufferEntry("a.bias", (13,), False)],
    [BufferEntry("b.norm", (5,), False), BufferEntry("b.weight", (64,), True), BufferEntry("b.gate", (3, 3), True)],
    [BufferEntry("c.scale", (), False, counted=False)],
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
    assert [tuple(r) for r in buffer.ranges] == [(0, 192, True), (192, 256, False), (256, 384, True), (384, 512, False)]
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
        inside = [n for n, slot in buffer.slots.items() if bucket.start <= slot.start and slot.stop <= bucket.stop]
        assert sorted(inside) == sorted(bucket.names)
        if bucket is not buffer.buckets[-1]:
            assert bucket.stop - bucket.start >= (bucket_elements or buffer.size)
    assert stop == 0
    assert sum(len(bucket.names) for bucket in buffer.buckets) == len(buffer.slots)
    assert len(buffer.buckets) == {None: 1, 1: 6, 65: 3, 129: 2, 300: 2, 10_000: 1}[bucket_elements]
    assert buffer.buckets[0].names[0] == "c.scale"


def test_adjacent_groups_of_one_kind_merge_into_one_range():
    groups = [[BufferEntry(f"layer.{i}.weight", (8, 8), True)] for i in range(3)]
    assert [tuple(r) for r in ParameterBuffer(groups, torch.float32, "cpu").ranges] == [(0, 192, True)]


def test_a_rank_without_parameters():
    buffer = ParameterBuffer([[], []], torch.float32, "cpu", 10)
    assert (buffer.size, buffer.slots, buffer.buckets, buffer.ranges) == (0, {}, (), ())
    buffer.main_grad.zero_()


def test_a_name_used_twice_is_caught():
    entry = BufferEntry("w", (2,), True)
    with pytest.raises(AssertionError, match="w is listed twice"):
        ParameterBuffer([[entry], [entry]], torch.float32, "cpu")
