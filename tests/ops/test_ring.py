"""Attention to keys and values that come part by part: results and every gradient of the whole, and
what is kept for the backward.
"""

import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_merak import ops
from megatron_merak.graph.sharding import local
from megatron_merak.ops.ring_parts import (
    End,
    efficient,
    efficient_back,
    flash,
    flash_back,
    part_back,
)

LENGTH = 48


class TurnBack(torch.autograd.Function):
    """What ranks have; the gradient goes to the one before each."""

    @staticmethod
    def forward(ctx, *holes):
        return tuple(hole.view_as(hole) for hole in holes)

    @staticmethod
    def backward(ctx, *grads):
        return (*grads[1:], grads[0])


def around(queries, pairs, spans, masks, scale=None):
    """Attention of all ranks, step by step. spans, masks: of (rank, source)."""
    ranks = len(queries)
    parts = [()] * ranks
    holes = [None] * ranks
    for step in range(ranks):
        found = []
        for rank in range(ranks):
            source = (rank - step) % ranks
            both = ops.ring_arrive(pairs[source], parts[rank][1]) if step else pairs[source]
            known = (parts[rank][:3], spans(rank, source), scale)
            found.append(ops.ring_part(queries[rank], both, masks(rank, source), *known))
        parts = found
        if step:
            passed = [
                ops.ring_pass_back(part[3], hole) for part, hole in zip(parts, holes, strict=True)
            ]
            holes = TurnBack.apply(*passed)
    ends = zip(parts, pairs, holes, strict=True)
    return [ops.ring_end(*part[:3], both, hole) for part, both, hole in ends]


def drawn(heads=(4, 2), widths=(8, 8), dtype=torch.float64, samples=2):
    torch.manual_seed(3)
    sizes = (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])
    made = [torch.randn(samples, n, LENGTH, width, dtype=dtype) for n, width in sizes]
    return [each.requires_grad_() for each in made]


def in_order(x, rank, ranks):
    return local.take(x, 2, (LENGTH,), rank, ranks)


def from_ends(x, rank, ranks):
    return local.take_ends(x, 2, (LENGTH,), rank, ranks)


def everything(rank, source, size):
    return (0, size, 0, size, False)


def causal_in_order(rank, source, size):
    if source == rank:
        return (0, size, 0, size, True)
    return (0, size, 0, size, False) if source < rank else (0, 0, 0, 0, False)


def causal_from_ends(rank, source, size):
    if source == rank:
        return (0, size, 0, size, True)
    half = size // 2
    return (0, size, 0, half, False) if source < rank else (half, size, 0, size, False)


def ring(query, key, value, ranks, take, span, mask=None, scale=None):
    """Attention by ranks, put together again."""
    own = [take(query, rank, ranks) for rank in range(ranks)]
    pairs = [take(torch.cat((key, value), -1), rank, ranks) for rank in range(ranks)]

    def masks(rank, source):
        if mask is None:
            return None
        rows = take(mask, rank, ranks) if mask.shape[2] > 1 else mask
        return take(rows.mT, source, ranks).mT

    size = LENGTH // ranks
    ends = around(own, pairs, lambda *places: span(*places, size), masks, scale)
    whole = torch.cat(ends, 2)
    return local.by_position(whole, 2, (LENGTH,), ranks) if take is from_ends else whole


def compare(found, wanted, operands):
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    ours = torch.autograd.grad((found * weights).sum(), operands)
    theirs = torch.autograd.grad((wanted * weights).sum(), operands)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("take", "span"),
    [(in_order, causal_in_order), (from_ends, causal_from_ends), (in_order, everything)],
    ids=["causal, in order", "causal, from both ends", "not causal"],
)
@pytest.mark.parametrize(
    ("heads", "widths"), [((4, 4), (8, 8)), ((6, 2), (8, 8)), ((3, 3), (8, 4))]
)
def test_parts_make_up_the_whole(ranks, take, span, heads, widths):
    operands = drawn(heads, widths)
    found = ring(*operands, ranks, take, span, scale=0.3)
    causal = span is not everything
    wanted = F.scaled_dot_product_attention(*operands, is_causal=causal, scale=0.3, enable_gqa=True)
    compare(found, wanted, operands)


