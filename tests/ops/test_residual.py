"""Bias, dropout and residual add: the sum against PyTorch's, the mask bit by bit and as chance."""

import pytest
import torch
import torch.nn.functional as F

from megatron_merak.ops import bias_dropout_add, dropout_of_parts
from megatron_merak.ops.residual import _random_bits
from tests.ops.truth import KERNELS, TYPES, assert_rounded, gradients, in_double, random, threads

twin = torch.ops.merak_torch
both = pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
GOLDEN = 0x9E3779B97F4A7C15
# Odd widths, rows that begin in the middle of a pair, more than a tile of 256, more rows than a
# block of sums.
SHAPES = [(4, 5, 16), (7, 1), (3, 515), (129, 257), (1, 1), (0, 8), (2, 0, 8)]


def seed_of(value=12345):
    return torch.tensor([value])


def masks(ops, shape, p, seed, dtype=torch.float32):
    return ops.bias_dropout_add(torch.ones(shape, dtype=dtype), None, None, p, seed)


# ---- the mask ------------------------------------------------------------------------------------
def test_bits_are_those_of_splitmix64():
    """The generator's published first numbers for the seed 1234567; an element takes a half, the
    lower one first.
    """
    numbers = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    # the generator steps before its first number, an element's place is 0
    advanced = (1234567 + GOLDEN) % 2**64
    bits = _random_bits(seed_of(advanced - 2**64 if advanced >= 2**63 else advanced), 8).tolist()
    assert [low + (high << 32) for low, high in zip(bits[::2], bits[1::2], strict=True)] == list(
        numbers
    )


@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_and_twin_drop_the_same_elements(shape, p):
    for number in (0, -1, 2**63 - 1, 987654321012345678):
        ours, theirs = (masks(ops, shape, p, seed_of(number)) for ops in KERNELS)
        assert torch.equal(ours, theirs)
        found, _ = torch.ops.merak.bias_dropout_add_backward(
            torch.ones(shape), p, seed_of(number), False
        )
        assert torch.equal(found, ours)


def drawn(function, *args):
    """What a function returns, and the random state after it."""
    torch.manual_seed(5)
    return function(*args), torch.get_rng_state()


@pytest.mark.parametrize("chunks", [[(0,), (1,), (2,), (3,)], [(0, 3), (1, 2)]])
@pytest.mark.parametrize("samples", [1, 3])
def test_parts_of_sequences_have_their_part_of_the_mask(samples, chunks):
    """All ranks draw the same numbers, as many as for the full value."""
    x, residual = torch.rand(2, samples, 16, 6)
    bias = torch.rand(6)
    added, state_of_sum = drawn(bias_dropout_add, x, bias, residual, 0.3, True)
    dropped, state = drawn(F.dropout, x, 0.3)
    for own_chunks in chunks:
        own, more, wanted, kept = (
            torch.cat([each.chunk(4, 1)[chunk] for chunk in own_chunks], 1)
            for each in (x, residual, added, dropped)
        )
        place = (samples, own_chunks, 4)
        for found, expected in (
            (drawn(bias_dropout_add, own, bias, more, 0.3, True, place), (wanted, state_of_sum)),
            (drawn(dropout_of_parts, own, 0.3, True, place), (kept, state)),
        ):
            assert all(map(torch.equal, found, expected))


def test_the_mask_is_a_function_of_place_alone():
    """Whatever the shape, the strides, the type, the device's number of threads, or which rows are
    computed.
    """
    flat = masks(torch.ops.merak, (6000,), 0.3, seed_of())
    assert torch.equal(masks(torch.ops.merak, (200, 30), 0.3, seed_of()).flatten(), flat)
    assert torch.equal(masks(torch.ops.merak, (100,), 0.3, seed_of()), flat[:100])
    assert torch.equal(
        masks(torch.ops.merak, (6000,), 0.3, seed_of(), torch.bfloat16) > 0, flat > 0
    )
    transposed = torch.ops.merak.bias_dropout_add(
        torch.ones(30, 200).t(), None, None, 0.3, seed_of()
    )
    assert torch.equal(transposed.flatten(), flat)
    one, *more = threads(lambda: [masks(torch.ops.merak, (3000, 64), 0.3, seed_of())])
    assert all(torch.equal(one[0], other[0]) for other in more)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_chance(p):
    """The number kept, of all and of each column; neighbours, rows, and masks of neighbouring seeds
    independent.

    With 2^18 elements each statistic is normal; the bound of 5 standard deviations fails once in a
    million times, and the seeds are fixed.
    """
    rows, columns = 512, 512
    seeds = [seed_of(value) for value in (7, 8, 7 + 2**32)]
    drawn = [(masks(torch.ops.merak, (rows, columns), p, seed) > 0).double() for seed in seeds]
    spread = (p * (1 - p)) ** 0.5
    centred = [(mask - (1 - p)) / spread for mask in drawn]
    first = centred[0]
    assert abs(first.sum()) < 5 * (rows * columns) ** 0.5
    assert first.sum(0).abs().max() < 5 * rows**0.5 and first.sum(1).abs().max() < 5 * columns**0.5
    flat = first.flatten()
    for lag in (1, 2, 3, 4, 8, 255, 256, columns, 2 * columns):
        assert abs((flat[lag:] * flat[:-lag]).sum()) < 5 * len(flat) ** 0.5, lag
    for other in centred[1:]:
        assert abs((first * other).sum()) < 5 * len(flat) ** 0.5
        assert abs((flat[2:] * other.flatten()[:-2]).sum()) < 5 * len(flat) ** 0.5