def masks():
    """Masks of rows that see all, some, or none of the keys of a part."""
    places = torch.arange(LENGTH)
    distance = places[:, None] - places
    documents = places // 11
    window = (distance >= 0) & (distance < 7)
    packed = (distance >= 0) & (documents[:, None] == documents)
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64)
    lowest = torch.finfo(torch.float64).min
    return {
        "window": window[None, None],
        "documents": packed[None, None],
        "padding": torch.stack((places > 20, places > -1))[:, None, None],
        "of heads": bias.masked_fill(distance < 0, -torch.inf),
        "lowest number": torch.zeros(1, 1, LENGTH, LENGTH).double().masked_fill(~window, lowest),
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("take", [in_order, from_ends])
def test_masks_are_those_of_the_whole(name, take):
    mask = masks()[name]
    operands = drawn()
    found = ring(*operands, 4, take, everything, mask)
    wanted = F.scaled_dot_product_attention(*operands, mask, enable_gqa=True)
    compare(found, wanted, operands)


def test_queries_that_see_nothing_have_zeros():
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[:, :, 5] = False
    operands = drawn()
    found = ring(*operands, 2, in_order, everything, mask)
    assert found[:, :, 5].count_nonzero() == 0
    grads = torch.autograd.grad(found.sum(), operands)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[0][:, :, 5].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_low_precision_are_wide(dtype):
    """As near to fp64 as rounding the result and the gradients once or twice allows."""
    operands = drawn(dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in operands]
    found = ring(*operands, 4, from_ends, causal_from_ends)
    wanted = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    unit = torch.finfo(dtype).eps
    assert (found - wanted).abs().max() < unit * wanted.abs().max()
    ours = torch.autograd.grad(found.sum(), operands)
    theirs = torch.autograd.grad(wanted.sum(), exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 4 * unit * other.abs().max()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_kept_is_of_one_part(ranks):
    """Queries, keys, values, the result and a statistic of each query, however many ranks there are."""
    query, key, value = drawn((4, 2), dtype=torch.float32)
    own = from_ends(query, 0, ranks)
    pairs = [from_ends(torch.cat((key, value), -1), rank, ranks) for rank in range(ranks)]
    size = LENGTH // ranks
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        part = ops.ring_part(own, pairs[0], None, (), causal_from_ends(0, 0, size))
        hole = None
        for source in range(1, ranks):
            both = ops.ring_arrive(pairs[source], part[1])
            part = ops.ring_part(own, both, None, part[:3], causal_from_ends(0, source, size))
            hole = ops.ring_pass_back(part[3], hole)
            assert part[3].untyped_storage().nbytes() == both.element_size()
        ops.ring_end(*part[:3], pairs[0], hole)
    heads = 2 * 4 * size
    assert sum(kept.values()) == 4 * (heads * 8 + 2 * 2 * size * 16 + heads * 8 + heads)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_parts_on_a_gpu(masked):
    """By torch's flash kernel, and with a mask by the memory-efficient one."""
    operands = [each.detach().cuda().requires_grad_() for each in drawn(dtype=torch.bfloat16)]
    exact = [each.detach().double().requires_grad_() for each in operands]
    mask = masks()["window"].cuda() if masked else None
    take, span = (in_order, everything) if masked else (from_ends, causal_from_ends)
    found = ring(*operands, 4, take, span, mask)
    wanted = F.scaled_dot_product_attention(*exact, mask, is_causal=not masked, enable_gqa=True)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    ours = torch.autograd.grad(found.sum(), operands)
    theirs = torch.autograd.grad(wanted.sum(), exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 0.05 * other.abs().max()


@pytest.mark.parametrize("masked", [None, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("keys", [64, 32])
def test_a_gpu_has_kernels_for_parts(keys, masked):
    """As far as fake tensors say: shapes, dtypes and arguments."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 64, 16, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(2, 2, keys, 16, dtype=torch.bfloat16, device="cuda")
        value = torch.empty(
            2, 2, keys, 16 if masked is None else 8, dtype=query.dtype, device="cuda"
        )
        result = torch.empty(2, 4, 64, value.shape[-1], dtype=query.dtype, device="cuda")
        log = torch.empty(2, 4, 64, device="cuda")
        end = End(result, result, log, log)
        if masked is None:
            sums, stats = flash(query, key, value, keys == 64, 0.25)
            found = flash_back(query, key, value, end, keys == 64, 0.25)
        else:
            mask = torch.empty(1, 1, 64, keys, dtype=masked, device="cuda")
            sums, stats = efficient(query, key, value, mask, causal=False, scale=0.25)
            found = efficient_back(query, key, value, mask, end, causal=False, scale=0.25)
    assert (sums.shape, sums.dtype) == (result.shape, torch.float32)
    assert (stats.shape, stats.dtype) == ((2, 4, 64, 2), torch.float32)
    assert [grad.shape for grad in found] == [query.shape, key.shape, value.shape]
    assert {grad.dtype for grad in found} == {torch.bfloat16}


class Largest(TorchDispatchMode):
    """The number of operations, and the most bytes of what they made at one time."""

    def __init__(self):
        super().__init__()
        self.operations = self.now = self.most = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in (result,) if isinstance(result, torch.Tensor) else ():
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = weakref.ref(storage, self.ended(storage))
                self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    def ended(self, storage):
        key, size = storage._cdata, storage.nbytes()

        def free(_):
            del self.alive[key]
            self.now -= size

        return free


@pytest.mark.parametrize("length", [200, 1024, 2100])
@pytest.mark.parametrize("causal", [True, False])
def test_without_values_only_the_last_blocks_are_computed_and_need_as_much_memory(length, causal):
    found = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            query, grad = (torch.ones(1, 4, length, 8, dtype=torch.bfloat16) for _ in range(2))
            pair = torch.ones(2, 1, 2, length, 8, dtype=torch.bfloat16)
            statistics = torch.zeros(2, 1, 4, length)
            end = End(grad, grad, *statistics)
            with Largest() as largest:
                grads = part_back(query, *pair, None, end, causal=causal, scale=1.0)
        found.append((largest.most, [(x.shape, x.dtype) for x in grads]))
    assert found[0] == found[1]
    assert largest.operations < 500