def test_bits_are_uniform():
    """Chi-square of every byte of the 32 bits over 2^18 elements: 255 degrees of freedom, standard
    deviation 22.6.
    """
    bits = _random_bits(seed_of(5), 2**18)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 255, minlength=256).double()
        assert abs(((counts - 1024) ** 2 / 1024).sum() - 255) < 5 * 22.6


# ---- the sum -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_round_once(shape, p, dtype):
    x, bias, residual, upstream = random(shape, shape[-1:], shape, shape, dtype=dtype)
    seed = seed_of() if p else None
    mask = masks(twin, shape, p, seed).double() > 0 if p else torch.ones(shape)
    roundings = 1 if compiled() else 4
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        given = [t for t, want in zip((bias, residual), wanted, strict=True) if want]

        def split(rest, wanted=wanted):
            rest = list(rest)
            return tuple(rest.pop(0) if want else None for want in wanted)

        def ours(x, *rest):
            bias, residual = split(rest)
            return torch.ops.merak.bias_dropout_add(x, bias, residual, p, seed)

        def formula(x, *rest):
            bias, residual = split(rest)
            made = (x if bias is None else x + bias) * mask / (1 - p)
            return made if residual is None else made + residual

        found, truth = (
            gradients(ours, (x, *given), upstream),
            in_double(formula, (x, *given), upstream),
        )
        for a, exact in zip(found, truth, strict=True):
            assert a.dtype == dtype
            assert_rounded(a, exact, 32, roundings)


def compiled():
    return torch._C._dispatch_has_kernel_for_dispatch_key("merak::bias_dropout_add", "CPU")


def test_the_twin_equals_three_autograd_ops():
    x, bias, residual, upstream = random((6, 5, 8), (8,), (6, 5, 8), (6, 5, 8))
    kept = masks(twin, x.shape, 0.25, seed_of()) > 0
    apart = gradients(
        lambda x, bias, residual: residual + torch.where(kept, (x + bias) * (1 / 0.75), 0.0),
        (x, bias, residual),
        upstream,
    )
    assert torch.equal(twin.bias_dropout_add(x, bias, residual, 0.25, seed_of()), apart[0])
    grad, grad_bias = twin.bias_dropout_add_backward(upstream, 0.25, seed_of(), True)
    assert torch.equal(grad, apart[1]) and torch.equal(grad_bias, apart[2])


def test_gradient_in_double_precision():
    x, bias, residual = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5), (5,), (3, 5))
    )

    def fn(*tensors):
        torch.manual_seed(0)
        return bias_dropout_add(*tensors, 0.4, True)

    assert torch.autograd.gradcheck(fn, (x, bias, residual))


@both
def test_strided_inputs_and_gradients(ops):
    x, residual, upstream = random((6, 8), (6, 8), (6, 8))
    bias = torch.linspace(-1, 1, 16)[::2]

    def fn(x, bias, residual):
        return ops.bias_dropout_add(x, bias, residual, 0.3, seed_of())

    views = x.t().contiguous().t(), bias, torch.cat((residual, residual), 1)[:, :8]
    strided = gradients(fn, views, upstream.t().contiguous().t())
    dense = gradients(fn, [view.contiguous() for view in views], upstream)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


@both
def test_what_is_dropped_is_gone(ops):
    x = torch.full((4, 300), torch.inf)
    out = ops.bias_dropout_add(x, None, torch.ones(4, 300), 0.5, seed_of())
    assert ((out == 1) | (out == torch.inf)).all() and 0.4 < (out == 1).double().mean() < 0.6


# ---- the face ------------------------------------------------------------------------------------
def test_seeds_come_from_the_default_generator():
    x = torch.ones(40, 40)

    def drop():
        return bias_dropout_add(x, None, None, 0.5, True)

    torch.manual_seed(3)
    first, second = drop(), drop()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    with torch.random.fork_rng():
        assert torch.equal(drop(), first)
    assert torch.equal(drop(), first) and torch.equal(drop(), second)


def test_nothing_is_drawn_without_dropout():
    x, bias, residual = random((4, 6), (6,), (4, 6))
    before = torch.get_rng_state()
    for arguments in ((x, bias, residual, 0.5, False), (x, bias, residual, 0.0, True)):
        assert torch.equal(bias_dropout_add(*arguments), residual + (x + bias))
    assert torch.equal(bias_dropout_add(x, None, residual, 0.5, False), residual + x)
    assert bias_dropout_add(x, None, None, 0.5, False) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_is_kept_and_no_mask():
    x, bias, residual = (t.requires_grad_() for t in random((4, 6), (6,), (4, 6)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((t.dtype, t.numel())) or t, lambda t: t
    ):
        bias_dropout_add(x, bias, residual, 0.5, True)
        assert saved == [(torch.int64, 1)]
        bias_dropout_add(x, bias, residual, 0.0, True)
    assert saved == [(torch.int64, 1)]
